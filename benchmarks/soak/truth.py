# SPDX-License-Identifier: Apache-2.0
"""The pictures of a soak and the right answers to all questions about them, from an engine without the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from benchmarks.soak.judge import Answer, Question
from benchmarks.soak.parts import Call, EngineProcess, Layout
from benchmarks.soak.reference import ARGUMENTS, MERGED_PIXELS, Found, Plan

SMALL, WIDE, LARGE = (112, 112), (168, 112), (224, 224)
"""16, 24 and 64 rows: all different, so that a picture of another size never fits."""

_SIZES = [SMALL] * 8 + [WIDE, LARGE]
_CATS = ("cat", "dog")
"""Names used with arguments: vLLM hashes both into 64 hex digits."""

_ROW_BYTES = 1024
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Truth:
    """What the soak knows beforehand. A client sends `urls` or `placeholders` for a picture."""

    urls: Sequence[str]
    placeholders: Sequence[str]
    right: Mapping[Question, Answer]
    rows: Mapping[tuple[int, str], int]
    identifiers: Mapping[tuple[int, str], str]
    """vLLM's own identifiers for (picture, arguments)."""
    of_names: Mapping[tuple[str, str], str]
    """vLLM's own identifiers for (a client's name, arguments)."""
    pictures: Sequence[int]
    """Pictures of all sizes whose answers differ from all others."""
    small: Sequence[int]
    """Those of the most common size."""
    argued: Sequence[int]
    """Those that may be asked about with arguments."""
    pairs: Sequence[tuple[int, int]]


def plan(pictures: int, checkpoints: Sequence[Path], chance: Random) -> Plan:
    sizes = [_SIZES[number % len(_SIZES)] for number in range(pictures)]
    small = [number for number, size in enumerate(sizes) if size == SMALL]
    pairs = [(chance.choice(small), chance.randrange(pictures)) for _ in range(max(6, pictures // 8))]
    names = [(name, arguments) for name in _CATS for arguments in ARGUMENTS if arguments]
    return Plan(sizes, list(dict.fromkeys(pairs)), small[: max(6, pictures // 8)], names, list(map(str, checkpoints)))


def bytes_of(plan: Plan) -> int:
    """Total size of all entries of the plan, the same in every tier."""
    rows = [_rows(size, "") for size in plan.sizes]
    rows += [_rows(plan.sizes[number], name) for name in ARGUMENTS if name for number in plan.with_arguments]
    return sum(_HEADER_BYTES + _ROW_BYTES * each for each in rows)


def find(model: Path, plan: Plan, folder: Path) -> Truth:
    """Ask an engine without the cache, in its own process: half a minute for 60 pictures and 3 sets of weights."""
    folder.mkdir(parents=True)
    (folder / "plan").write_bytes(msgspec.json.encode(plan))
    with EngineProcess(model, Layout.ONE_PROCESS, folder=folder, timeout_s=600) as engine:
        files = {"plan": str(folder / "plan"), "into": str(folder / "found")}
        engine.do(Call("benchmarks.soak.reference:answer", files))
        engine.kill()
    return _truth(plan, msgspec.json.decode((folder / "found").read_bytes(), type=Found))


def _truth(plan: Plan, found: Found) -> Truth:
    unclear = {(question.pictures, question.arguments) for question in found.unclear}
    alone = {number for number in range(len(plan.sizes)) if ((number,), "") not in unclear}
    argued = [number for number in plan.with_arguments if not any(((number,), name) in unclear for name in ARGUMENTS)]
    small = [number for number in sorted(alone) if plan.sizes[number] == SMALL]
    if len(argued) < 3 or len(small) < len(plan.sizes) // 3:
        raise RuntimeError(
            f"too few pictures can be told apart: {len(small)} of {len(plan.sizes)}, {len(argued)} argued"
        )
    return Truth(
        urls=found.urls,
        placeholders=found.placeholders,
        right=dict(found.rights),
        rows={(number, name): _rows(size, name) for number, size in enumerate(plan.sizes) for name in ARGUMENTS},
        identifiers={(number, arguments): name for number, arguments, name in found.identifiers},
        of_names={(name, arguments): identifier for name, arguments, identifier in found.of_names},
        pictures=sorted(alone),
        small=small,
        argued=argued,
        pairs=[pair for pair in plan.pairs if (pair, "") not in unclear],
    )


def _rows(size: tuple[int, int], arguments: str) -> int:
    """Rows of a picture. A small one has 4 with "fewer" and 64 with "more"; no other size is asked about with these."""
    if arguments:
        return {"fewer": 4, "more": 64}[arguments]
    return size[0] * size[1] // MERGED_PIXELS**2
