# SPDX-License-Identifier: Apache-2.0
"""The wheel, as a user installs it next to an existing vLLM."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.testbed.models import ROOT
from lmcache_ec.version import __version__

FOUND = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
import lmcache_ec
print(ECConnectorFactory._registry["ECLMCacheConnector"]().__name__, lmcache_ec.__version__, lmcache_ec.__file__)
"""


def run(*command: str, folder: Path) -> str:
    """Run a command outside the clone, with nothing of the clone on the path."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installs_beside_vllm_and_vllm_finds_the_connector_in_it(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    copy = tmp_path / "copy"  # setuptools leaves files in the folder, and would reuse them
    for name in ("lmcache_ec", "adapters"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy), folder=tmp_path)
    [wheel] = tmp_path.glob("lmcache_ec-*.whl")
    assert wheel.name == f"lmcache_ec-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as members:
        packed = {name for name in members.namelist() if ".dist-info/" not in name}
    ours = {f"lmcache_ec/{file.relative_to(ROOT)}" for file in (ROOT / "adapters").rglob("*.py")}
    ours |= {str(file.relative_to(ROOT)) for file in (ROOT / "lmcache_ec").rglob("*.py")}
    assert packed == ours | {"lmcache_ec/py.typed"}
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(venv), folder=tmp_path)
    python = venv / "bin" / "python"
    run(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel), folder=tmp_path)
    [site] = venv.glob("lib/python*/site-packages")
    # Behind the wheel on the path. Only a path: .pth files in it, such as the editable install's, are not read, but
    # that of `tests.cpu_torch` is needed.
    shim = "import torchvision_ops\n" if find_spec("torchvision_ops") else ""
    (site / "beneath.pth").write_text(f"{sysconfig.get_path('purelib')}\n{shim}")
    name, version, file = run(str(python), "-c", FOUND, folder=tmp_path).splitlines()[-1].split()
    assert (name, version) == ("ECLMCacheConnector", __version__)
    assert Path(file).is_relative_to(site)
    report = run(str(venv / "bin" / "lmcache-ec"), "doctor", folder=tmp_path)
    assert "lmcache_ec.adapters.vllm.plugin:register" in report
    assert __version__ in report
