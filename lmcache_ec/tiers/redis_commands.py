# SPDX-License-Identifier: Apache-2.0
"""Commands that go to one server together, and their replies."""

from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import ClusterDownError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from lmcache_ec.tiers.resp import Command as Command


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
                connection.ask(commands)
                for _ in commands:
                    replies.append(connection.answer())
            finally:
                if len(replies) < len(commands):
                    connection.disconnect()  # answers may still come, and nobody would expect them
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
