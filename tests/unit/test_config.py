# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import ValidationError

from lmcache_ec.config import ConfigError, EncoderCacheConfig, load_config, summary


@pytest.fixture
def yaml(tmp_path: Path):
    def write(text: str) -> dict[str, str]:
        """The environment under which this text is the configuration file."""
        (tmp_path / "lmcache.yaml").write_text(dedent(text))
        return {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}

    return write


def test_without_any_configuration_the_defaults_are_safe() -> None:
    config = load_config(environ={})
    assert config == EncoderCacheConfig()
    assert config.enabled
    assert config.local_disk is None
    assert not config.persist_client_ids
    assert (config.max_local_cpu_bytes, config.max_local_disk_bytes) == (2 << 30, 16 << 30)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    monkeypatch.setenv("LMCACHE_EC_EPOCH", "7")
    assert load_config().epoch == 7


@pytest.mark.parametrize("text", ["", "ec:", "ec: {}", "chunk_size: 256\nlocal_cpu: true\nextra_config: {a: 1}"])
def test_a_file_that_says_nothing_of_us_changes_nothing(yaml, text: str) -> None:
    assert load_config(environ=yaml(text)) == EncoderCacheConfig()


def test_map_and_flat_keys_mean_the_same(yaml) -> None:
    nested = load_config(environ=yaml("ec: {max_local_cpu_size: 0.5, local_disk: /data, enabled: false, Salt: x}"))
    flat = load_config(
        environ=yaml("ec_max_local_cpu_size: 0.5\nec_local_disk: file:///data/\nEC_enabled: no\nec_salt: x")
    )
    assert nested == flat
    assert nested == EncoderCacheConfig(max_local_cpu_size=0.5, local_disk=Path("/data"), enabled=False, salt="x")


def test_environment_overrides_the_file_and_extra_overrides_both(yaml) -> None:
    environ = {
        **yaml("ec: {epoch: 1, salt: file, drain_s: 5}"),
        "LMCACHE_EC_EPOCH": "2",
        "LMCACHE_EC_SALT": "environment",
        "LMCACHE_EC_PERSIST_CLIENT_IDS": "true",
    }
    config = load_config({"epoch": 3}, environ)
    assert (config.epoch, config.salt, config.drain_s, config.persist_client_ids) == (3, "environment", 5.0, True)


def test_a_bad_value_that_is_overridden_is_no_error(yaml) -> None:
    assert load_config({"epoch": 3}, yaml("ec: {epoch: -1}")).epoch == 3


@pytest.mark.parametrize("spelling", ["/kv/cache", "file:///kv/cache/", "/kv/cache,/kv/other"])
def test_the_place_of_the_kv_part_is_inherited_and_its_budget_is_not(yaml, spelling: str) -> None:
    text = f"local_disk: {spelling}\nmax_local_disk_size: 500\nmax_local_cpu_size: 100\n"
    config = load_config(environ=yaml(text))
    assert config == EncoderCacheConfig(local_disk=Path("/kv/cache/encoder-cache"))
    assert load_config(environ=yaml(text + "ec: {local_disk: /mine}")).local_disk == Path("/mine")
    assert load_config(environ=yaml(text + "ec: {local_disk: null}")).local_disk is None
    assert load_config(environ={**yaml(text), "LMCACHE_EC_LOCAL_DISK": ""}).local_disk is None
    assert load_config(environ={**yaml(text), "LMCACHE_LOCAL_DISK": "/env"}).local_disk == Path("/env/encoder-cache")


def test_a_relative_place_of_the_kv_part_is_where_lmcache_would_put_it(
    yaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(environ=yaml("local_disk: kv/")).local_disk == tmp_path / "kv" / "encoder-cache"


def test_all_problems_are_in_one_message_with_key_value_origin_and_nearest_key(yaml) -> None:
    environ = {**yaml("ec: {max_local_cpu_sise: 4, epoch: -1}\nec_drain_s: soon"), "LMCACHE_EC_CACHE_POLICY": "MRU"}
    with pytest.raises(ConfigError) as caught:
        load_config({"zzz": 5, "local_disk": "relative/path"}, environ)
    text = str(caught.value)
    file = environ["LMCACHE_CONFIG_FILE"]
    assert f"unknown key max_local_cpu_sise=4 in {file} (ec): did you mean max_local_cpu_size?" in text
    assert "unknown key zzz=5 in ec_connector_extra_config: accepted are enabled, " in text
    assert f"epoch=-1 in {file} (ec): Input should be greater than or equal to 0" in text
    assert f"drain_s='soon' in {file} (ec_drain_s): Input should be a valid number" in text
    assert "cache_policy='MRU' in LMCACHE_EC_CACHE_POLICY: Input should be 'LRU'" in text
    assert "local_disk='relative/path' in ec_connector_extra_config: an absolute path is accepted" in text


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("max_local_cpu_size", 0),
        ("max_local_cpu_size", float("inf")),
        ("max_local_cpu_size", float("nan")),
        ("max_local_disk_size", -1),
        ("load_deadline_ms", 0),
        ("load_deadline_ms", 1.5),
        ("start_timeout_s", 0),
        ("store_timeout_s", 1e9),
        ("drain_s", -1),
        ("drain_s", None),
        ("enabled", "perhaps"),
        ("namespace", "../up"),
        ("local_disk", "/a,/b"),
        ("local_disk", ["/a"]),
    ],
)
def test_values_that_cannot_work_are_refused(key: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* in ec_connector_extra_config: "):
        load_config({key: bad}, {})


@pytest.mark.parametrize("text", ["ec: [1]", "ec: 5", "ec: yes", "- a list", "just text"])
def test_a_file_of_another_shape_is_named(yaml, text: str) -> None:
    environ = yaml(text)
    with pytest.raises(ConfigError, match="a map of keys is accepted") as caught:
        load_config(environ=environ)
    assert environ["LMCACHE_CONFIG_FILE"] in str(caught.value)


@pytest.mark.parametrize(
    "text", ["ec: {hunter2", "ec:\n\t- hunter2", "ec: *hunter2", "a: !hunter2 b", "a: \x01hunter2"]
)
def test_a_file_that_is_no_yaml_is_named_and_not_quoted(yaml, text: str) -> None:
    environ = yaml(text)
    with pytest.raises(ConfigError, match="not YAML") as caught:
        load_config(environ=environ)
    assert environ["LMCACHE_CONFIG_FILE"] in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/no/such/file.yaml: No such file"):
        load_config(environ={"LMCACHE_CONFIG_FILE": "/no/such/file.yaml"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("redis_password", "hunter2"),
        ("AWS_SECRET_ACCESS_KEY", "hunter2"),
        ("auth_token", "hunter2"),
        ("remote_url", "redis://user:hunter2@host:6379"),
        ("remote_url", "redis://:hun/ter2hunter2@host"),
        ("remote_url", "s3://bucket?secret_key=hunter2"),
        ("namespace", "redis://user:hunter2@host:6379"),
        ("remotes", ["redis://user:hunter2@host:6379"]),
        ("remotes", {"password": "hunter2"}),
    ],
)
def test_no_error_shows_a_secret(yaml, key: str, value: object) -> None:
    environ = yaml(f"ec: {{{key}: {value!r}}}")
    for extra, variables in (({key: value}, {}), ({}, environ), ({}, {f"LMCACHE_EC_{key}": str(value)})):
        with pytest.raises(ConfigError) as caught:
            load_config(extra, variables)
        assert key.lower() in str(caught.value).lower()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://user:pw@host", "s3://bucket?secret_key=pw"])
def test_a_credential_in_extra_is_refused_even_under_a_known_key(url: str) -> None:
    with pytest.raises(ConfigError, match="salt in ec_connector_extra_config holds a credential: vLLM logs that map"):
        load_config({"salt": url}, {})


def test_a_path_that_only_sounds_like_a_secret_is_accepted() -> None:
    assert load_config({"local_disk": "/data/tokenizers"}, {}).local_disk == Path("/data/tokenizers")


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        EncoderCacheConfig().epoch = 1


def test_every_key_says_what_it_is() -> None:
    assert all(field.description for field in EncoderCacheConfig.model_fields.values())


def test_the_summary_is_one_line_with_sizes_and_place() -> None:
    config = EncoderCacheConfig(max_local_cpu_size=1.5, local_disk=Path("/data"))
    assert summary(config) == "encoder cache: LocalCPU 1.5 GiB, LocalDisk 16 GiB at /data"
    assert summary(EncoderCacheConfig()) == "encoder cache: LocalCPU 2 GiB, no LocalDisk"
    assert "off" in summary(EncoderCacheConfig(enabled=False))
