# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec keys`: every key of the configuration."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from lmcache_ec.config.reference import key_entries, markdown


def list_keys(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON list, one object per key."),
    as_markdown: bool = typer.Option(False, "--markdown", help="Print a table in Markdown."),
) -> None:
    """List every key of `ec:`, with its default, what it accepts, and what it does."""
    if as_json and as_markdown:
        raise typer.BadParameter("must be given without --json", param_hint="--markdown")
    if as_json:
        typer.echo(json.dumps([{**asdict(entry), "variable": entry.variable} for entry in key_entries()]))
    elif as_markdown:
        typer.echo(markdown())
    else:
        for entry in key_entries():
            typer.echo(f"{entry.key}: {entry.default}\n    {entry.description}\n    {entry.accepted}")
