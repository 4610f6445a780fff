# SPDX-License-Identifier: Apache-2.0
"""Commands that go to one server together, and their replies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ClusterDownError, ResponseError


@dataclass(frozen=True, slots=True)
class Command:
    """Concerns the key `args[1]`. If `into` is there, the reply's payload goes there and its length is the reply."""

    args: tuple[Any, ...]
    into: memoryview | None = None


def parts(numbers: Sequence[int], commands: Sequence[Command], most_bytes: int) -> Iterator[Sequence[int]]:
    """`numbers` in runs whose buffers are not more than `most_bytes` together; one alone may be larger."""
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
    """All commands in one go to one server, then their replies; for those that failed, or never came, an exception."""
    replies: list[object] = []
    failure: Exception = ClusterDownError("no server has this slot")
    if pool is not None:
        try:
            connection = pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands([command.args for command in commands]))
                connection.expect(command.into for command in commands)
                for _ in commands:
                    try:
                        replies.append(connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
            finally:
                if len(replies) < len(commands):
                    connection.disconnect()  # answers may still come, and nobody would expect them
                pool.release(connection)
        except Exception as error:
            failure = error
    return replies + [failure] * (len(commands) - len(replies))
