# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encode-prefill-decode proxy, unmodified: an example in its source archive, not part of any wheel."""

import hashlib
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.testbed.models import ROOT
from benchmarks.testbed.servers.redis import free_port
from benchmarks.testbed.vllm_sources import NotFetched, source_archive
from benchmarks.testbed.waiting import wait_for_server

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
SCRIPT = f"vllm-{VERSION}/examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py"


def proxy_script(folder: Path = ROOT / ".models") -> str:
    """The proxy's source, from the archive in this folder, which is fetched if missing. Raises NotFetched."""
    archive = source_archive(VERSION, folder)
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise NotFetched(f"{archive} is not vLLM's source archive: its sha256 is {found}, not {SHA256}. Delete it")
    with tarfile.open(archive) as members:
        script = members.extractfile(SCRIPT)
        assert script is not None
        return script.read().decode()


class Proxy:
    """The proxy in its own process, in front of servers at these URLs. `folder` gets its script and its log."""

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
        wait_for_server("vLLM's proxy", self._process, self._answers, self.log, self.kill)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except urllib.error.HTTPError:
            return True  # it answers, whatever it reports about the servers
        except OSError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
