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
"""16, 24 and 64 rows. No two have the same number of rows: then a picture of another size never fits."""

_SIZES = [SMALL] * 8 + [WIDE, LARGE]
_CATS = ("cat", "dog")
"""Names that come with arguments: vLLM makes 64 hex digits of both."""

_ROW_BYTES = 1024
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Truth:
    """What the soak knows beforehand. `urls` and `placeholders` are what a client sends for a picture."""

    urls: Sequence[str]
    placeholders: Sequence[str]
    right: Mapping[Question, Answer]
    rows: Mapping[tuple[int, str], int]
    identifiers: Mapping[tuple[int, str], str]
    """vLLM's own names for (picture, arguments)."""
    of_names: Mapping[tuple[str, str], str]
    """vLLM's own names for (a client's name, arguments)."""
    pictures: Sequence[int]
    """Those that can be told apart from all others; of every size."""
    small: Sequence[int]
    """Of these the ones of the most common size."""
    argued: Sequence[int]
    """Of these the ones that may be asked about with arguments."""
    pairs: Sequence[tuple[int, int]]


def plan(pictures: int, checkpoints: Sequence[Path], chance: Random) -> Plan:
    sizes = [_SIZES[number % len(_SIZES)] for number in range(pictures)]
    small = [number for number, size in enumerate(sizes) if size == SMALL]
    pairs = [(chance.choice(small), chance.randrange(pictures)) for _ in range(max(6, pictures // 8))]
    names = [(name, arguments) for name in _CATS for arguments in ARGUMENTS if arguments]
    return Plan(sizes, list(dict.fromkeys(pairs)), small[: max(6, pictures // 8)], names, list(map(str, checkpoints)))


def bytes_of(plan: Plan) -> int:
    """What all entries of the plan take, in every tier."""
    rows = [_rows(size, "") for size in plan.sizes]
    rows += [_rows(plan.sizes[number], name) for name in ARGUMENTS if name for number in plan.with_arguments]
    return sum(_HEADER_BYTES + _ROW_BYTES * each for each in rows)


def find(model: Path, plan: Plan, folder: Path) -> Truth:
    """Ask an engine without the cache, in a process of its own: half a minute for 60 pictures and 3 weights."""
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
    """Of a small picture under "fewer" 4 are left, under "more" it has 64; others are not asked about so."""
    if arguments:
        return {"fewer": 4, "more": 64}[arguments]
    return size[0] * size[1] // MERGED_PIXELS**2
