# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec clear`: removes all our entries from one tier."""

from __future__ import annotations

import typer

from lmcache_ec.cli.arguments import Extra
from lmcache_ec.cli.entries import check_namespaces
from lmcache_ec.cli.named_tiers import wanted_tiers
from lmcache_ec.cli.namespaces import look_and_remove


def clear(
    tier: str = typer.Argument(..., metavar="TIER", help="The tier's name, as in `status`: disk, redis, s3, s3_2."),
    namespace: str = typer.Option(
        "", "--namespace", metavar="NAMESPACE", help="Remove only the entries of this namespace."
    ),
    yes: bool = typer.Option(False, "--yes", help="Do not ask first."),
    force: bool = typer.Option(False, "--force", help="Remove even what an engine on this host uses now."),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Remove all entries from one tier; asks first. Other files, keys and objects stay.

    Running engines do not treat this as a loss and do not write anything back. The exit status is 1 if something was
    not removed.
    """
    check_namespaces([namespace] if namespace else [], "--namespace")
    if as_json and not yes:
        raise typer.BadParameter("required with --json, which cannot ask", param_hint="--yes")
    tiers = wanted_tiers(extra, tier, "TIER")
    for one in tiers:
        if one.kind is not None and one.unlisted:
            typer.echo(f"{one.name}: {one.unlisted}", err=True)
            raise typer.Exit(1)
    look_and_remove(tiers, namespace, 0.0, removal=True, yes=yes, force=force, as_json=as_json)
