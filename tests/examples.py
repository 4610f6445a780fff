# SPDX-License-Identifier: Apache-2.0
"""How many generated examples a test runs: a few in `make check` and `make test`, all in `make test-all`."""

from hypothesis import settings

ALL = 100
"""Examples of a test without its own number, with profile `all`. So a profile's number is a percentage."""


def take_few() -> None:
    """Run few examples by default; pytest applies `--hypothesis-profile` later."""
    settings.register_profile("all", max_examples=ALL)
    settings.register_profile("few", max_examples=30)
    settings.load_profile("few")


def examples(number: int) -> int:
    """The profile's share of `number`."""
    return -(-number * settings().max_examples // ALL)
