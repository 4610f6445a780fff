# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec lifecycle`: whether an S3 store itself deletes what is older than `ec.ttl_s`, and the rule for that."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import typer

from lmcache_ec.cli.arguments import Extra
from lmcache_ec.cli.named_tiers import NamedTier, configured, named_tiers
from lmcache_ec.tiers.base import message
from lmcache_ec.tiers.s3 import S3Tier
from lmcache_ec.tiers.s3_kind import S3

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Rule:
    """For one S3 remote: the ages in days at which entries count as absent here and are deleted there, None for never.

    `problem` is empty if the second matches the first.
    """

    tier: str
    where: str
    ttl_days: float | None
    deleted_after_days: float | None
    problem: str


def check_and_set(
    apply: bool = typer.Option(False, "--set", help="Set the rule that follows from ec.ttl_s, and check it."),
    extra: Extra = "{}",
    as_json: bool = typer.Option(False, "--json", help="Print one JSON list, one object per S3 remote."),
) -> None:
    """Check that each S3 remote has a lifecycle rule that deletes entries older than ec.ttl_s.

    Without one, such entries count as absent but stay in the bucket. The exit status is 1 if the rule and ec.ttl_s
    differ, if only one of them is set, or if a remote cannot be reached. Without both, entries never expire: 0.
    """
    config = configured(extra)
    if apply and config.ttl_s is None:
        raise typer.BadParameter("ec.ttl_s is not set, so there is no age at which to delete", param_hint="--set")
    tiers = [tier for tier in named_tiers(config) if tier.kind is S3]
    rules = [_rule(tier, config.ttl_s, apply) for tier in tiers]
    if as_json:
        typer.echo(json.dumps([asdict(rule) for rule in rules], indent=2))
    elif not rules:
        typer.echo("The configuration names no S3 remote.")
    else:
        for rule in rules:
            typer.echo(f"{rule.tier} ({rule.where}): {rule.problem or _description(rule)}", err=bool(rule.problem))
    raise typer.Exit(1 if any(rule.problem for rule in rules) else 0)


def _rule(tier: NamedTier, ttl_s: float | None, apply: bool) -> Rule:
    ttl_days, deleted = None if ttl_s is None else ttl_s / _DAY_S, None
    try:
        with tier.opened() as opened:
            assert isinstance(opened, S3Tier)
            if apply and ttl_s is not None:
                opened.set_lifecycle(ttl_s)
            found_s = opened.lifecycle_s()
    except (OSError, ValueError) as error:
        return Rule(tier.name, tier.where, ttl_days, None, message(error))
    deleted = None if found_s is None else found_s / _DAY_S
    wanted = None if ttl_days is None else math.ceil(ttl_days)
    problem = ""
    if deleted != wanted:
        there = "no rule deletes old entries" if deleted is None else f"a rule deletes entries after {deleted:g} days"
        meant = "ec.ttl_s is not set" if wanted is None else f"ec.ttl_s needs {wanted} days: --set sets that"
        problem = f"{there}; {meant}"
    return Rule(tier.name, tier.where, ttl_days, deleted, problem)


def _description(rule: Rule) -> str:
    if rule.deleted_after_days is None:
        return "entries never expire: neither ec.ttl_s nor a rule limits their age"
    return f"entries are deleted after {rule.deleted_after_days:g} days, as ec.ttl_s says"
