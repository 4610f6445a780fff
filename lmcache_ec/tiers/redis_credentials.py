# SPDX-License-Identifier: Apache-2.0
"""Where a Redis store's user and password come from, for each new connection: files, or a command.

They may change while engines run: files are read for each connection, and a command's output is used until it expires
or a server refuses it. Both classes are what redis-py calls a credential provider; any thread may call them.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redis.exceptions import ConnectionError as RedisConnectionError

from lmcache_ec.mask import without_secrets
from lmcache_ec.tiers.resp import left

if TYPE_CHECKING:
    from lmcache_ec.tiers.redis_url import RedisOptions

_COMMAND_S = 30.0
"""The longest that a command may run. Calls of the tier wait for it until their own deadline, and no longer."""
_AGAIN_S = 1.0
"""The shortest time between two runs, even if servers refuse its output."""
_MOST_BYTES = 64 << 10

Presented = tuple[str] | tuple[str, str]


class CredentialsUnavailable(RedisConnectionError):
    """There are none at the moment: a file cannot be read, or the command failed. Shows the content of neither."""

    errno = errno.ETIMEDOUT


@dataclass(frozen=True, slots=True)
class SecretFile:
    """A file that holds one secret, and the parameter of the URL that names it."""

    parameter: str
    path: str

    def read(self) -> str:
        """The secret. CredentialsUnavailable does not show the content."""
        name = f"{self.parameter} {self.path}"
        try:
            text = Path(self.path).read_text().strip()
        except OSError as error:
            raise CredentialsUnavailable(f"{name} cannot be read: {error.strerror}") from None
        except ValueError:
            raise CredentialsUnavailable(f"{name} cannot be read: must be text in UTF-8") from None
        if not text:
            raise CredentialsUnavailable(f"{name} is empty: must hold the user or the password, and nothing else")
        return text

    def read_at_start(self) -> str:
        """As `read`, with ValueError."""
        try:
            return self.read()
        except CredentialsUnavailable as error:
            raise ValueError(str(error)) from None


Source = SecretFile | str | None
"""Where a user or a password is: a file, the text itself, or nothing."""


class FileCredentials:
    """User and password, each from its file or as it was given."""

    def __init__(self, username: Source, password: Source) -> None:
        _check_at_start(username, password)
        self._username, self._password = username, password

    def get_credentials(self) -> Presented:
        username, password = _current(self._username), _current(self._password) or ""
        return (username, password) if username else (password,)

    def refused(self) -> None:
        """The files are read again anyway."""

    def hidden(self, text: str) -> str:
        """`text` without their contents."""
        try:
            return without_secrets(text, _named(self.get_credentials()))
        except CredentialsUnavailable:
            return text


@dataclass(frozen=True, slots=True)
class _Printed:
    presented: Presented
    at: float
    expires_at: float


class CommandCredentials:
    """A command prints a password, or a JSON object with `password` and optionally `username` and `expires_in`
    (seconds).

    It is run without a shell, on its own thread, by one caller for all; nothing that it prints is logged. `_lock`
    guards the state and is never held while the command runs.
    """

    def __init__(self, command: str, username: Source) -> None:
        self._arguments = shlex.split(command)
        if shutil.which(self._program) is None:
            raise ValueError(f"password_command: there is no program {self._program} that could be run")
        _check_at_start(username)
        self._username = username
        self._runner = ThreadPoolExecutor(1, "redis-credentials")
        self._future: Future[_Printed] | None = None
        self._ran_at = 0.0
        self._refused = False
        self._lock = threading.Lock()

    def get_credentials(self) -> Presented:
        with self._lock:
            if self._future is None or self._is_over(self._future):
                self._future, self._refused, self._ran_at = self._runner.submit(self._run), False, time.monotonic()
            future = self._future
        limit_s = left(_COMMAND_S)
        try:
            return future.result(limit_s).presented
        except FutureTimeoutError:
            text = f"password_command {self._program} takes too long: it has not ended within {limit_s:.1f} s"
            raise CredentialsUnavailable(text) from None

    def refused(self) -> None:
        """A server refused the last credentials."""
        with self._lock:
            self._refused = True

    def hidden(self, text: str) -> str:
        """`text` without the command's output."""
        future = self._future
        done = future is not None and future.done() and future.exception() is None
        return without_secrets(text, _named(future.result().presented)) if future is not None and done else text

    def _is_over(self, future: Future[_Printed]) -> bool:
        """Whether to run the command again. Under the lock."""
        if not future.done() or time.monotonic() - self._ran_at < _AGAIN_S:
            return False
        return future.exception() is not None or self._refused or future.result().expires_at <= time.monotonic()

    @property
    def _program(self) -> str:
        """Without the arguments, which may hold secrets."""
        return self._arguments[0]

    def _run(self) -> _Printed:
        began = time.monotonic()
        output = _output_of(self._arguments)
        known = _current(self._username)
        try:
            text = output.decode().strip()
            fields = json.loads(text) if text.startswith("{") else {"password": text}
            password, username = fields["password"], fields.get("username", known)
            expires_at = began + float(fields.get("expires_in", "inf"))
            if not (isinstance(password, str) and password and isinstance(username, str | None)):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CredentialsUnavailable(
                f"password_command {self._program} printed neither a password alone nor a JSON object with "
                f"password, username and expires_in (seconds)"
            ) from None
        return _Printed((username, password) if username else (password,), began, expires_at)


def _output_of(arguments: list[str]) -> bytes:
    """A command's output, at most 64 KiB. CredentialsUnavailable, which shows none of it, if the command fails."""
    what = f"password_command {arguments[0]}"
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise CredentialsUnavailable(f"{what} cannot be run: {error.strerror}") from None
    timer = threading.Timer(_COMMAND_S, _kill, (process.pid,))
    timer.start()
    with process:
        assert process.stdout is not None
        output = process.stdout.read(_MOST_BYTES + 1)
        if len(output) > _MOST_BYTES:
            _kill(process.pid)
        status = process.wait()
    timer.cancel()
    if status or len(output) > _MOST_BYTES:
        how = "prints too much" if len(output) > _MOST_BYTES else f"ended with status {status}"
        raise CredentialsUnavailable(f"{what} {how}")
    return output


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _current(given: Source) -> str | None:
    return given.read() if isinstance(given, SecretFile) else given


def _check_at_start(*given: Source) -> None:
    for each in given:
        if isinstance(each, SecretFile):
            each.read_at_start()


def _named(presented: Presented) -> Mapping[str, str]:
    names = ("username", "password") if len(presented) == 2 else ("password",)
    return {name: text for name, text in zip(names, presented, strict=True) if text}


def source(options: RedisOptions) -> CommandCredentials | FileCredentials | None:
    """Where a server's user and password come from, if from a file or command. ValueError for a file or program that
    is missing at the start."""
    username = _file("username_file", options.username_file) or options.username
    if options.password_command:
        return CommandCredentials(options.password_command, username)
    if options.password_file or options.username_file:
        return FileCredentials(username, _file("password_file", options.password_file) or options.password)
    return None


def none(options: RedisOptions) -> bool:
    """Whether servers are used without a password."""
    return not (options.password or options.password_file or options.password_command)


def sentinel_source(options: RedisOptions) -> FileCredentials | None:
    """The same for Sentinels."""
    password = _file("sentinel_password_file", options.sentinel_password_file)
    return FileCredentials(options.sentinel_username, password) if password else None


def key_password(options: RedisOptions) -> str:
    """The password for the client certificate's key; empty if it needs none: None would prompt at a terminal."""
    file = _file("ssl_password_file", options.key_password_file)
    return file.read_at_start() if file else options.key_password or ""


def _file(parameter: str, path: str | None) -> SecretFile | None:
    return SecretFile(parameter, path) if path else None
