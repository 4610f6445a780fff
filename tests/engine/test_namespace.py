# SPDX-License-Identifier: Apache-2.0
"""An engine that may encode differently finds none of the entries that its predecessor stored on the same disk."""

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Generate
from benchmarks.testbed.media import Prompt
from benchmarks.testbed.models import model_path
from lmcache_ec.cli.commands import app
from tests.engine.rig import NOTHING, Reference, Rig, wait_until

MODEL = "gemma3"
PROMPT = Prompt(images=(1,))


def overwrite_vision_tower(checkpoint: Path, only: str = "") -> None:
    """Write other weights with the same names and sizes into the same file, as a training run does."""
    from safetensors.torch import load_file, save_file

    [file] = checkpoint.glob("*.safetensors")
    weights = load_file(file)
    for name in weights:
        if "vision_tower" in name and only in name:
            weights[name] = weights[name] * 1.5
    save_file(weights, file, metadata={"format": "pt"})


def begin_epoch(disk: Path, **keys: object) -> int:
    extra = json.dumps({"local_disk": str(disk), **keys})
    done = CliRunner().invoke(app, ["epoch", "--yes", "--json", "--extra", extra])
    assert done.exit_code == 0, done.output
    return int(json.loads(done.stdout)["epoch"])


def test_overwritten_weights_and_another_epoch(tmp_path: Path, reference: Reference) -> None:
    checkpoint = Path(shutil.copytree(model_path(MODEL), tmp_path / "current" / MODEL))
    disk = tmp_path / "disk"
    with Rig(checkpoint, Layout.ONE_PROCESS, tmp_path / "first", reference, disk=disk, like=MODEL) as rig:
        assert rig.ask(PROMPT) == 1
        rig.settle()
        old = reference.outputs(MODEL, [PROMPT], 8)
        overwrite_vision_tower(checkpoint)
        rig.restart()
        rig.scanned()
        report = rig.engine.do(Generate((PROMPT,)))
        assert rig.encodes(report.encodes) == 1
        assert not report.outputs[0].equals(old[0])
        assert len(rig.files()) >= 1
    with Rig(MODEL, Layout.ONE_PROCESS, tmp_path / "next", reference, disk=disk, keys={"epoch": 1}) as rig:
        assert rig.ask(PROMPT) == 1
        rig.settle()
        namespaces = {file.parents[1].name for file in rig.files()}
        assert len(namespaces) == len(rig.files()) == 3
        rig.forget()
        assert rig.ask(PROMPT) == 0

        assert begin_epoch(disk, epoch=1) == 2, "under the running engine"
        wait_until("it has followed", lambda: rig.ask(NOTHING) == 0 and rig.status()["book"]["epoch"] == 2)
        assert rig.ask(PROMPT) == 0, "vLLM's own cache knows nothing of epochs"
        rig.forget()
        assert rig.ask(PROMPT) == 1
        rig.settle()
        rig.forget()
        assert rig.ask(PROMPT) == 0
        rig.restart()
        rig.scanned()
        assert rig.ask(PROMPT) == 0
        assert len({file.parents[1].name for file in rig.files()}) == len(rig.files()) == 4
