# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encode-prefill-decode proxy, unchanged: an example in its source archive that no wheel contains.

`python -m tests.servers.epd_proxy FOLDER` fetches the archive as `pip download` finds it: by whatever index, proxy,
certificates and credentials pip is configured with. pip itself would then build the archive to learn what it needs, so
this stops at the file.
"""

import hashlib
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.models import ROOT
from tests.servers.redis import free_port

VERSION = "0.32.0"
ARCHIVE = f"vllm-{VERSION}.tar.gz"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
SCRIPT = f"vllm-{VERSION}/examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py"
_START_S = 60.0


class NotFetched(Exception):
    """vLLM's source archive is not to be had, or is another one."""


def proxy_script(folder: Path = ROOT / ".models") -> str:
    """The proxy's source, from the archive in this folder, which is fetched if it is not there. Raises NotFetched."""
    archive = folder / ARCHIVE
    if not archive.exists():
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.servers.epd_proxy", str(folder)]
        fetch = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if fetch.returncode:
            said = (fetch.stdout + fetch.stderr)[-2000:]
            raise NotFetched(
                f"The test of vLLM's own proxy needs {ARCHIVE}, vLLM's source archive. pip, as configured here, "
                f"could not fetch it, and {archive} does not exist:\n{said}"
            )
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise NotFetched(f"{archive} is not vLLM's source archive: its sha256 is {found}, not {SHA256}. Delete it")
    with tarfile.open(archive) as members:
        script = members.extractfile(SCRIPT)
        assert script is not None
        return script.read().decode()


def fetch(folder: Path) -> int:
    """Exit status."""
    from pip._internal.commands.download import DownloadCommand

    class Fetch(DownloadCommand):
        def run(self, options: Any, args: Any) -> int:
            session = self.get_default_session(options)
            finder = self._build_package_finder(options, session, ignore_requires_python=True)
            links = [found.link for found in finder.find_all_candidates("vllm") if found.link.filename == ARCHIVE]
            if not links:
                print(f"no index or folder that pip is configured with has {ARCHIVE}")
                return 1
            answer = session.get(links[0].url_without_fragment)
            answer.raise_for_status()
            partial = folder / f".{ARCHIVE}"
            partial.write_bytes(answer.content)
            partial.rename(folder / ARCHIVE)
            return 0

    return int(Fetch("fetch", "").main(["--no-deps", f"vllm=={VERSION}"]))


class Proxy:
    """The proxy in a process of its own, before servers at these URLs. `folder` gets its script and its log."""

    def __init__(self, folder: Path, encode: str, decode: str, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "disagg_epd_proxy.py"
        script.write_text(proxy_script())
        self.log = folder / "log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command: Sequence[str] = [
            *(sys.executable, str(script), "--host", "127.0.0.1", "--port", str(port)),
            *("--encode-servers-urls", encode, "--decode-servers-urls", decode, *arguments),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the proxy did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except urllib.error.HTTPError:
            return True  # it answers, whatever it says of the servers
        except OSError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    sys.exit(fetch(Path(sys.argv[1])))
