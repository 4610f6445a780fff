# SPDX-License-Identifier: Apache-2.0
"""Commands that are sent to one server together, and their replies."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ClusterDownError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError


class Command(NamedTuple):
    """Concerns the key `args[1]`. If `into` is set, the payload is received there and the reply is its length."""

    args: tuple[Any, ...]
    into: memoryview | None = None


def packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """The commands in the form in which they are sent; large values are not copied."""
    pieces: list[bytes | memoryview] = []
    texts: list[bytes] = []
    for command in commands:
        texts.append(b"*%d\r\n" % len(command.args))
        for arg in command.args:
            if isinstance(arg, memoryview):
                texts.append(b"$%d\r\n" % len(arg))
                pieces += (b"".join(texts), arg)
                texts = [b"\r\n"]
            else:
                text = arg if isinstance(arg, bytes) else (str(arg) if isinstance(arg, int) else arg).encode()
                texts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    pieces.append(b"".join(texts))
    return pieces


def parts(numbers: Sequence[int], commands: Sequence[Command], most_bytes: int) -> Iterator[Sequence[int]]:
    """`numbers` in runs whose buffers total at most `most_bytes`; a single one may be larger."""
    run: list[int] = []
    total = 0
    for number in numbers:
        target = commands[number].into
        length = 0 if target is None else len(target)
        if run and total + length > most_bytes:
            yield run
            run, total = [], 0
        run.append(number)
        total += length
    if run:
        yield run


def exchange(pool: Any, commands: Sequence[Command]) -> list[object]:
    """Send all commands to one server at once, then read the replies; an exception for each failed or missing one."""
    replies: list[object] = []
    failure: Exception = ClusterDownError("no server has this slot")
    if pool is not None:
        try:
            connection = pool.get_connection()
            try:
                connection.ask(commands)
                for _ in commands:
                    replies.append(connection.answer())
            finally:
                if len(replies) < len(commands):
                    connection.disconnect()  # replies may still arrive, and would be unexpected
                pool.release(connection)
        except TimeoutError as error:
            failure = RedisTimeoutError(str(error))
            failure.__cause__ = error
        except OSError as error:
            failure = RedisConnectionError(str(error))
            failure.__cause__ = error
        except Exception as error:
            failure = error
    return replies + [failure] * (len(commands) - len(replies))
