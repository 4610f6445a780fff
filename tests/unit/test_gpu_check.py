# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` over a stand-in for the card, so that on a real card only the card is untested."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import demo
from benchmarks.demo import Phase
from benchmarks.gpu_check import correctness, model
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.card import Card
from benchmarks.gpu_check.correctness import Plan
from benchmarks.gpu_check.model import Engines
from benchmarks.gpu_check.report import Check, Figure, Report
from benchmarks.testbed.models import ROOT
from lmcache_ec.adapters.vllm.copier import DeviceCopier
from tests.cuda import Cuda, OnDevice, stand_in_xpu


def test_a_device_other_than_cuda_copies_every_byte_correctly(tmp_path: Path) -> None:
    """Sources that are freed and overwritten, and places that are reused, over pageable memory."""
    with stand_in_xpu() as card:
        plan = Plan(card, tmp_path, megabytes=(0.5, 2.75), large=16.0, repeats=1)
        for check in (
            correctness.every_size_in_bf16_and_fp32,
            correctness.views_of_a_batch_that_is_freed_at_once,
            correctness.a_source_overwritten_by_the_step_after,
            correctness.a_place_is_not_reused_while_a_copy_of_it_runs,
        ):
            check(plan)
        assert (card.cuda.registered, card.cuda.spins, card.cuda.stalls > 0) == ([], 0, True)


# ---- each check can fail


@pytest.fixture
def plan(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Plan]:
    """Each copy takes as long as the parameter, so that premature accesses happen before its end."""
    cuda = Cuda(running=True, device_bytes=512 << 20, pace_s=request.param)
    with OnDevice(cuda):
        card = Card(torch.device("cuda", 0), cuda, "", {})
        yield Plan(card, tmp_path, megabytes=(0.5,), large=16.0, repeats=2)


def overwrites(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceCopier, "begin_step", lambda self: None)


def holds_nothing(patch: pytest.MonkeyPatch) -> None:
    def save(self: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
        saved(self, source, destination)
        self._held.clear()

    saved = DeviceCopier.save
    patch.setattr(DeviceCopier, "save", save)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceCopier, "finish", lambda self, done: done())


def loads_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Saves are waited for: an entry sealed too early would not verify, and would never be loaded."""
    load, finish = DeviceCopier.load, DeviceCopier.finish
    loading: list[bool] = []

    def noted(self: Any, source: torch.Tensor) -> torch.Tensor:
        loading.append(True)
        return load(self, source)

    def early(self: Any, done: Callable[[], None]) -> None:
        if not loading:
            return finish(self, done)
        loading.clear()
        return done()

    patch.setattr(DeviceCopier, "load", noted)
    patch.setattr(DeviceCopier, "finish", early)


Breaks = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plan", "check", "broken"),
    [
        (0.05, correctness.every_size_in_bf16_and_fp32, does_not_wait),
        (0.05, correctness.views_of_a_batch_that_is_freed_at_once, holds_nothing),
        (0.05, correctness.a_source_overwritten_by_the_step_after, overwrites),
        # By another process.
        (0.5, correctness.a_place_is_not_reused_while_a_copy_of_it_runs, loads_are_not_waited_for),
    ],
    indirect=["plan"],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_check_finds_what_it_is_there_to_find(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, check: Callable[[Plan], None], broken: Breaks
) -> None:
    with monkeypatch.context() as patch:
        broken(patch)
        patch.setattr(correctness, "CHECKS", (check,))
        [found] = correctness.run(plan, lambda line: None)
    refused = "has come from disk" in found.wrong  # on a busy host the save is torn, too, and fails its digest
    assert "bytes differ" in found.wrong or refused, found


# ---- without a card


def test_without_a_gpu_the_check_reports_it_in_one_line() -> None:
    command = ["make", "gpu-check", f"PYTHON={sys.executable}"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("make")] or [done.stderr.splitlines()[0]]
    assert "finds no GPU" in line
    assert sys.executable in line


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("vllm", "needs vLLM"), ("skimage", "needs scikit-image"), (None, "no checkpoint, there is no config.json")],
)
def test_without_what_engines_need_the_check_reports_it_in_one_line_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    missing: str | None,
    expected: str,
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else there(name))
    assert main(["--card", "tests.cuda:stand_in_card", "--model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert (out, expected in line, f"MODEL={tmp_path}" in line, sys.executable in line) == ("", True, True, True)


def test_the_check_needs_neither_vllm_nor_lmcache_nor_an_installation() -> None:
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
for name in ("vllm", "lmcache", "lmcache_ec.adapters.vllm.metadata"):
    sys.modules[name] = None
from benchmarks.gpu_check import correctness, model, speed, child
import lmcache_ec.adapters.vllm.worker as worker
print(worker.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT / "adapters" / "vllm" / "worker.py")


# ---- its report


def test_the_table_shows_what_is_wrong_and_which_bars_are_missed() -> None:
    report = Report({"card": "a card"})
    report.checks = [Check("bytes", "", 1.0), Check("other bytes", "3 of 4 bytes differ", 2.0)]
    report.figures = [
        Figure("fast enough", 1.01, "x", 1.05, "of 3 us"),
        Figure("too slow", 2.0, "x", 1.05),
        Figure("only stated", 7.0, "ms"),
        Figure("unknown", None, "GB/s", 1.0),
    ]
    table = report.table()
    assert "3 of 4 bytes differ" in table
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "<= 1.05: yes" in rows["fast enough"]
    assert "<= 1.05: NO" in rows["too slow"]
    assert "7 ms" in rows["only stated"]
    assert "not measured" in rows["unknown"]
    assert not report.right
    assert json.loads(report.json())["figures"][1]["met"] is False


def phase_of(encodes: int, **loads: int) -> Phase:
    return Phase(
        encodes, loads, ttft_ms_median=9.0, ttft_ms=[9.0], outputs_equal=False, tokens_equal=True, bytes_stored=700
    )


GOOD = {"off": phase_of(6), "cold": phase_of(6), "repeat": phase_of(0, cpu=6), "restart": phase_of(0, disk=6)}


@pytest.mark.parametrize(
    ("phase", "change", "wrong"),
    [
        ("off", {}, ""),
        ("cold", {"encodes": 0}, "no encode was counted"),
        ("repeat", {"encodes": 1}, "encoded again though they were in memory"),
        ("restart", {"encodes": 2}, "2 pictures were encoded again after the restart"),
        ("repeat", {"tokens_equal": False}, "other tokens than without the cache: repeat"),
    ],
)
def test_an_engine_is_right_if_nothing_was_encoded_twice_and_tokens_are_equal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str, change: dict[str, Any], wrong: str
) -> None:
    phases = {**GOOD, phase: replace(GOOD[phase], **change)}
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    monkeypatch.setattr(demo, "run", lambda *_, **__: phases)
    found = model.run("a model", Engines({"V2": {}}, {}), lambda line: None)
    assert wrong in str(found["V2"]["wrong"])
    assert model.is_right(found) is (wrong == "")
    rows = [line.split()[:3] for line in model.table(found).splitlines()[1:5]]
    assert rows == [["V2", name, str(each.encodes)] for name, each in phases.items()]
    assert bool(wrong) is ("V2: WRONG" in model.table(found))


def test_a_model_that_was_asked_for_and_did_not_run_is_not_right() -> None:
    assert not model.is_right({"V2": {"not_run": "vLLM does not start"}, "V1": {"not_run": "the same"}})
    assert model.is_right({"V2": {"not_run": "vLLM does not start"}, "V1": {"wrong": ""}})
