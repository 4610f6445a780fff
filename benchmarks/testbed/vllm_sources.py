# SPDX-License-Identifier: Apache-2.0
"""vLLM's source archives: for files that no wheel contains, and for versions that cannot be installed here.

`python -m benchmarks.testbed.vllm_sources VERSION FOLDER` fetches one as `pip download` does: with the index, proxy,
certificates and credentials that pip is configured with. pip would then build the archive to determine its
dependencies; this only fetches the file.
"""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.testbed.models import ROOT


class NotFetched(Exception):
    """vLLM's source archive cannot be fetched, or is not the expected one."""


def source_archive(version: str, folder: Path = ROOT / ".models") -> Path:
    """The archive of this version, fetched if it is not in the folder. Raises NotFetched."""
    archive = folder / file_name(version)
    if not archive.exists():
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.testbed.vllm_sources", version, str(folder)]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise NotFetched(
                f"pip, as configured here, could not fetch {archive.name}, vLLM's source archive, and {archive} does "
                f"not exist:\n{(done.stdout + done.stderr)[-2000:]}"
            )
    return archive


def file_name(version: str) -> str:
    return f"vllm-{version}.tar.gz"


def fetch(version: str, folder: Path) -> int:
    """Returns the exit status. The archive is checked against the digest from the index, if there is one."""
    from pip._internal.commands.download import DownloadCommand

    name = file_name(version)

    class Fetch(DownloadCommand):
        def run(self, options: Any, args: Any) -> int:
            session = self.get_default_session(options)
            finder = self._build_package_finder(options, session, ignore_requires_python=True)
            links = [found.link for found in finder.find_all_candidates("vllm") if found.link.filename == name]
            if not links:
                print(f"no index or folder that pip is configured with has {name}")
                return 1
            answer = session.get(links[0].url_without_fragment)
            answer.raise_for_status()
            if links[0].hash_name and hashlib.new(links[0].hash_name, answer.content).hexdigest() != links[0].hash:
                print(f"{name} is not what the index says: its {links[0].hash_name} is another")
                return 1
            partial = folder / f".{name}"
            partial.write_bytes(answer.content)
            partial.rename(folder / name)
            return 0

    return int(Fetch("fetch", "").main(["--no-deps", f"vllm=={version}"]))


if __name__ == "__main__":
    sys.exit(fetch(sys.argv[1], Path(sys.argv[2])))
