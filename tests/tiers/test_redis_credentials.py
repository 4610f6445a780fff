# SPDX-License-Identifier: Apache-2.0
"""Users, passwords and tokens for Redis that come from files and commands, and change while a tier is in use."""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import redis
from typer.testing import CliRunner

from benchmarks.testbed.servers.redis import RedisServer, redis_server
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.cli.commands import app
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers import redis_credentials
from lmcache_ec.tiers.base import TierError, TierUnreachable
from lmcache_ec.tiers.kinds import environment_of
from lmcache_ec.tiers.redis import RedisTier, open_redis
from lmcache_ec.tiers.redis_client import connect
from lmcache_ec.tiers.redis_credentials import CommandCredentials, CredentialsUnavailable
from lmcache_ec.tiers.redis_url import RedisOptions, parse_redis_url
from tests.tiers.conformance import fetch, new_namespace, value

CANARY = "canary"


class Vault:
    """A server's user whose password changes, and a program that prints the current one."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.admin = redis.Redis(port=server.port)
        self.admin.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
        self.admin = redis.Redis(port=server.port, username="admin", password="admin")
        self.admin.execute_command("ACL", "SETUSER", "default", "off")
        self.file, self.runs, self._rotations = folder / "secret", folder / "runs", 0
        self.program = folder / "print-secret"
        self.program.write_text(
            f"#!{sys.executable}\nprint(open({str(self.file)!r}).read(), end='')\n"
            f"open({str(self.runs)!r}, 'a').write('.')\n"
        )
        self.program.chmod(0o700)
        self.rotate()

    def rotate(self, user: str = "user", form: str = "{password}\n") -> None:
        """The old password is invalid from now on, and clients that used it are disconnected."""
        self._rotations += 1
        password = f"{CANARY}-{self._rotations}"
        self.file.write_text(form.format(user=user, password=password))
        self.admin.execute_command("ACL", "SETUSER", user, "on", "resetpass", f">{password}", "~*", "&*", "+@all")
        self.throw_out()

    def throw_out(self) -> None:
        self.admin.client_kill_filter(_type="normal", skipme=True)

    @property
    def times_run(self) -> int:
        return len(self.runs.read_text()) if self.runs.exists() else 0

    def url(self, parameters: str, user: str = "user@") -> str:
        return f"redis://{user}127.0.0.1:{self.server.port}?{parameters}"


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    monkeypatch.setattr(redis_credentials, "_AGAIN_S", 0.05)
    with redis_server(tmp_path / "redis") as server:
        vault = Vault(server, tmp_path)
        yield vault
        vault.admin.execute_command("ACL", "SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")


def opened(url: str) -> "closing[RedisTier]":
    """A tier with longer timeouts than by default, for a busy machine."""
    return closing(open_redis(url, RedisOptions(timeout_s=20.0, connect_timeout_s=20.0)))


def new_key() -> EncoderCacheKey:
    return EncoderCacheKey(new_namespace(), "picture")


@pytest.mark.parametrize("source", ["file", "command"])
def test_a_password_that_rotates_under_load_costs_no_restart_and_no_call_but_those_it_cut_off(
    vault: Vault, source: str
) -> None:
    url = vault.url(f"password_file={vault.file}" if source == "file" else f"password_command={vault.program}")
    key, stop, failures, reads = new_key(), threading.Event(), [0], [0]
    with opened(url) as tier:
        tier.put(key, value("a", 100_000))

        def load() -> None:
            while not stop.is_set():
                try:
                    assert fetch(tier, key) == value("a", 100_000)
                    reads[0] += 1
                except TierError:
                    failures[0] += 1
                    time.sleep(0.02)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            vault.rotate()
            before = reads[0]
            wait_until("calls are answered again", lambda: reads[0] > before + 20)  # noqa: B023
        stop.set()
        for thread in threads:
            thread.join()
        assert tier.contains(key) == 100_000
    assert failures[0] < reads[0]
    if source == "command":
        assert 6 <= vault.times_run < 30, "it is run when it is refused, not for each connection"


def test_a_command_is_run_once_for_all_connections_until_it_is_refused(vault: Vault) -> None:
    with opened(vault.url(f"password_command={vault.program}")) as tier:
        for _ in range(3):
            vault.throw_out()
            assert tier.contains(new_key()) is None
        assert vault.times_run == 1
        time.sleep(0.06)  # _AGAIN_S: a younger password counts as current
        vault.rotate()
        assert tier.contains(new_key()) is None
        assert vault.times_run == 2


@pytest.mark.parametrize("expires_in", [0.01, 3600])
def test_a_command_may_name_the_user_and_when_what_it_printed_expires(vault: Vault, expires_in: float) -> None:
    vault.rotate("another", '{{"username": "{user}", "password": "{password}", "expires_in": ' + f"{expires_in}}}}}")
    with opened(vault.url(f"password_command={vault.program}", user="")) as tier:
        assert tier.contains(new_key()) is None
        time.sleep(0.06)
        vault.throw_out()
        assert tier.contains(new_key()) is None
    assert vault.times_run == (2 if expires_in < 1 else 1)


def test_user_and_password_may_both_be_in_files(vault: Vault, tmp_path: Path) -> None:
    (tmp_path / "name").write_text("user\n")
    with opened(vault.url(f"username_file={tmp_path / 'name'}&password_file={vault.file}", user="")) as tier:
        assert tier.contains(new_key()) is None
        vault.rotate("second")
        (tmp_path / "name").write_text("second")
        vault.admin.execute_command("ACL", "DELUSER", "user")
        assert tier.contains(new_key()) is None
    with opened(vault.url(f"username_file={tmp_path / 'name'}&password_command={vault.program}", user="")) as tier:
        assert tier.contains(new_key()) is None


def test_a_store_that_is_refused_recovers_as_soon_as_the_source_has_new_credentials(vault: Vault) -> None:
    with opened(vault.url(f"password_command={vault.program}")) as tier:
        right = vault.file.read_text()
        vault.file.write_text(f"{CANARY}-wrong")
        tier._client.connection_pool.connection_kwargs["credential_provider"].refused()
        time.sleep(0.06)
        vault.throw_out()
        with pytest.raises(TierUnreachable, match="authentication failed"):
            tier.contains(new_key())
        vault.file.write_text(right)
        time.sleep(0.06)
        assert tier.contains(new_key()) is None


# ---- commands that fail


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"echo {CANARY}; echo {CANARY} >&2; exit 3", "ended with status 3"),
        ("true", "printed neither"),
        (f'echo \'{{"token": "{CANARY}"}}\'', "printed neither a password alone nor a JSON object with password"),
        (f'echo \'{{"password": "{CANARY}", "expires_in": "soon"}}\'', "printed neither"),
        ("echo '{\"password\": 7}'", "printed neither"),
        ("printf '\\377'", "printed neither"),
        (f"yes {CANARY}", "prints too much"),
    ],
)
def test_a_command_that_fails_is_an_outage_that_names_the_program_and_shows_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, expected: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path / "redis") as server:
        command = quote(f"{program(tmp_path, text)} --secret {CANARY}-argument")
        with pytest.raises(TierUnreachable, match=expected) as caught:
            open_redis(f"{server.url}?password_command={command}")
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert f"password_command {tmp_path}/program" in str(caught.value)
    assert CANARY not in shown


def test_a_command_that_hangs_holds_up_a_call_no_longer_than_a_store_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends before the command's own time limit, which the test controls here."""
    timers = list[threading.Timer]()

    class Held(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(redis_credentials, "threading", SimpleNamespace(Lock=threading.Lock, Timer=Held))
    command = program(tmp_path, f"sleep 1000 & echo $$ > {tmp_path}/pid; wait")
    late = pytest.raises(TierUnreachable, match=r"takes too long: it has not ended within [01]\.\d s|no answer in time")
    with redis_server(tmp_path / "redis") as server, late:
        open_redis(f"{server.url}?password_command={command}", RedisOptions(timeout_s=0.5))
    wait_until("it runs", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert _group(pid)
    [its_time] = timers
    its_time.function(*its_time.args, **its_time.kwargs)
    wait_until("it is killed, and what it started", lambda: not _group(pid))


def _group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_shell_reads_the_command_and_one_run_serves_all_who_wait(tmp_path: Path) -> None:
    command = program(tmp_path, f'echo run >> {tmp_path}/runs; sleep 0.3; printf "%s" "$1"')
    provider = CommandCredentials(f"{command} '$(touch {tmp_path}/shell); a b'", "user")
    found: list[tuple[str, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(provider.get_credentials())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [("user", f"$(touch {tmp_path}/shell); a b")] * 8
    assert (tmp_path / "runs").read_text() == "run\n"
    assert not (tmp_path / "shell").exists()


def test_refused_credentials_are_not_asked_for_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_credentials, "_AGAIN_S", 3600.0)
    provider = CommandCredentials(program(tmp_path, f"echo run >> {tmp_path}/runs; echo x"), None)
    for _ in range(50):
        assert provider.get_credentials() == ("x",)
        provider.refused()
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_command_that_is_removed_later_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_credentials, "_AGAIN_S", 0.0)
    path = Path(program(tmp_path, "echo x"))
    provider = CommandCredentials(str(path), None)
    path.unlink()
    with pytest.raises(CredentialsUnavailable, match="cannot be run: No such file"):
        provider.get_credentials()


# ---- configuration


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("password_command=/no/such/program", "there is no program /no/such/program"),
        ("password_command=", "must be a program and its arguments"),
        ("password_command='", "must be a program and its arguments"),
        ("password_file=/no/such/file", "password_file /no/such/file cannot be read: No such file or directory"),
        (
            "username_file=/no/such/file&password_command=/bin/true",
            "username_file /no/such/file cannot be read: No such file or directory",
        ),
        ("username_file=/dev/null", "username_file /dev/null is empty"),
        (
            "password_file=/x&password_command=/bin/true",
            "must be given once, as one of password, password_file, password_command",
        ),
        ("username=a&username_file=/x", "must be given once, as one of username, username_file"),
        ("sentinel_password=a&sentinel_password_file=/x", "must be given once"),
    ],
)
def test_invalid_parameters_end_the_start(parameters: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        open_redis(f"redis://127.0.0.1:1?{parameters}")
    assert not isinstance(caught.value, TierUnreachable)


@pytest.mark.parametrize(
    ("url", "parameter"),
    [
        ("redis://h?password_file={}", "password_file"),
        ("redis://h?username_file={}", "username_file"),
        ("redis-sentinel://h/s?sentinel_password_file={}", "sentinel_password_file"),
        ("rediss://h?ssl_certfile=/x&ssl_password_file={}", "ssl_password_file"),
        ("rediss://h?ssl_ca_certs={}", "ssl_ca_certs"),
        ("rediss://h?ssl_certfile={}", "ssl_certfile"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_parameter_that_names_it(url: str, parameter: str) -> None:
    with pytest.raises(ValueError, match=f"{parameter} /no/such/file cannot be (read|used): No such file") as caught:
        open_redis(url.format("/no/such/file"))
    assert not isinstance(caught.value, TierUnreachable)


def test_sentinels_and_the_key_of_a_certificate_have_files_of_their_own(tmp_path: Path) -> None:
    (file := tmp_path / "secret").write_text("one\n")
    address, options = parse_redis_url(
        f"redis-sentinel://h?sentinel_username=s&sentinel_password_file={file}&ssl_password_file={file}", RedisOptions()
    )
    [sentinel] = connect(address, options).connection_pool.sentinel_manager.sentinels
    provider = sentinel.connection_pool.connection_kwargs["credential_provider"]
    assert provider.get_credentials() == ("s", "one")
    file.write_text("two")
    assert provider.get_credentials() == ("s", "two")
    assert redis_credentials.key_password(options) == "two"
    assert options.credentials_from == f"sentinel_password_file {file}"


def test_a_command_gets_the_variables_of_clouds_and_a_store_without_one_does_not() -> None:
    assert "AWS_" in environment_of(["redis://host?password_command=/bin/true"])
    assert "AWS_" not in environment_of(["redis://host?password_file=/x"])


def test_doctor_shows_where_credentials_come_from_and_not_what_they_are(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lmcache.yaml"
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    command = quote(f"{vault.program} {CANARY}-argument")
    for parameters, expected in (
        (f"password_command={command}", f"credentials from password_command {vault.program}"),
        (f"password_file={vault.file}", f"credentials from password_file {vault.file}"),
    ):
        file.write_text(json.dumps({"ec": {"remotes": [vault.url(parameters)]}}))
        output = CliRunner().invoke(app, ["doctor", "--json"]).output
        assert json.loads(output)["remotes"]["redis"].endswith(f"answers; {expected}")
        assert CANARY not in output
