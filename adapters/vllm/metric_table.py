# SPDX-License-Identifier: Apache-2.0
"""Every metric: its name, help text, labels, and the counts that make it up.

Imports nothing from vLLM: the table in `docs/metrics.md` is generated from it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from lmcache_ec.histogram import LATENCY_NS, NS, SIZE_BYTES
from lmcache_ec.tally import STATES

from .decisions import MISS_REASONS

PREFIX = "lmcache_ec_"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, without the prefix. `of` is the count it shows: a name with its labels in braces, or, for a single
    other label, one count per value of that label. Counts are divided by `unit`."""

    name: str
    kind: Kind
    help: str
    of: str | dict[str, str]
    label: str = ""
    unit: int = 1
    bounds: tuple[int, ...] = ()
    state: str = ""
    """The label of a gauge of states: 1 for the state whose number is the count, else 0."""

    @property
    def labels(self) -> tuple[str, ...]:
        named = re.findall(r"\{(\w+)\}", self.of) if isinstance(self.of, str) else [self.label]
        return (*named, self.state) if self.state else tuple(named)

    def sources(self, tiers: Sequence[str], modalities: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
        """The values of the labels, without that of a state, and the count for each combination."""
        in_memory = () if self.name.startswith("tier_") else ("cpu",)
        values = {**FIXED, "tier": (*in_memory, *tiers), "modality": modalities}
        if isinstance(self.of, dict):
            yield from (((value,), count) for value, count in self.of.items())
            return
        names = [name for name in self.labels if name != self.state]
        for chosen in product(*(values[name] for name in names)):
            yield chosen, self.of.format(**dict(zip(names, chosen, strict=True)))


def _counter(name: str, help: str, of: str | dict[str, str], label: str = "", unit: int = 1) -> Metric:
    return Metric(f"{name}_total", Kind.COUNTER, help, of, label, unit)


def _gauge(name: str, help: str, of: str | dict[str, str], label: str = "", state: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, help, of, label, state=state)


def _seconds(name: str, help: str, of: str) -> Metric:
    return Metric(f"{name}_seconds", Kind.HISTOGRAM, help, of, unit=NS, bounds=LATENCY_NS)


def _bytes(name: str, help: str, of: str) -> Metric:
    return Metric(f"{name}_bytes", Kind.HISTOGRAM, help, of, bounds=SIZE_BYTES)


METRICS = (
    _counter(
        "lookups",
        "Items that vLLM needed and did not have in its own cache: loaded (hit) or encoded (miss)",
        "look_ups_{modality}_{result}",
    ),
    _counter("hits", "Items loaded, by where they were found; cpu is the memory of this engine", "loads_{tier}"),
    _counter("misses", "Items encoded, by why they were not loaded", "misses_{reason}"),
    _counter("loaded_bytes", "Bytes of entries loaded, by where they were found", "loaded_bytes_{tier}"),
    _counter(
        "encode_seconds_saved",
        "Encoder time saved by loads (an estimate from measured encodes)",
        "encode_saved_ns",
        unit=NS,
    ),
    _counter(
        "load_policy",
        "Decisions of the load policy: wait for a load, encode instead, trial (encode to learn its cost) or "
        "measurement (read to learn its cost; no request waits)",
        {
            "wait": "policy_waits",
            "encode": "policy_encodes_instead",
            "trial": "policy_trials",
            "measurement": "policy_measurements",
        },
        "decision",
    ),
    _counter(
        "load_policy_refusals",
        "Items encoded because the tier that has them is slower than the encoder",
        "policy_refused_{tier}",
    ),
    _bytes("load_size", "Sizes of entries loaded", "load_bytes"),
    _seconds("step_load", "Time that a step's loads took within its forward pass", "step_load_ns"),
    _counter("load_failures", "Loads that failed on a rank; their items were encoded instead", "loads_failed"),
    _counter("saves", "Encoder outputs saved to memory", "saves"),
    _counter("saved_bytes", "Bytes of encoder outputs saved to memory", "saved_bytes"),
    _bytes("save_size", "Sizes of entries saved", "save_bytes"),
    _seconds("step_save", "Time that a step's saves took within its forward pass", "step_save_ns"),
    _counter(
        "saves_dropped",
        "Encoder outputs that were not saved: no_room in memory (retried while vLLM has them), void (a rank did "
        "not copy them), unsealed (the store process refused them)",
        {"no_room": "saves_dropped", "void": "saves_void", "unsealed": "seals_failed"},
        "reason",
    ),
    _counter("writes", "Entries written to at least one tier, or found there", "writes"),
    _counter(
        "writes_failed",
        "Entries written to no tier: refused (by every tier) or promotion (no room for the copy that a faster tier "
        "would get)",
        {"refused": "writes_failed", "promotion": "promotions_dropped"},
        "reason",
    ),
    _counter("rewrites", "Entries written again to a tier that had lost them", "rewrites"),
    _counter(
        "deferred_passes", "Scheduling passes that skipped a request because an entry was on its way", "deferred_passes"
    ),
    _seconds("deferred", "How long requests were skipped, one value per wait", "deferred_ns"),
    _counter("deadlines", "Requests whose entry had not arrived by load_deadline_ms; the item was encoded", "timeouts"),
    _counter(
        "unavailable_requests",
        "Requests refused because they carried nothing to encode and nothing was cached",
        "unavailable",
    ),
    _counter("early_lookups", "Look-ups started when a request arrived, before its first pass", "early_look_ups"),
    _counter("fetches", "Entries requested from the tiers", "fetches"),
    _counter(
        "fetch_misses", "Entries requested from the tiers that none had, or that were lost on the way", "fetch_misses"
    ),
    _counter("filtered", "Look-ups that the presence filter answered: no tier has it", "filtered"),
    _counter("misfits", "Entries in memory with another shape than the item of that name needs", "misfits"),
    _counter("unsigned_items", "Items whose name was not signed by a front end of this engine", "unsigned_items"),
    _counter("tier_hits", "Entries read from a tier and verified", "{tier}_hits"),
    _counter("tier_misses", "Entries that a tier was asked for and did not have", "{tier}_misses"),
    _counter("tier_read_bytes", "Bytes read from a tier and verified", "{tier}_read_bytes"),
    _seconds("tier_read", "Time that reads from a tier took; one value for entries read together", "{tier}_read_ns"),
    _counter("tier_read_errors", "Reads from a tier that failed", "{tier}_read_errors"),
    _counter("tier_writes", "Entries written to a tier", "{tier}_writes"),
    _counter("tier_writes_skipped", "Entries not written to a tier because it had them", "{tier}_present"),
    _counter("tier_written_bytes", "Bytes written to a tier", "{tier}_written_bytes"),
    _seconds("tier_write", "Time that writes to a tier took", "{tier}_write_ns"),
    _counter("tier_write_errors", "Writes to a tier that failed", "{tier}_write_errors"),
    _counter(
        "tier_writes_dropped",
        "Writes that were not sent to a tier, because it rests or too many wait",
        "{tier}_writes_dropped",
    ),
    _counter("tier_corrupt", "Entries of a tier that did not verify; each was a miss", "{tier}_corrupt"),
    _counter("tier_forged", "Entries of a tier whose signature did not verify; each was a miss", "{tier}_forged"),
    _counter(
        "tier_replaced",
        "Values of a tier that were not signed entries of their name, and were replaced",
        "{tier}_replaced",
    ),
    _counter(
        "tier_other_version",
        "Entries of a tier in another version of the format; each was a miss",
        "{tier}_other_version",
    ),
    _counter("evictions", "Entries evicted from memory or from a tier, by this engine", "{tier}_evictions"),
    _counter("evicted_bytes", "Bytes evicted from memory or from a tier, by this engine", "{tier}_evicted_bytes"),
    _gauge("tier_state", "1 for the state that a tier is in, 0 for the others", "{tier}_state", state="state"),
    _gauge("tier_entries", "Entries of this namespace in a tier's last listing", "{tier}_listed"),
    _gauge("tier_held_bytes", "Bytes that all namespaces hold in a tier", "{tier}_held_bytes"),
    _gauge("tier_limit_bytes", "Size limit of a tier", "{tier}_limit_bytes"),
    _gauge("tier_queued_writes", "Writes that wait for a tier", "{tier}_queued_writes"),
    _gauge("tier_queued_bytes", "Bytes of the writes that wait for a tier", "{tier}_queued_bytes"),
    _gauge("memory_entries", "Entries in memory", "places_live"),
    _gauge("memory_used_bytes", "Memory in use", "used_bytes"),
    _gauge("memory_limit_bytes", "Memory that may be used", "capacity_bytes"),
    _gauge(
        "memory_leased_bytes", "Memory of entries held for waiting requests; at most half of the total", "leased_bytes"
    ),
    _gauge("memory_unwritten_bytes", "Memory of entries being written; at most a quarter of the total", "dirty_bytes"),
    _gauge(
        "backlog_entries",
        "Work that is still due: unsaved (outputs that found no room), unwritten (entries not yet in a tier), "
        "rewrite (entries that a tier lost)",
        {"unsaved": "unsaved", "unwritten": "unwritten", "rewrite": "rewrites_owed"},
        "kind",
    ),
    _gauge("fetches_in_flight", "Entries requested from the tiers and not yet answered", "fetches_under_way"),
    _gauge("store_jobs", "Seals and writes that the store process still has to do", "jobs"),
    _gauge("epoch", "The current epoch", "epoch"),
    _gauge("memory_only", "1 while entries stay in memory only, because weights have changed", "memory_only"),
    _counter(
        "store_restarts", "Store processes that ended, or were killed because they did not answer", "store_losses"
    ),
    _counter("weight_changes", "Changes of the encoder's weights; each empties the memory", "weight_changes"),
    _counter(
        "encodes_skipped", "Encodes that a producer skipped because the tiers have the outputs", "encodes_skipped"
    ),
    _counter("encodes_again", "Encodes that a producer repeated because a tier had lost the outputs", "encodes_again"),
)

FIXED: Mapping[str, Sequence[str]] = {"reason": MISS_REASONS, "result": ("hit", "miss"), "state": STATES}
"""The values of labels that do not depend on the engine."""


def markdown() -> str:
    """The table in docs/metrics.md."""
    rows = [
        f"| `{PREFIX}{metric.name}` | {metric.kind.value} | "
        f"{', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in METRICS
    ]
    return "\n".join(("| metric | kind | labels | what it is |", "|---|---|---|---|", *rows))
