# SPDX-License-Identifier: Apache-2.0
"""All of `make gpu-check` over a stand-in for the card. Among the engine tests, since it measures and takes as long."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check import correctness
from benchmarks.gpu_check.__main__ import main


def test_every_check_is_right_and_every_figure_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--card", "tests.cuda:stand_in_card", "--quick", "--json", str(tmp_path / "found.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["right"]
    assert found["card"] == "stand-in"
    assert [check["wrong"] for check in found["checks"]] == [""] * len(correctness.CHECKS)
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert [name for name, value in figures.items() if value is None and "digest" not in name] == []
    assert figures["resident at the start"] == 32
    assert len([line for line in lines if line.startswith(("save ", "load ", "hooks, "))]) == 12
