# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec where`: which replicas hold an entry in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from lmcache_ec.cli.arguments import number
from lmcache_ec.cli.ls import printable
from lmcache_ec.cli.wording import span, table

if TYPE_CHECKING:
    from lmcache_ec.events.warm_index import ReplicaState


def where(
    identifiers: list[str] = typer.Argument(  # noqa: B008
        None, metavar="IDENTIFIER", help="Identifiers of entries; without any, the replicas are listed."
    ),
    replicas: list[str] = typer.Option(  # noqa: B008
        ...,
        "--replica",
        metavar="ADDRESS",
        help="Where a replica publishes (ec.events_endpoint), for example tcp://10.0.0.7:5757; once per replica. Add "
        "the address of snapshots after a comma if it is not 1000 ports above.",
    ),
    namespace: str = typer.Option(
        "", "--namespace", metavar="NAMESPACE", help="Count only replicas of this namespace."
    ),
    timeout: float = typer.Option(
        3.0, "--timeout", parser=number(0.1, 60), metavar="SECONDS", help="Longest wait for all replicas."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show which replicas hold these entries in LocalCPU, according to the events they publish. No engine is asked.

    The exit status is 1 if no replica holds an entry, or if a replica did not answer.
    """
    if find_spec("zmq") is None:
        raise typer.BadParameter("pyzmq is needed: pip install 'lmcache-ec[events]'")
    from lmcache_ec.events.warm_index import WarmIndex

    try:
        index = WarmIndex(replicas)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--replica") from None
    with index:
        answered = index.wait(timeout)
        held = index.where(identifiers or (), namespace or None)
        states = index.replicas()
    if as_json:
        typer.echo(json.dumps({"identifiers": held, "replicas": [asdict(state) for state in states]}, indent=2))
    else:
        _print(held, states)
    raise typer.Exit(0 if answered and all(held.values()) else 1)


def _print(held: Mapping[str, Sequence[str]], states: Sequence[ReplicaState]) -> None:
    if held:
        rows = [(printable(identifier), ", ".join(names) or "held by none") for identifier, names in held.items()]
        typer.echo("\n".join((*table([("identifier", "replicas"), *rows]), "")))
    rows_of = [(state.replica, state.state, *_seen(state)) for state in states]
    typer.echo("\n".join(table([("replica", "state", "entries", "seen", "namespace"), *rows_of])))


def _seen(state: ReplicaState) -> tuple[str, str, str]:
    if state.age_s is None:
        return "", "never", ""
    more = f" (and {state.entries_left_out:,})" if state.entries_left_out else ""
    return f"{state.entries:,}{more}", f"{span(state.age_s)} ago", printable(state.namespace)
