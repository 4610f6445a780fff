# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check MODEL=` with real engines on a CPU, so that on a real card only the card is untested."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo
from benchmarks.gpu_check import model
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.model import Engines
from tests import warm_start
from tests.engine.rig import needs_v2_runner

MODEL = "qwen2vl"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate folder, in case `make demo` runs at the same time."""
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    monkeypatch.setattr(demo, "ENTRIES", tmp_path / "entries")


def proves_what_it_is_there_for(found: dict[str, Any]) -> None:
    """Each photograph is encoded without the cache and with an empty cache, and never again."""
    assert found["wrong"] == ""
    encodes = {name: found[name]["encodes"] for name in ("off", "cold", "repeat", "restart")}
    assert encodes == {"off": 6, "cold": 6, "repeat": 0, "restart": 0}
    assert (found["repeat"]["loads"], found["restart"]["loads"]) == ({"cpu": 6}, {"disk": 6})
    assert all(found[name]["tokens_equal"] and found[name]["ttft_ms_median"] > 0 for name in encodes)


def test_an_engine_is_run_without_the_cache_cold_repeated_and_restarted() -> None:
    found = model.run(MODEL, Engines({"V1": {}}, {"begin": warm_start.begin}), print)
    proves_what_it_is_there_for(found["V1"])
    assert model.is_right(found)
    assert len([line for line in model.table(found).splitlines() if line.startswith("V1  ")]) == 4


@pytest.mark.slow
@needs_v2_runner
@pytest.mark.timeout(1200)  # nine engines, of which three import vLLM in each process
def test_both_model_runners_are_run_after_the_checks_of_the_card(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--card", "tests.cuda:stand_in_card", "--quick", "--model", MODEL]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["right"]
    assert list(found["model"]) == ["V2", "V1"]
    for runner in found["model"].values():
        proves_what_it_is_there_for(runner)


def test_an_engine_that_does_not_start_even_without_the_cache_is_not_run_and_proves_nothing() -> None:
    found = model.run(MODEL, Engines({"V1": {}}, {"begin": warm_start.begin, "max_model_len": -7}), print)
    assert "without the cache, either" in str(found["V1"]["not_run"])
    assert not model.is_right(found)


@pytest.mark.slow
def test_an_engine_that_fails_only_with_the_cache_is_reported_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_EC_LOAD_DEADLINE_MS", "never")
    found = model.run(MODEL, Engines({"V1": {}}, {"begin": warm_start.begin}), print)
    assert "without the cache one starts" in str(found["V1"]["wrong"])
    assert not model.is_right(found)
