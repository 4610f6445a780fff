# SPDX-License-Identifier: Apache-2.0
"""One configuration from file, environment and extra configuration, with errors that tell a newcomer what to fix."""

import json
import math
import os
import pickle
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from pydantic import ValidationError

from lmcache_ec.config import ConfigError, EncoderCacheConfig, Origin, Source, load_config, resolve, summary
from lmcache_ec.config.keys import accepts, default
from lmcache_ec.host import memory, memory_warning

CANARY = "hunter2"
EXTRA = "ec_connector_extra_config"
MANUAL = Path(__file__).parents[2] / "configs" / "embedded.yaml"
KEYS = EncoderCacheConfig.model_fields

File = Callable[[str], dict[str, str]]


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(text: str) -> dict[str, str]:
        """The environment that makes this text the configuration file."""
        (tmp_path / "lmcache.yaml").write_text(dedent(text))
        return {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}

    return write


# ---- what is resolved, and from where


def test_without_any_configuration_the_defaults_are_safe() -> None:
    config = load_config(environ={})
    assert config == EncoderCacheConfig()
    assert config.enabled
    assert config.local_disk is None
    assert not config.persist_client_ids
    assert config.persist_updated_weights is False
    assert (config.max_local_cpu_bytes, config.max_local_disk_bytes) == (2 << 30, 16 << 30)


@pytest.mark.parametrize(
    ("text", "meant"), [("true", True), ("1", True), ("off", False), ("False", False), ("by_version", "by_version")]
)
def test_updated_weights_persist_by_a_flag_or_by_version(text: str, meant: object) -> None:
    config = load_config(environ={"LMCACHE_EC_PERSIST_UPDATED_WEIGHTS": text})
    assert config.persist_updated_weights == meant


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    monkeypatch.setenv("LMCACHE_EC_EPOCH", "7")
    assert load_config().epoch == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "---",
        "~",
        "ec:",
        "ec: {}",
        "chunk_size: 256\nlocal_cpu: true\nextra_config: {a: 1}",
        "remote_serde: naive\nblocking_timeout_secs: 10\nec: {remote_url: null}",
    ],
)
def test_a_file_without_our_keys_changes_nothing(file: File, text: str) -> None:
    assert load_config(environ=file(text)) == EncoderCacheConfig()
    assert resolve(environ=file(text)).notes == ()


def test_map_and_flat_keys_mean_the_same(file: File) -> None:
    nested = load_config(environ=file("ec: {max_local_cpu_size: 0.5, local_disk: /data, enabled: false, Salt: x}"))
    flat = load_config(
        environ=file("ec_max_local_cpu_size: 0.5\nec_local_disk: file:///data/\nEC_enabled: no\nec_salt: x")
    )
    merged = load_config(
        environ=file("a: &a {salt: y, max_local_cpu_size: 0.5}\nec: {<<: *a, local_disk: /data, enabled: no, salt: x}")
    )
    assert nested == flat == merged
    assert nested == EncoderCacheConfig(max_local_cpu_size=0.5, local_disk=Path("/data"), enabled=False, salt="x")


def test_environment_overrides_the_file_and_extra_overrides_both_and_each_value_names_its_source(
    file: File,
) -> None:
    environ = {
        **file("local_disk: /kv\nec:\n  epoch: 1\n  salt: file\n  drain_s: 5\nec_store_timeout_s: 3"),
        "LMCACHE_EC_EPOCH": "2",
        "LMCACHE_EC_SALT": "environment",
        "LMCACHE_EC_PERSIST_CLIENT_IDS": "true",
    }
    name = environ["LMCACHE_CONFIG_FILE"]
    resolved = resolve({"epoch": 3}, environ)
    config = resolved.config
    assert (config.epoch, config.salt, config.drain_s, config.persist_client_ids) == (3, "environment", 5.0, True)
    assert resolved.origins == dict.fromkeys(KEYS, Origin(Source.DEFAULT, "default")) | {
        "epoch": Origin(Source.EXTRA, EXTRA),
        "salt": Origin(Source.ENVIRONMENT, "LMCACHE_EC_SALT"),
        "persist_client_ids": Origin(Source.ENVIRONMENT, "LMCACHE_EC_PERSIST_CLIENT_IDS"),
        "drain_s": Origin(Source.FILE, f"{name} line 5"),
        "store_timeout_s": Origin(Source.FILE, f"{name} line 6"),
        "local_disk": Origin(Source.INHERITED, f"local_disk of the KV part, {name} line 1"),
    }


def test_a_bad_value_that_is_overridden_is_no_error(file: File) -> None:
    environ = file("ec: {epoch: -1, remote_url: lm://host}") | {"LMCACHE_EC_REMOTE_URL": ""}
    assert load_config({"epoch": 3}, environ).epoch == 3


@pytest.mark.parametrize("spelling", ["/kv/cache", "file:///kv/cache/", "/kv/cache,/kv/other", "'/kv/cache'"])
def test_the_place_of_the_kv_part_is_inherited_and_its_budget_is_not(file: File, spelling: str) -> None:
    text = f"local_disk: {spelling}\nmax_local_disk_size: 500\nmax_local_cpu_size: 20\n"
    inherited = EncoderCacheConfig(local_disk=Path("/kv/cache/encoder-cache"))
    assert load_config(environ=file(text)) == inherited
    assert load_config(environ={"LMCACHE_LOCAL_DISK": spelling, "LMCACHE_MAX_LOCAL_CPU_SIZE": "20"}) == inherited
    assert load_config(environ=file(text + "ec: {local_disk: /mine}")).local_disk == Path("/mine")
    assert load_config(environ=file(text + "ec: {local_disk: null}")).local_disk is None
    assert load_config(environ={**file(text), "LMCACHE_EC_LOCAL_DISK": ""}).local_disk is None
    assert load_config(environ={**file(text), "LMCACHE_LOCAL_DISK": ""}).local_disk is None
    assert load_config(environ={**file(text), "LMCACHE_LOCAL_DISK": "/env"}).local_disk == Path("/env/encoder-cache")


def test_the_remote_of_the_kv_part_is_inherited_where_we_have_a_tier_for_it(file: File) -> None:
    text = "remote_url: rediss://user:hunter2@host:6379/1\nextra_config: {s3_region: x, other: y}\n"
    resolved = resolve(environ=file(text))
    assert resolved.config.remotes == ("rediss://user:hunter2@host:6379/1",)
    assert resolved.config.extra_config == {"s3_region": "x"}
    assert resolved.origins["remotes"].source is Source.INHERITED
    line = summary(resolved.config, resolved.origins)
    assert f"remotes=[redis host:6379/1] ({resolved.origins['remotes'].location})" in line
    assert not {"hunter2", "user"} & set(re.split(r"\W+", f"{line} {resolved.config!r}"))
    assert load_config(environ=file(text + "ec: {remotes: []}")).remotes == ()
    assert load_config(environ=file(text + "ec: {remote_url: 's3://bucket'}")).remotes == ("s3://bucket",)
    assert load_config(environ={**file(text), "LMCACHE_REMOTE_URL": "valkey://h"}).remotes == ("valkey://h",)
    assert load_config(environ={**file(text), "LMCACHE_REMOTE_URL": ""}).remotes == ()
    several = "redis-cluster://a:1,b:2, s3://bucket/prefix"
    assert load_config(environ={"LMCACHE_EC_REMOTES": several}).remotes == tuple(several.split(", "))


@pytest.mark.parametrize("url", ["azure://container", "mooncakestore://host", "redis://[hunter2]", "s3://A"])
def test_a_remote_of_the_kv_part_that_cannot_serve_here_is_noted_and_does_not_end_the_start(
    file: File, url: str
) -> None:
    resolved = resolve(environ=file(f"remote_url: '{url}'\nextra_config: [1]"))
    assert resolved.config == EncoderCacheConfig()
    (note,) = resolved.notes
    assert "remote_url of the KV part, " in note
    assert "line 1, is not used here: " in note
    assert CANARY not in note


def test_a_relative_place_of_the_kv_part_is_where_lmcache_would_put_it(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(environ=file("local_disk: kv/")).local_disk == tmp_path / "kv" / "encoder-cache"


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        EncoderCacheConfig().epoch = 1  # type: ignore[misc]


def test_the_line_at_start_names_the_values_in_force_and_their_sources(file: File) -> None:
    config = EncoderCacheConfig(max_local_cpu_size=1.5, local_disk=Path("/data"))
    assert summary(config) == "encoder cache: LocalCPU 1.5 GiB, LocalDisk 16 GiB at /data"
    environ = file("local_disk: /kv\nec:\n  max_local_cpu_size: 4\n  start_timeout_s: 10") | {"LMCACHE_EC_EPOCH": "3"}
    name = environ["LMCACHE_CONFIG_FILE"]
    resolved = resolve({"salt": "token=hunter2"}, environ)
    assert summary(resolved.config, resolved.origins) == (
        f"encoder cache: LocalCPU 4 GiB ({name} line 3), LocalDisk 16 GiB (default) at /kv/encoder-cache "
        f"(local_disk of the KV part, {name} line 1), salt=<hidden> ({EXTRA}), "
        "epoch=3 (LMCACHE_EC_EPOCH)"
    )
    resolved = resolve({}, {"LMCACHE_EC_ENABLED": "no"})
    assert summary(resolved.config, resolved.origins) == (
        "encoder cache: off, because ec.enabled is false (LMCACHE_EC_ENABLED)"
    )


def test_a_limit_beyond_the_memory_at_hand_is_a_warning_and_no_error() -> None:
    room = memory()
    assert room is not None
    assert memory_warning(1) is None
    warning = memory_warning(1 << 50)
    assert warning is not None
    assert "1048576.0 GiB" in warning
    assert room.limited_by in warning
    assert "lower max_local_cpu_size" in warning
    assert memory_warning(room.available_bytes // 4) is None
    eight = memory_warning(room.available_bytes // 4, engines=8)
    assert eight is not None
    assert "in each of 8 engines" in eight


# ---- the manual


def test_every_key_has_a_description_and_what_it_accepts() -> None:
    for key, field_info in KEYS.items():
        assert field_info.description, key
        assert "must be" in accepts(key).text, key


def test_the_manual_shows_every_key_with_unit_and_default(tmp_path: Path) -> None:
    text = MANUAL.read_text()
    written = yaml.safe_load(text)
    assert list(written) == ["ec"]
    assert written["ec"].keys() == KEYS.keys()
    config = load_config(environ={"LMCACHE_CONFIG_FILE": str(MANUAL)})
    others = {key for key in KEYS if getattr(config, key) != default(key)}
    assert others == set(re.findall(r"^# .* Only `(.*)` is set to something else\.$", text, re.MULTILINE))
    for key in KEYS:
        comment = re.search(rf"((?:^  # .*\n)+)  {key}: ", text, re.MULTILINE)
        assert comment, key
        documented = re.search(r"Default: (.*)$", comment[1], re.MULTILINE)
        assert documented, key
        value = yaml.safe_load(documented[1])
        assert (tuple(value) if isinstance(value, list) else value) == default(key), key
        unit = accepts(key).unit
        assert not unit or re.search(rf"( {unit}|\({unit}\))\.\s(  # )?Default", comment[1]), key


# ---- mistakes


@dataclass(frozen=True)
class Mistake:
    """What a user wrote, and everything that the single error must contain. <file> stands for the file's path."""

    expected: tuple[str, ...]
    text: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)


GIB = "a number of GiB"
MISTAKES = {
    "a letter": Mistake(
        ("max_local_cpu_sise=4", "<file> line 2", "did you mean max_local_cpu_size?"), "ec:\n  max_local_cpu_sise: 4"
    ),
    "hyphens": Mistake(
        ("max-local-disk-size=4", "<file> line 1", "did you mean max_local_disk_size?"), "ec: {max-local-disk-size: 4}"
    ),
    "a letter in a variable": Mistake(
        ("local_dsk='/data'", "LMCACHE_EC_LOCAL_DSK", "did you mean local_disk?"),
        environ={"LMCACHE_EC_LOCAL_DSK": "/data"},
    ),
    "lmcache's prefix for extra": Mistake(
        ("lmcache.epoch=1", EXTRA, "did you mean epoch?"), extra={"lmcache.epoch": 1}
    ),
    "the file's prefix in extra": Mistake(("ec_epoch=1", EXTRA, "did you mean epoch?"), extra={"ec_epoch": 1}),
    "a map in extra": Mistake(("ec=<map>", EXTRA, "write the keys there directly"), extra={"ec": {"epoch": 1}}),
    "a key of something else": Mistake(
        ("compression=<text>", "<file> line 1", "must be one of enabled, namespace, "), "ec: {compression: zstd}"
    ),
    "a letter of the short name for one address": Mistake(
        ("remote_ulr", "<file> line 1", "did you mean remote_url?"), "ec: {remote_ulr: 'redis://host'}"
    ),
    "brackets in a variable": Mistake(
        ("remotes='[redis://one:6379, '", "LMCACHE_EC_REMOTES", "commas between them, without brackets"),
        environ={"LMCACHE_EC_REMOTES": "[redis://one:6379, "},
    ),
    "no indentation": Mistake(
        ("enabled=false", "<file> line 2", "is outside of ec", "ec_enabled"), "ec:\nenabled: false"
    ),
    "no indentation of what LMCache knows, too": Mistake(
        ("ec in <file> line 1 has no value", "local_disk (<file> line 2)", "indent", "ec: {}"), "ec:\nlocal_disk: /data"
    ),
    "no indentation of an address alone": Mistake(
        ("ec in <file> line 1 has no value", "remote_url (<file> line 2)", "indent", "ec: {}"),
        "ec:\nremote_url: redis://host",
    ),
    "ec_ before an unknown name": Mistake(("ec_cache=<text>", "<file> line 1", "must be one of"), "ec_cache: x"),
    "a dot": Mistake(("ec.epoch=3", "<file> line 1", "indent it under ec: as epoch"), "ec.epoch: 3"),
    "a key twice": Mistake(
        ("epoch is given twice", "ec in <file>, lines 2 and 4", "keep one"), "ec:\n  epoch: 1\n  salt: a\n  epoch: 2"
    ),
    "the map twice": Mistake(
        ("ec is given twice in <file>, lines 1 and 3", "keep one"), "ec:\n  epoch: 1\nec:\n  salt: a"
    ),
    "off by a word": Mistake(("ec in <file> line 1 is false", "a map", "ec: {enabled: false}"), "ec: off"),
    "a list of keys": Mistake(
        ("ec in <file> line 2 is <list>", "a map", "ec: {local_disk: /data/encoder-cache}"), "ec:\n  - epoch: 1"
    ),
    "a file of text": Mistake(("<file> line 1 is <text>", "a map"), "epoch=1"),
    "a tab": Mistake(("LMCACHE_CONFIG_FILE=<file>", "line 2", "not YAML"), "ec:\n\tepoch: 1"),
    "an open brace": Mistake(("LMCACHE_CONFIG_FILE=<file>", "line 2", "not YAML"), "ec: {epoch: 1\nlocal_cpu: true"),
    "no such file": Mistake(
        ("LMCACHE_CONFIG_FILE=/no/such.yaml", "No such file"), environ={"LMCACHE_CONFIG_FILE": "/no/such.yaml"}
    ),
    "a folder for a file": Mistake(
        ("LMCACHE_CONFIG_FILE=/tmp", "Is a directory"), environ={"LMCACHE_CONFIG_FILE": "/tmp"}
    ),
    "a unit": Mistake(
        ("max_local_cpu_size='4GB'", "<file> line 1", GIB, "for example 4", "without a unit"),
        "ec: {max_local_cpu_size: 4GB}",
    ),
    "no value": Mistake(("max_local_cpu_size=null", "<file> line 2", GIB), "ec:\n  max_local_cpu_size:"),
    "no memory": Mistake(("max_local_cpu_size=0", EXTRA, "GiB above 0"), extra={"max_local_cpu_size": 0}),
    "no end of memory": Mistake(
        ("max_local_cpu_size=Infinity", "<file> line 1", GIB), "ec: {max_local_cpu_size: .inf}"
    ),
    "a flag for a size": Mistake(("max_local_disk_size=true", "<file> line 1", GIB), "ec: {max_local_disk_size: on}"),
    "a negative size": Mistake(
        ("max_local_disk_size='-1'", "LMCACHE_EC_MAX_LOCAL_DISK_SIZE", GIB),
        environ={"LMCACHE_EC_MAX_LOCAL_DISK_SIZE": "-1"},
    ),
    "a folder without room": Mistake(
        ("max_local_disk_size=0", "<file> line 1", "GiB above 0", "local_disk: null"),
        "ec: {local_disk: /data, max_local_disk_size: 0}",
    ),
    "remotes twice": Mistake(
        ("remote_url in <file> line 2, remotes in <file> line 3", "keep one", "takes a list"),
        "ec:\n  remote_url: redis://one\n  remotes: [redis://two]",
    ),
    "an unset variable": Mistake(
        ("remote_url=<hidden> in <file> line 1: ", "no such environment variable: REDIS_PASSWORD"),
        "ec: {remote_url: 'redis://:${REDIS_PASSWORD}@host'}",
    ),
    "a relative folder": Mistake(
        ("local_disk='cache'", "<file> line 1", f"for example {os.getcwd()}/cache"), "ec: {local_disk: cache}"
    ),
    "a home": Mistake(
        ("local_disk='~/cache'", EXTRA, f"for example {Path.home()}/cache"), extra={"local_disk": "~/cache"}
    ),
    "a variable in a path": Mistake(
        ("local_disk='/data/${USER}'", "<file> line 1", "variables are replaced in addresses of remotes only"),
        "ec: {local_disk: '/data/${USER}'}",
    ),
    "two folders": Mistake(("local_disk='/a,/b'", "<file> line 1", "must be one folder"), "ec: {local_disk: '/a,/b'}"),
    "a list of folders": Mistake(
        ("local_disk=<list>", "<file> line 1", "must be a folder, /path"), "ec: {local_disk: [/a]}"
    ),
    "a bucket for a folder": Mistake(
        ("local_disk='s3://bucket'", EXTRA, "a folder on this host"), extra={"local_disk": "s3://bucket"}
    ),
    "a bucket for the folder of kv": Mistake(
        ("local_disk='s3://bucket'", "<file> line 1", "a folder on this host"), "local_disk: s3://bucket"
    ),
    "seconds for milliseconds": Mistake(
        ("load_deadline_ms=0.5", "<file> line 1", "a whole number of milliseconds"), "ec: {load_deadline_ms: 0.5}"
    ),
    "milliseconds for seconds": Mistake(
        ("start_timeout_s=10000", EXTRA, "seconds", "at most 3600"), extra={"start_timeout_s": 10000}
    ),
    "a word for a time": Mistake(
        ("drain_s='forever'", "<file> line 1", "seconds", "0 to 3600"), "ec: {drain_s: forever}"
    ),
    "a word for a flag": Mistake(
        ("enabled='maybe'", "LMCACHE_EC_ENABLED", "true or false"), environ={"LMCACHE_EC_ENABLED": "maybe"}
    ),
    "a list for a flag": Mistake(
        ("persist_client_ids=<list>", "<file> line 1", "true or false"), "ec: {persist_client_ids: [a]}"
    ),
    "neither a flag nor a choice": Mistake(
        ("persist_updated_weights='by-version'", "<file> line 1", "true, false or by_version"),
        "ec: {persist_updated_weights: by-version}",
    ),
    "an empty variable": Mistake(("epoch=''", "LMCACHE_EC_EPOCH", "a whole number"), environ={"LMCACHE_EC_EPOCH": ""}),
    "a date for an epoch": Mistake(("epoch=<date>", "<file> line 1", "a whole number"), "ec: {epoch: 2026-01-01}"),
    "a number for a salt": Mistake(("salt=7", "<file> line 1", 'put a number in quotes: "7"'), "ec: {salt: 7}"),
    "a model for a namespace": Mistake(
        ("namespace='Qwen/Qwen3-VL'", "<file> line 1", "a-z 0-9 . _ -"), "ec: {namespace: Qwen/Qwen3-VL}"
    ),
    "another policy": Mistake(("cache_policy='LFU'", "<file> line 1", "must be LRU"), "ec: {cache_policy: LFU}"),
    "a remote that takes KV chunks alone": Mistake(
        ("remote_url='azure://container' in <file> line 1: ", "cannot keep encoder outputs"),
        "ec: {remote_url: 'azure://container'}",
    ),
    "a catalog of what cannot be listed": Mistake(
        ("remote_lookup='catalog'", "<file> line 1", "must be auto or probe with lm://"),
        "ec: {remote_url: 'lm://host:65432', remote_lookup: catalog}",
    ),
    "an address without its ://": Mistake(
        (
            "remote_url=<hidden>",
            "LMCACHE_EC_REMOTE_URL: ",
            "must be redis://, s3://, lm:// or another of docs",
        ),
        environ={"LMCACHE_EC_REMOTE_URL": "redis//u:hunter2@host"},
    ),
    "a remote that is no address": Mistake(
        (
            "remote_url='myhost'",
            "LMCACHE_EC_REMOTE_URL: ",
            "must be redis://, s3://, lm:// or another of docs",
        ),
        environ={"LMCACHE_EC_REMOTE_URL": "myhost"},
    ),
    "a bucket's name": Mistake(
        ("remotes=['s3://My_Bucket']", EXTRA, "s3://bucket/prefix", "a-z 0-9"), extra={"remotes": ["s3://My_Bucket"]}
    ),
    "a password as it is": Mistake(
        ("remote_url=<hidden> in <file> line 1: ", "in user and password write %23 for #, %2F for /"),
        f"ec: {{remote_url: 'redis://:{CANARY}/x@host'}}",
    ),
    "one remote twice": Mistake(
        ("remotes=['redis://host', 'redis://host']", EXTRA, "each remote once"),
        extra={"remotes": ["redis://host", "redis://host"]},
    ),
    "a number for remotes": Mistake(("remotes=5", "<file> line 1", "a URL or a list of URLs"), "ec: {remotes: 5}"),
    "a word for a time to live": Mistake(("ttl_s='1d'", "<file> line 1", "seconds above 0"), "ec_ttl_s: 1d"),
    "a way to ask": Mistake(
        ("remote_lookup='ask'", "<file> line 1", "auto, probe or catalog"), "ec: {remote_lookup: ask}"
    ),
    "a map that is none": Mistake(
        ("extra_config='s3_region=x'", "LMCACHE_EC_EXTRA_CONFIG", "must be a map, or its JSON"),
        environ={"LMCACHE_EC_EXTRA_CONFIG": "s3_region=x"},
    ),
    "a map that vllm logs": Mistake(
        ("extra_config", EXTRA, "may hold credentials: vLLM logs that map"), extra={"extra_config": {"s3_region": "x"}}
    ),
    "lmcache's plugin": Mistake(
        ("storage_plugins=<list>", "<file> line 1", "remove it"), "ec: {storage_plugins: [mine]}"
    ),
    "lmcache's gds": Mistake(
        ("gds_path='/gds'", "<file> line 1", "local_disk and remotes name what is"), "ec: {gds_path: /gds}"
    ),
    "lmcache's transfer": Mistake(
        ("enable_pd='true'", "LMCACHE_EC_ENABLE_PD", "vLLM's ec_role"), environ={"LMCACHE_EC_ENABLE_PD": "true"}
    ),
    "lmcache's tiers by name": Mistake(
        ("store_location='LocalCPUBackend'", "<file> line 1", "local_disk: null"),
        "ec: {store_location: LocalCPUBackend}",
    ),
    "a password where vllm logs it": Mistake(
        ("redis_password", EXTRA, "vLLM logs that map", "use the file or environment", "in its log now: change it"),
        extra={"redis_password": CANARY},
    ),
    "a password in an address": Mistake(
        ("salt", EXTRA, "holds a credential"), extra={"salt": f"redis://user:{CANARY}@host"}
    ),
    "a password in the address of a remote": Mistake(
        (f"remote_url in {EXTRA} holds a credential",), extra={"remote_url": f"redis://user:{CANARY}@host"}
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_one_error_that_explains_how_to_fix_it(mistake: Mistake, file: File) -> None:
    environ = {**file(mistake.text), **mistake.environ}
    with pytest.raises(ConfigError) as caught:
        load_config(mistake.extra, environ)
    assert len(caught.value.args) == 1
    text = str(caught.value)
    for expected in mistake.expected:
        assert expected.replace("<file>", environ["LMCACHE_CONFIG_FILE"]) in text
    assert "\n" not in text
    assert CANARY not in text


def test_several_problems_are_in_one_error_that_survives_the_way_to_another_process(file: File) -> None:
    environ = {**file("ec: {max_local_cpu_sise: 4, epoch: -1}\nec_drain_s: soon"), "LMCACHE_EC_CACHE_POLICY": "MRU"}
    with pytest.raises(ConfigError) as caught:
        load_config({"zzz": 5, "local_disk": "relative/path"}, environ)
    assert len(caught.value.args) == 6
    assert all(problem in str(caught.value) for problem in caught.value.args)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("max_local_cpu_size", math.nan),
        ("max_local_disk_size", 1 << 21),
        ("load_deadline_ms", 0),
        ("load_deadline_ms", True),
        ("start_timeout_s", 0),
        ("store_timeout_s", 1e9),
        ("drain_s", -1),
        ("drain_s", None),
        ("namespace", "../up"),
        ("namespace", 5),
        ("local_disk", 5),
        ("cache_policy", None),
        ("epoch", 10**400),
    ],
)
def test_values_that_cannot_work_are_refused_with_what_their_key_accepts(key: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* in {EXTRA}: {re.escape(accepts(key).text)}"):
        load_config({key: bad}, {})


# ---- credentials

SECRETS = {
    "password": CANARY,
    "redis_passwrd": CANARY,
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "auth_token": CANARY,
    "namespace_token": CANARY,
    "Local_Disk": f"cache/token={CANARY}",
    "aws-access-key": CANARY,
    "remote_url": f"redis://user:{CANARY}@host:6379",
    "remote_ulr": f"redis://:hun/ter{CANARY}@host",
    "Salt": f"s3://bucket?secret_key={CANARY}",
    f"redis://user:{CANARY}@host": None,
    "remotes": [f"redis://user:{CANARY}@host:6379"],
    "extra_config": {"aws_secret_access_key": CANARY},
    "blend_special_str": {"deep": [{"password": CANARY}]},
    **dict.fromkeys(KEYS, f"redis://user:{CANARY}@host:6379"),
}


@pytest.mark.parametrize("key", SECRETS)
def test_no_text_that_leaves_the_configuration_shows_a_credential(file: File, key: str) -> None:
    value = SECRETS[key]
    flat = json.dumps({f"ec_{key}": value})
    ways: list[tuple[dict[str, object], dict[str, str]]] = [
        ({}, file(json.dumps({"ec": {key: value}}))),
        ({}, {f"LMCACHE_EC_{key.upper()}": value if isinstance(value, str) else json.dumps(value)}),
        ({}, {"LMCACHE_LOCAL_DISK": f"redis://user:{CANARY}@host"}),
        ({}, {"LMCACHE_CONFIG_FILE": f"redis://user:{CANARY}@host"}),
        ({key: value}, {}),
        ({"local_disk": {key: value}}, {}),
        ({"salt": {key: value}, "max_local_cpu_size": [value]}, {}),
    ]
    texts = [_all_text(extra, environ) for extra, environ in ways]
    for content in (flat, f"ec: {{a.{key}: {json.dumps(value)}}}", f"ec.{key}: {json.dumps(value)}"):
        texts.append(_all_text({}, file(content)))
    assert not [text for text in texts if CANARY in text]


def test_a_variable_is_filled_in_wherever_a_remote_is_named(file: File) -> None:
    """As part of an address, whatever it contains; or as a whole address, unchanged."""
    values = {"PASSWORD": "p@ss:/,${x}%", "ADDRESS": "redis://one:6379/2"}
    named = {"remotes": ["redis://u:${PASSWORD}@two:6379", "${ADDRESS}"]}
    expected = ("redis://u:p%40ss%3A%2F%2C%24%7Bx%7D%25@two:6379", "redis://one:6379/2")
    assert load_config(environ=file(json.dumps({"ec": named})) | values).remotes == expected
    both = {"LMCACHE_EC_REMOTE_URL": "redis://u:${PASSWORD}@two:6379,redis://one:6379/2"}
    assert load_config(environ=both | values).remotes == expected
    assert load_config({"remote_url": "${ADDRESS}"}, values).remotes == expected[1:]
    inherited = file("remote_url: redis://u:${PASSWORD}@two:6379")
    assert load_config(environ=inherited | values).remotes == expected[:1]
    dollars = {"remotes": ["redis://u:pa$$ss@two:6379", "redis://u:pa%24ss@one:6379"]}
    assert load_config(environ=file(json.dumps({"ec": dollars}))).remotes == (
        "redis://u:pa$ss@two:6379",
        "redis://u:pa%24ss@one:6379",
    )


@pytest.mark.parametrize("where", ["remote_url: {}", "ec:\n  remote_url: {}", "ec:\n  remotes: [{}]"])
@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("redis://u:${UNSET}@host:6379", "no such environment variable: UNSET"),
        ("redis://u:$SET@host:6379", "a variable is written ${SET}, with braces, and a dollar as $$"),
        ("redis://u:pa$word@host:6379", "a variable is written ${NAME}, with braces, and a dollar as $$"),
        ("$SET", "a variable is written ${SET}, with braces"),
        ("redis://u:${SET@host:6379", "a variable is written ${SET}, with braces, and a dollar as $$"),
        ("redis://u:${pa-word}@host:6379", "a variable is written ${NAME}, with braces, and a dollar as $$"),
        ("redis://u:${}@host:6379", "a variable is written ${NAME}, with braces, and a dollar as $$"),
        ("redis://u:word${@host:6379", "a variable is written ${NAME}, with braces, and a dollar as $$"),
    ],
)
def test_a_variable_that_is_not_set_or_has_no_braces_is_an_error(
    file: File, where: str, address: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=file(where.format(f"'{address}'")) | {"SET": CANARY})
    assert advice in str(caught.value)
    assert "line" in str(caught.value)
    assert CANARY not in str(caught.value)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("eec: {local_disk: /data}", 1, "local_disk"),
        ("chunk_size: 16\nencoder_cache:\n  enabled: false", 2, "enabled"),
        ("cache:\n  remote_url: redis://host", 1, "remote_url"),
        ("ec: {}\nce: {Epoch: 3}", 2, "Epoch"),
    ],
)
def test_a_misspelled_ec_is_noted_with_a_key_that_has_no_effect(file: File, text: str, line: int, key: str) -> None:
    environ = file(text)
    (note,) = [note for note in resolve(environ=environ).notes if "did you mean ec?" in note]
    assert f"{environ['LMCACHE_CONFIG_FILE']} line {line} is not read, although {key} in it is a key of ec" in note


@pytest.mark.parametrize(
    "text",
    [
        "extra_config: {remote_lookup: probe}",
        "telemetry: {enabled: true, namespace: x}",
        "ec: {epoch: 3}\nother: {epoch: 3}",
        "other: {compression: zstd}",
        "other: [local_disk]",
    ],
)
def test_a_map_of_something_else_is_not_taken_for_a_misspelled_ec(file: File, text: str) -> None:
    assert not [note for note in resolve(environ=file(text)).notes if "did you mean ec?" in note]


SERVICE_LINKS = {
    "LMCACHE_EC_REDIS_SERVICE_HOST": "10.0.0.7",
    "LMCACHE_EC_REDIS_SERVICE_PORT": "6379",
    "LMCACHE_EC_REDIS_SERVICE_PORT_CLIENT": "6379",
    "LMCACHE_EC_REDIS_PORT": "tcp://10.0.0.7:6379",
    "LMCACHE_EC_REDIS_PORT_6379_TCP": "tcp://10.0.0.7:6379",
    "LMCACHE_EC_REDIS_PORT_6379_TCP_PROTO": "tcp",
    "LMCACHE_EC_REDIS_PORT_6379_TCP_PORT": "6379",
    "LMCACHE_EC_REDIS_PORT_6379_TCP_ADDR": "10.0.0.7",
    "LMCACHE_EC_SERVICE_HOST": "10.0.0.8",
    "LMCACHE_EC_PORT": "udp://10.0.0.8:1",
}
"""What Kubernetes sets for Services called `lmcache-ec-redis` and `lmcache-ec`."""


def test_the_service_links_of_kubernetes_are_noted_and_configure_nothing() -> None:
    resolved = resolve(environ=SERVICE_LINKS)
    assert resolved.config == EncoderCacheConfig()
    [note] = resolved.notes
    assert "Kubernetes sets them for a Service" in note
    assert all(name in note for name in SERVICE_LINKS)


@pytest.mark.parametrize(
    ("keys", "notes"),
    [
        (
            "namespace: mine, epoch: 3, salt: x",
            ["salt='x' in <file> line 1: has no effect: `namespace` is set", "epoch=3 in <file> line 1: has no effect"],
        ),
        (
            "events_snapshot_endpoint: 'tcp://*:1'",
            ["events_snapshot_endpoint='tcp://*:1' in <file> line 1: has no effect: `events_endpoint` is not set"],
        ),
        ("namespace: mine", []),
        ("epoch: 3, salt: x", []),
        ("events_endpoint: 'tcp://*:1', events_snapshot_endpoint: 'tcp://*:2'", []),
    ],
)
def test_a_key_that_another_one_leaves_without_effect_is_noted(
    keys: str, notes: list[str], file: Callable[[str], dict[str, str]]
) -> None:
    environ = file(f"ec: {{{keys}}}")
    found = resolve(environ=environ).notes
    assert len(found) == len(notes)
    for note, begin in zip(found, notes, strict=True):
        assert note.startswith(begin.replace("<file>", environ["LMCACHE_CONFIG_FILE"]))


def test_a_variable_near_a_key_is_an_error_and_any_other_with_our_prefix_is_noted() -> None:
    with pytest.raises(ConfigError, match="did you mean local_disk"):
        load_config(environ={"LMCACHE_EC_LOCAL_DISC": "/data"})
    resolved = resolve(environ={"LMCACHE_EC_GRAFANA_FOLDER": CANARY})
    assert resolved.config == EncoderCacheConfig()
    [note] = resolved.notes
    assert note.startswith("ignored: LMCACHE_EC_GRAFANA_FOLDER is not a key")
    assert CANARY not in note


def test_a_slow_remote_before_a_quick_one_is_noted(file: File) -> None:
    def notes(*urls: str) -> tuple[str, ...]:
        return resolve(environ=file(json.dumps({"ec": {"remotes": urls}}))).notes

    assert [note for note in notes("s3://bucket/x?region=eu-west-1", "redis://host") if "put redis first" in note]
    assert notes("redis://host", "s3://bucket/x?region=eu-west-1") == ()


def test_no_error_shows_what_is_in_a_variable(file: File) -> None:
    for value in (CANARY, f"redis://:{CANARY}@host:port", f"nobody://:{CANARY}@host"):
        environ = file("ec: {remote_url: '${ADDRESS}'}") | {"ADDRESS": value}
        text = _all_text({}, environ)
        assert CANARY not in text
        assert "remote_url='${ADDRESS}'" in text, "what was written is shown"


def test_the_class_itself_does_not_quote_what_it_refuses() -> None:
    with pytest.raises(ValidationError) as caught:
        EncoderCacheConfig(drain_s=CANARY, nonsense=CANARY)  # type: ignore[call-arg]
    assert CANARY not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("content", ["{", "\t- ", "*", "!", "\x01", "&", "'", "? [", "@", "%"])
def test_no_error_quotes_a_file_that_is_no_yaml(file: File, content: str) -> None:
    assert CANARY not in _all_text({}, file(f"ec:\n  password: {content}{CANARY}\n  b"))
    assert CANARY not in _all_text({}, file(f"{content}{CANARY}"))


@pytest.mark.parametrize("value", [CANARY, {"password": CANARY}, f"redis://user:{CANARY}@host"])
def test_a_credential_in_extra_is_refused_under_any_name_and_at_any_depth(value: object) -> None:
    for extra in ({"redis_password": value}, {"extra_config": {"s3": [{"access_key": value}]}}):
        with pytest.raises(ConfigError, match=f"in {EXTRA} holds a credential: vLLM logs that map"):
            load_config(extra, {})


def test_a_path_that_only_sounds_like_a_secret_is_accepted_and_printed() -> None:
    config = load_config({"local_disk": "/data/tokenizers"}, {})
    assert config.local_disk == Path("/data/tokenizers")
    assert "/data/tokenizers" in summary(config)
    assert "local_disk='/data/tokenizers'" in repr(config)


def _all_text(extra: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """All text that a configuration produces, whether it is valid or not."""
    try:
        resolved = resolve(extra, environ)
    except ConfigError as error:
        return "".join(traceback.format_exception(error)) + repr(error)
    config = resolved.config
    return f"{config} {config!r} {summary(config, resolved.origins)} {resolved.origins} {resolved.notes}"
