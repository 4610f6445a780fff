# SPDX-License-Identifier: Apache-2.0
"""Makes torch's companion packages importable with a CPU build of torch. `make env` runs it after pip.

Without PyTorch's index of CPU wheels, pip installs CUDA builds of torchvision, torchaudio and torchcodec next to
torch's CPU build. Their libraries do not load. vLLM and transformers work without the last two, but import whatever is
installed. If everything imports, nothing is changed.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SHIM = Path(__file__).with_name("torchvision_ops.py")


def failure(package: str) -> str:
    """Last line of the error from importing the package, or an empty string."""
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def declare_operators() -> None:
    site = Path(sysconfig.get_path("purelib"))
    shutil.copy(SHIM, site / SHIM.name)
    (site / f"{SHIM.stem}.pth").write_text(f"import {SHIM.stem}\n")


def main() -> None:
    if "operator torchvision::nms does not exist" in failure("torchvision"):
        declare_operators()
        print("torchvision is a CUDA build beside torch's CPU build: declared the two operators that it misses")
    if error := failure("torchvision"):
        sys.exit(f"torchvision does not import: {error}")
    for optional in ("torchaudio", "torchcodec"):
        if failure(optional).startswith("OSError"):
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", optional], check=True)
            print(f"{optional} is a CUDA build beside torch's CPU build and does not import: removed, nothing needs it")


if __name__ == "__main__":
    main()
