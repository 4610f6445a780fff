# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: the file, the environment, vLLM's extra configuration. Only their form is checked."""

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from lmcache_ec.mask import masked_name, masked_path, masked_unknown

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
ENV_PREFIX = "LMCACHE_EC_"
NO_KEYS = frozenset({"LMCACHE_EC_FRONT_END_KEY"})
"""Variables with this prefix that configure nothing: see `adapters/vllm/identifiers.py`."""
EXTRA = "ec_connector_extra_config"


class ConfigError(ValueError):
    """The configuration cannot be used. Its arguments are the problems, each a sentence that shows no credential."""

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.args]
        return "encoder cache configuration: " + "\n  ".join(lines if len(lines) == 1 else ["", *lines])


class Source(enum.StrEnum):
    DEFAULT = "default"
    INHERITED = "inherited"
    FILE = "file"
    ENVIRONMENT = "environment"
    EXTRA = "extra"
    ARGUMENTS = "arguments"
    """Of `lmcache_ec.Cache`: they are not logged, so they may hold credentials."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value is set. `location`, which holds no credential, is a file and line, a variable, or the extra
    configuration."""

    source: Source
    location: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One key, its name in lower case. `written` is the name in the file, if that differs (`ec_<key>`)."""

    key: str
    value: object
    origin: Origin
    written: str = ""

    @property
    def name(self) -> str:
        return self.written or self.key


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Those of `ec:` and `ec_<key>` in file order, all others (LMCache's), and keys given twice."""

    ours: list[Setting]
    others: list[Setting]
    problems: list[str]
    empty_ec: str = ""
    """The location of `ec:`, if it has no value."""


_SERVICE_LINK = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Variables that Kubernetes sets in each pod for a Service whose name begins with `lmcache-ec`.

    For a Service `lmcache-ec-redis` these are LMCACHE_EC_REDIS_SERVICE_HOST, LMCACHE_EC_REDIS_PORT=tcp://… and more.
    """
    ours = (name for name in environ if name.startswith(ENV_PREFIX))
    return sorted(name for name in ours if _SERVICE_LINK.fullmatch(name.removeprefix(ENV_PREFIX)))


def from_environ(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Settings from `LMCACHE_EC_<KEY>`; Kubernetes' service links are left out."""
    passed_over = {*NO_KEYS, *service_links(environ)}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX) and name not in passed_over:
            key = name.removeprefix(ENV_PREFIX).strip().lower()
            yield Setting(key, value, Origin(Source.ENVIRONMENT, masked_name(name)))


def from_extra(extra: Mapping[str, object], source: Source) -> Iterator[Setting]:
    """Settings passed to vLLM as the connector's own configuration, or by a program to `Cache`."""
    where = EXTRA if source is Source.EXTRA else "the arguments of Cache"
    for key, value in extra.items():
        yield Setting(str(key).strip().lower(), value, Origin(source, where))


def from_file(file: str) -> FileSettings:
    """ConfigError if the file cannot be read as a map. Names the line but never quotes it: it may hold a password."""
    asked = f"{FILE_VARIABLE}={masked_path(file)}"
    try:
        return _parse(Path(file).read_bytes(), masked_path(file))
    except OSError as error:
        raise ConfigError(f"{asked}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ConfigError(
            f"{asked}: not YAML{line}: correct it there or in the line before; indent with spaces, not with tabs"
        ) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{asked}: not YAML: must be a text file with a map of keys") from None


def _parse(text: bytes, file: str) -> FileSettings:
    loader = yaml.SafeLoader(text)
    found = FileSettings([], [], [])
    for key, node, line in _pairs(loader, loader.get_single_node(), file, found.problems):
        lowered = key.strip().lower()
        if lowered == "ec":
            if isinstance(node, yaml.ScalarNode) and loader.construct_object(node) is None:
                found = replace(found, empty_ec=f"{file} line {line}")
            for inner, value, inner_line in _pairs(loader, node, f"ec in {file}", found.problems):
                origin = Origin(Source.FILE, f"{file} line {inner_line}")
                found.ours.append(Setting(inner.strip().lower(), loader.construct_object(value, deep=True), origin))
            continue
        ours = lowered.startswith("ec_")
        setting = Setting(
            lowered.removeprefix("ec_"),
            loader.construct_object(node, deep=True),
            Origin(Source.FILE, f"{file} line {line}"),
            written=lowered,
        )
        (found.ours if ours else found.others).append(setting)
    return found


def _pairs(
    loader: yaml.SafeLoader, node: yaml.Node | None, location: str, problems: list[str]
) -> Iterator[tuple[str, yaml.Node, int]]:
    """Key, value and line of each pair of a map, merged pairs (`<<`) first; nothing for null."""
    if not isinstance(node, yaml.MappingNode):
        value = None if node is None else loader.construct_object(node, deep=True)
        if value is not None:
            location = f"{location} line {node.start_mark.line + 1 if node else 1}"
            example = "enabled: false" if value is False else "local_disk: /data/encoder-cache"
            advice = f"must be a map of keys, for example ec: {{{example}}}"
            raise ConfigError(f"{location} is {masked_unknown(value)}: {advice}")
        return
    seen: dict[object, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if isinstance(key, str) and seen.setdefault(key, line) != line:
            problems.append(f"{masked_name(key)} is given twice in {location}, lines {seen[key]} and {line}: keep one")
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        yield str(loader.construct_object(key_node, deep=True)), value_node, key_node.start_mark.line + 1
