# SPDX-License-Identifier: Apache-2.0
"""Combines all sources into one configuration, and records where each value comes from."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from lmcache_ec.config.keys import EncoderCacheConfig, accepts, default, describe
from lmcache_ec.config.lmcache_keys import NOTED, REFUSED, is_off
from lmcache_ec.config.sources import (
    FILE_VARIABLE,
    ConfigError,
    FileSettings,
    Origin,
    Setting,
    Source,
    from_environ,
    from_extra,
    from_file,
    service_links,
)
from lmcache_ec.config.variables import filled
from lmcache_ec.mask import HIDDEN, holds_credential, masked, masked_name, masked_unknown, sounds_secret
from lmcache_ec.tiers.kinds import check_remote, configured, is_remote_key, kind_of
from lmcache_ec.tiers.remote import Lookup

_KEYS = EncoderCacheConfig.model_fields
SHARED = (
    *("max_local_cpu_size", "local_disk", "max_local_disk_size", "cache_policy"),
    *("extra_config", "blocking_timeout_secs"),
)
"""Our keys that LMCache has too: outside of `ec:` they are LMCache's."""
_COMMON = ("enabled", "namespace")
"""Our keys that any program's map may have."""
_DEFAULT = Origin(Source.DEFAULT, "default")
_INHERITED_FOLDER = "encoder-cache"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, the origin of each of its keys, and notes on what was accepted without effect."""

    config: EncoderCacheConfig
    origins: Mapping[str, Origin]
    notes: tuple[str, ...]


def load_config(
    extra: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> EncoderCacheConfig:
    """Only the configuration, see `resolve`."""
    return resolve(extra, environ).config


def resolve(
    extra: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, source: Source = Source.EXTRA
) -> Resolved:
    """The configuration from the file, `environ` (this process's, if None) and `extra`, in rising precedence.

    ConfigError for a file that cannot be read, an unknown key, a bad value, or a credential in what vLLM would log.
    `source` is what `extra` is: vLLM's ec_connector_extra_config, or the arguments of `Cache`.
    """
    environ = os.environ if environ is None else environ
    file = environ.get(FILE_VARIABLE)
    read = from_file(file) if file else FileSettings([], [], [])
    settings = (*read.ours, *from_environ(environ), *from_extra(extra or {}, source))
    written = {setting.key: setting for setting in map(_as_ours, settings)}
    ignored = {key: setting for key, setting in written.items() if _is_strange_variable(setting)}
    written = {key: setting for key, setting in written.items() if key not in ignored}
    inherited, notes, problems = _inherited(read.others, environ, written)
    written = inherited | written
    problems += read.problems + list(_named_twice(settings))
    problems += _unindented(read)
    problems += [_misplaced(setting) for setting in read.others if _is_misplaced(setting.key)]
    complaints = {key: text for key, setting in written.items() if (text := _complaint(setting))}
    ours = {key: setting for key, setting in written.items() if key in _KEYS and key not in complaints}
    config, refused = _validated(ours, environ)
    problems += [*complaints.values(), *refused]
    if problems or config is None:
        raise ConfigError(*problems)
    origins = {key: ours[key].origin if key in ours else _DEFAULT for key in _KEYS}
    notes += [*_ignored(ignored.values(), service_links(environ)), *_slow_before_quick(config.remotes)]
    notes += [*_without_effect(written.values()), *_overruled(config, origins), *_misspelled_ec(read)]
    return Resolved(config, origins, tuple(notes))


def summary(config: EncoderCacheConfig, origins: Mapping[str, Origin] | None = None) -> str:
    """One line for the log at start: what is in force and, with `origins`, where each value is set."""

    def located(key: str, text: str) -> str:
        return f"{text} ({origins[key].location})" if origins else text

    if not config.enabled:
        return "encoder cache: " + located("enabled", "off, because ec.enabled is false")
    parts = [located("max_local_cpu_size", f"LocalCPU {config.max_local_cpu_size:g} GiB")]
    if config.local_disk:
        parts.append(located("max_local_disk_size", f"LocalDisk {config.max_local_disk_size:g} GiB"))
        parts[-1] += located("local_disk", f" at {config.local_disk}")
    else:
        parts.append("no LocalDisk")
    done = {"enabled", "max_local_cpu_size", "local_disk", "max_local_disk_size"}
    changed = (key for key in _KEYS if key not in done and getattr(config, key) != default(key))
    return "encoder cache: " + ", ".join((*parts, *(located(key, f"{key}={describe(config, key)}") for key in changed)))


def _without_effect(written: Iterable[Setting]) -> Iterator[str]:
    """One line per reason, with all keys to which it applies."""
    reasons: dict[str, list[str]] = {}
    for setting in written:
        if setting.key in NOTED and setting.value is not None:
            reasons.setdefault(NOTED[setting.key], []).append(f"{setting.key} ({setting.origin.location})")
    for why, named in reasons.items():
        yield f"accepted without effect, {why}: {', '.join(named)}"


def _overruled(config: EncoderCacheConfig, origins: Mapping[str, Origin]) -> Iterator[str]:
    """Keys that were set but have no effect because of another key."""
    reasons: dict[str, str] = {}
    if config.namespace is not None:
        reasons |= dict.fromkeys(("salt", "epoch", "key_by_engine_version"), "`namespace` is set and replaces it")
    if config.events_endpoint is None:
        reasons |= dict.fromkeys(("events_snapshot_endpoint", "events_topic"), "`events_endpoint` is not set")
    for key, why in reasons.items():
        if getattr(config, key) != default(key):
            yield f"{key}={describe(config, key)} in {origins[key].location}: has no effect: {why}"


def _validated(ours: Mapping[str, Setting], environ: Mapping[str, str]) -> tuple[EncoderCacheConfig | None, list[str]]:
    """The configuration, or what is wrong with each bad value; a URL is shown as written, with its variables."""
    values = {key: setting.value for key, setting in ours.items()}
    problems: list[str] = []
    remotes = ours.get("remotes")
    if remotes:
        try:
            values["remotes"] = _filled(remotes.value, environ)
        except ValueError as error:
            problems.append(f"{_stated(remotes)}: {error}")
            del values["remotes"]
    try:
        return EncoderCacheConfig.model_validate(values), problems
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
    for detail in details:
        setting = ours[str(detail["loc"][0])]
        own_words = detail["msg"].removeprefix("Value error, ") if detail["type"] == "value_error" else ""
        problems.append(f"{_stated(setting)}: {own_words or accepts(setting.key).text}")
    return None, problems


def _stated(setting: Setting) -> str:
    """A setting as it was written, and where."""
    return f"{setting.name}={masked(setting.value)} in {setting.origin.location}"


def _complaint(setting: Setting) -> str | None:
    """What is wrong with a setting, before its value is validated."""
    key, value = setting.key, setting.value
    known = key in _KEYS or key in NOTED or key in REFUSED
    secret = holds_credential(value) or (not known and sounds_secret(key))
    if setting.origin.source is Source.EXTRA and (secret or key == "extra_config"):
        holds = "holds a credential" if secret else "may hold credentials"
        named = f"{masked_name(setting.name)} in {setting.origin.location}"
        logged = ". An engine that was started with it has it in its log now: change it" if secret else ""
        return f"{named} {holds}: vLLM logs that map, use the file or environment{logged}"
    if not known:
        return _unknown(setting, secret)
    return f"{_stated(setting)}: {REFUSED[key]}" if key in REFUSED and not is_off(value) else None


def _nearest(key: str) -> list[str]:
    """Our key that was probably meant; none if no key is similar."""
    plain = key.replace("-", "_").replace(".", "_")
    for prefix in ("lmcache_", "ec_"):
        plain = plain.removeprefix(prefix)
    return difflib.get_close_matches(plain, (*_KEYS, "remote_url"), n=1)


def _is_strange_variable(setting: Setting) -> bool:
    """Whether an environment variable with our prefix resembles none of our keys: most likely another program's."""
    key = setting.key
    known = key in _KEYS or key in NOTED or key in REFUSED
    return setting.origin.source is Source.ENVIRONMENT and not known and not _nearest(key)


def _ignored(strange: Iterable[Setting], links: list[str]) -> Iterator[str]:
    """Notes on variables with our prefix that configure nothing."""
    if links:
        yield (
            f"ignored, as Kubernetes sets them for a Service: {', '.join(map(masked_name, links))} "
            "(enableServiceLinks: false in the pod removes them)"
        )
    for setting in strange:
        yield f"ignored: {setting.origin.location} is not a key; the keys are {', '.join(_KEYS)}"


def _slow_before_quick(urls: Sequence[str]) -> Iterator[str]:
    """One note for the first remote that is asked after a slower one."""
    slow = ""
    for kind in map(kind_of, urls):
        if slow and kind.quick:
            yield f"remotes: {slow} is asked before {kind.name}, which answers faster: put {kind.name} first"
            return
        slow = slow or (kind.name if kind.lookup is Lookup.CATALOG else "")


def _unindented(read: FileSettings) -> Iterator[str]:
    """An `ec:` whose keys were not indented: LMCache would take those that it also has, and nothing would report it."""
    beside = [setting for setting in read.others if setting.key in (*SHARED, "remote_url")]
    if read.empty_ec and not read.ours and beside:
        named = ", ".join(f"{setting.key} ({setting.origin.location})" for setting in beside)
        yield (
            f"ec in {read.empty_ec} has no value, but is followed, without indentation, by {named}: "
            "indent what belongs to ec by two spaces, or write ec: {} if nothing does"
        )


def _misspelled_ec(read: FileSettings) -> Iterator[str]:
    """A map that LMCache does not know, in a file without any of our keys: it would have no effect."""
    for setting in () if read.ours else read.others:
        key, value = setting.key, setting.value
        if not isinstance(value, Mapping) or key in SHARED or key in NOTED or key in REFUSED:
            continue
        ours = [name for name in map(str, value) if name.lower() in (*_KEYS, "remote_url")]
        alike = difflib.get_close_matches(key, ("ec", "encoder_cache"), 1, 0.7)
        if ours and (alike or any(name.lower() not in _COMMON for name in ours)):
            named = f"{masked_name(key)} in {setting.origin.location}"
            yield f"{named} is not read, although {ours[0]} in it is a key of ec: did you mean ec?"


def _unknown(setting: Setting, secret: bool) -> str:
    nearest = _nearest(setting.key)
    # Under a name that resembles none of ours it may be anything, even another program's password.
    value = masked(setting.value) if nearest else masked_unknown(setting.value)
    named = f"unknown key {masked_name(setting.name)}={HIDDEN if secret else value}"
    if setting.key == "ec" and isinstance(setting.value, Mapping):
        advice = "write the keys there directly, without ec around them"
    else:
        advice = f"did you mean {nearest[0]}?" if nearest else f"must be one of {', '.join(_KEYS)}"
    return f"{named} in {setting.origin.location}: {advice}"


def _is_misplaced(key: str) -> bool:
    """LMCache at most warns about such a key, and the cache would never see it."""
    return key.startswith(("ec.", "ec-")) or (key in _KEYS and key not in SHARED)


def _misplaced(setting: Setting) -> str:
    key = setting.key[3:] if setting.key.startswith(("ec.", "ec-")) else setting.key
    value = f"={masked(setting.value)}" if key in _KEYS else ""
    return (
        f"{masked_name(setting.key)}{value} in {setting.origin.location} is outside of ec: "
        f"indent it under ec: as {masked_name(key)}, or write ec_{masked_name(key)}"
    )


def _named_twice(settings: Iterable[Setting]) -> Iterator[str]:
    """`remote_url` and `remotes` in the same source: one of them would be silently ignored."""
    locations: dict[Source, dict[str, str]] = {}
    for setting in settings:
        if setting.key in ("remote_url", "remotes"):
            locations.setdefault(setting.origin.source, {})[setting.key] = setting.origin.location
    for named in locations.values():
        if len(named) == 2:
            both = ", ".join(f"{key} in {place}" for key, place in named.items())
            yield f"{both}: keep one; `remotes` takes a list"


def _as_ours(setting: Setting) -> Setting:
    """LMCache's key for one remote is another name for our `remotes`."""
    if setting.key != "remote_url":
        return setting
    return replace(setting, key="remotes", written=setting.name)


def _filled(value: object, environ: Mapping[str, str]) -> object:
    """Addresses with their variables filled in; any other value unchanged. ValueError: see `filled`."""
    if isinstance(value, list):
        return [filled(each, environ) if isinstance(each, str) else each for each in value]
    return filled(value, environ) if isinstance(value, str) else value


def _inherited(
    others: list[Setting], environ: Mapping[str, str], written: Mapping[str, Setting]
) -> tuple[dict[str, Setting], list[str], list[str]]:
    """The locations of the KV part that are also used here, why another is not, and what is wrong with one."""
    kv = {setting.key: (setting.value, setting.origin.location) for setting in others}
    for key in ("local_disk", "remote_url", "extra_config"):
        if (name := f"LMCACHE_{key.upper()}") in environ:
            kv[key] = environ[name].strip("'\" "), name
    found: dict[str, Setting] = {}
    notes: list[str] = []
    problems: list[str] = []

    def inherit(key: str, value: object, of: str) -> None:
        found[key] = Setting(key, value, Origin(Source.INHERITED, f"{of} of the KV part, {kv[of][1]}"))

    if folder := _below(kv.get("local_disk", ("", ""))[0]):
        inherit("local_disk", folder, "local_disk")
    extra_config = _of_remotes(kv.get("extra_config", (None, ""))[0])
    if extra_config:
        inherit("extra_config", extra_config, "extra_config")
    url, location = kv.get("remote_url", (None, ""))
    if url and "remotes" not in written:
        try:
            address = filled(str(url), environ)
        except ValueError as error:
            problems.append(f"remote_url={masked(url)} of the KV part, {location}: {error}")
            return found, notes, problems
        try:
            check_remote(configured(address, extra_config))
            inherit("remotes", [url], "remote_url")
        except ValueError as error:
            notes.append(f"remote_url of the KV part, {location}, is not used here: {error}")
    return found, notes, problems


def _of_remotes(extra_config: object) -> dict[str, object]:
    """The keys of a remote in LMCache's map, or its JSON; all else, and any other form, is left to LMCache."""
    try:
        found = json.loads(extra_config) if isinstance(extra_config, str) else extra_config
    except (ValueError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if is_remote_key(key)} if isinstance(found, dict) else {}


def _below(local_disk: object) -> str | None:
    """Our folder under the (first) folder of the KV part, which may be relative to the engine's working directory."""
    parts = str(local_disk or "").split(",")
    first = next((part.strip() for part in parts if part.strip()), "").removeprefix("file://")
    if not first or "://" in first:
        return first or None
    return str(Path(first).absolute() / _INHERITED_FOLDER)
