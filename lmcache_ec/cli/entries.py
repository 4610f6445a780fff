# SPDX-License-Identifier: Apache-2.0
"""The entries of the tiers in a configuration, as `ls`, `inspect`, `verify` and `warm` iterate over them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import typer

from lmcache_ec import entry
from lmcache_ec.cli.named_tiers import NamedTier, configured
from lmcache_ec.config import ConfigError
from lmcache_ec.key import EntryName, ObjectName, check_namespace
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.base import Tier, message

_HEADER_BYTES = 4096
"""Holds the header of an entry whose identifier has at most 512 characters."""


@dataclass(frozen=True, slots=True)
class Held:
    """An entry that a tier lists: its length in bytes, and when it was last used or, in S3, written (Unix)."""

    name: ObjectName
    length: int
    modified: float


class OpenTiers:
    """The tiers that could be opened, by name. For the others, `errors` and `notes` state why not; a note is no error.
    `errors` also has the namespaces that were asked for and that no tier has.

    A context manager that closes them. For the command's main thread; the tiers themselves may be used from any.
    """

    def __init__(self, tiers: Sequence[NamedTier], *, listed: bool = True) -> None:
        """With `listed`, tiers that cannot be listed are not opened."""
        self.tiers: dict[str, Tier] = {}
        self.named = {tier.name: tier for tier in tiers}
        self.errors: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._stack = ExitStack()
        for tier in tiers:
            reason = tier.unlisted if listed or tier.kind is None else tier.kind.no_probe
            if reason:
                self.notes[tier.name] = f"{tier.where}: {reason}"
                continue
            try:
                self.tiers[tier.name] = self._stack.enter_context(tier.opened())
            except (OSError, ValueError) as error:
                self.errors[tier.name] = message(error)

    def __enter__(self) -> OpenTiers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def miss(self, namespaces: Sequence[str], there: Collection[str]) -> None:
        """Add an error for each requested namespace that is not among those `there`: a misspelled name must not look
        like a namespace without problems. Nothing is added after an error of a tier, since that tier may have it."""
        if not self.errors:
            absent = [namespace for namespace in namespaces if namespace not in there]
            self.errors.update(dict.fromkeys(absent, "no tier has an entry of this namespace"))

    def report(self) -> None:
        """Print notes and errors, on standard error."""
        for texts in (self.notes, self.errors):
            for name, text in texts.items():
                typer.echo(f"{name}: {text}", err=True)


Namespaces = Annotated[list[str] | None, typer.Argument(metavar="NAMESPACE", help="Only these; without any, all.")]
"""The arguments of a command that iterates over entries."""


def check_namespaces(namespaces: Sequence[str], hint: str = "NAMESPACE") -> None:
    """End the command if one is invalid. `hint` is the argument or option that names them."""
    for namespace in namespaces:
        try:
            check_namespace(namespace)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=hint) from None


def held_in(tier: Tier, namespaces: Sequence[str]) -> Iterator[Held]:
    """The entries of these namespaces, or of all, as the tier lists them. TierError from the tier."""
    for namespace in dict.fromkeys(namespaces or tier.namespace_names()):
        for listed in tier.list(namespace):
            yield Held(ObjectName(namespace, listed.digest), listed.length, listed.modified)


def header_of(tier: Tier, name: EntryName) -> entry.Header | None:
    """An entry's header; None if there is no such entry. TierError, EntryError.

    Reads only the header if the tier can do that.
    """
    start = tier.peek(name, _HEADER_BYTES)
    if start is None:
        return None
    wanted = entry.header_bytes(memoryview(start))
    if wanted > len(start) == _HEADER_BYTES:
        start = tier.peek(name, wanted) or b""
    return entry.read_header(memoryview(start))


def signing_of(extra: str) -> SigningKey | None:
    """The key of a configuration. Ends the command if it cannot be used."""
    try:
        return configured(extra).signing_key()
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def verified(tier: Tier, name: EntryName, length: int, signing: SigningKey | None = None) -> entry.Header | None:
    """An entry of `length` bytes, read whole and verified, with its signature if it should have one by `signing`; None
    if it is no longer there. TierError, EntryError."""
    data = tier.peek(name, length + 1)  # so that a longer entry is noticed
    return None if data is None else verified_bytes(memoryview(data), name, signing)


def verified_bytes(data: memoryview, name: EntryName, signing: SigningKey | None) -> entry.Header:
    """The same for the bytes of an entry."""
    return entry.verify_named(data, name, signing if signing and signing.signs(name.namespace) else None)
