# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus for tests: Debian's package, on a free port, with its data in the test's folder."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.testbed.servers.redis import free_port
from benchmarks.testbed.waiting import wait_for_server

Json = dict[str, Any]


class Prometheus:
    """Scrapes `targets` (host:port) once a second, with the alert rules of `rules`."""

    def __init__(self, folder: Path, targets: Sequence[str], rules: Path) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise RuntimeError("no program `prometheus`: Debian's package of that name has it")
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{free_port()}"
        scrape = {"job_name": "vllm", "static_configs": [{"targets": list(targets)}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))
        log = folder / "log"
        options = {
            "config.file": folder / "prometheus.yaml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": self.url.removeprefix("http://"),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [program, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait_for_server("Prometheus", self._process, self._ready, log, self.close)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **parameters: object) -> Any:
        """The HTTP API's answer to `/api/v1/<path>`."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """Current results of an instant query: one value per series."""
        return [float(series["value"][1]) for series in self.ask("query", query=query)["result"]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
