# SPDX-License-Identifier: Apache-2.0
"""Through how many made-up examples a test goes: a few in `make check` and `make test`, all in `make test-all`."""

from hypothesis import settings

ALL = 100
"""What a test without a number of its own goes through, under the profile `all`. So its number is a percentage."""


def take_few() -> None:
    """Unless `--hypothesis-profile` says otherwise, which pytest acts on later."""
    settings.register_profile("all", max_examples=ALL)
    settings.register_profile("few", max_examples=30)
    settings.load_profile("few")


def examples(number: int) -> int:
    """The share of `number` that the profile takes."""
    return -(-number * settings().max_examples // ALL)
