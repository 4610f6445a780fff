# SPDX-License-Identifier: Apache-2.0
"""What `make demo` prints about a MODEL that it cannot run."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.models import MODELS, ROOT


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file, and a folder that holds one, neither of which is a checkpoint."""
    file = tmp_path / "notes.txt"
    file.write_text("")
    return file


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gemma4", "neither a name that is known here nor a folder"),
        ("", "neither a name that is known here nor a folder"),
        ("/no/such/checkpoint", "neither a name that is known here nor a folder"),
        ("{file}", "neither a name that is known here nor a folder"),
        ("{folder}", "no checkpoint, there is no config.json in this folder"),
        ("whisper", "takes sound, and the demo shows photographs"),
    ],
)
def test_a_model_that_the_demo_cannot_use_is_named_in_one_line_with_what_is_accepted(
    text: Path, model: str, expected: str
) -> None:
    given = model.format(file=text, folder=text.parent)
    command = [sys.executable, "-m", "benchmarks.demo", "--model", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert f"MODEL={given} " in line
    assert expected in line
    assert all(name in line for name in MODELS.keys() - {"qwen2audio", "whisper"})


def test_the_folder_of_a_checkpoint_and_every_other_name_are_accepted(text: Path) -> None:
    from benchmarks.demo import what_is_wrong

    (text.parent / "config.json").write_text("{}")
    assert what_is_wrong(str(text.parent)) is None
    assert not [name for name in MODELS.keys() - {"qwen2audio", "whisper"} if what_is_wrong(name)]
