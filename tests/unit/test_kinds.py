# SPDX-License-Identifier: Apache-2.0
"""One table has all differences between kinds of remotes; one type carries a remote from configuration to tier."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from lmcache_ec.adapters.lmcache.settings import PluginSettings, read_settings, remote_tiers
from lmcache_ec.channel import AnyMessage, Start
from lmcache_ec.cli.named_tiers import named_tiers
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.tiers import kinds
from lmcache_ec.tiers.base import Tier
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.kinds import KINDS, SCHEMES, check_remote, configured, environment_of, kind_of, open_remote
from lmcache_ec.tiers.redis_url import RedisOptions
from lmcache_ec.tiers.remote import Lookup, Remote, RemoteKind

URLS = ("redis://user:canary@host:1", "s3://bucket/prefix", "lm://host:1")
SECRETS = {
    "aws_access_key_id": "canary-id",
    "aws_secret_access_key": "canary-key",
    "remote_storage_plugin.mine.password": "canary-password",
    "of_another_program": "canary-other",
}


def test_each_scheme_belongs_to_one_kind_and_is_not_refused_by_another() -> None:
    schemes = [scheme for kind in KINDS for scheme in (*kind.schemes, *kind.refused)]
    assert len(schemes) == len(set(schemes))
    assert {kind_of(url).name for url in URLS} == {"redis", "s3", "lmcache"}


@pytest.mark.parametrize("url", URLS)
def test_a_remote_is_the_same_whether_an_engine_the_plugin_or_nobody_configures_it(url: str) -> None:
    """No default is defined twice."""
    [of_engine] = EncoderCacheConfig(remotes=[url]).remote_tiers
    [of_plugin] = remote_tiers(PluginSettings(remotes=[url]), {})
    assert of_engine == of_plugin == configured(url, {})
    assert msgspec.structs.replace(of_engine, lookup=Lookup.AUTO) == Remote(url)
    options = RedisOptions()
    assert (options.ttl_s, options.timeout_s, options.max_entry_bytes) == (
        of_engine.ttl_s,
        of_engine.timeout_s,
        of_engine.max_entry_bytes,
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", {"redis": Lookup.AUTO, "s3": Lookup.CATALOG, "lmcache": Lookup.AUTO}),
        ("probe", dict.fromkeys(("redis", "s3", "lmcache"), Lookup.PROBE)),
    ],
)
def test_what_auto_means_depends_on_the_kind_and_anything_else_is_as_the_user_set_it(
    asked: str, expected: dict[str, Lookup]
) -> None:
    config = EncoderCacheConfig(remotes=URLS, remote_lookup=asked)
    assert {kind_of(remote.url).name: remote.lookup for remote in config.remote_tiers} == expected


def test_a_remote_gets_only_the_extra_config_of_its_own_kind_and_no_secret_of_another() -> None:
    config = EncoderCacheConfig(remotes=URLS, extra_config=SECRETS)
    got = {kind_of(remote.url).name: set(remote.extra_config.values()) for remote in config.remote_tiers}
    assert got == {"redis": set(), "s3": {"canary-id", "canary-key"}, "lmcache": {"canary-password"}}


def test_variables_of_the_environment_go_only_to_the_kinds_in_use() -> None:
    assert environment_of([]) == environment_of(["lm://host:1"]) == ()
    assert not any(name.startswith("AWS") for name in environment_of(["redis://host"]))
    both = environment_of(["redis://host", "s3://bucket", "s3://another"])
    assert {"AWS_", "SSL_CERT_", "HTTPS_PROXY"} <= set(both)
    assert len(both) == len(set(both))


def test_a_remote_arrives_at_the_store_process_as_it_was_configured() -> None:
    config = EncoderCacheConfig(remotes=URLS, extra_config=SECRETS, ttl_s=60)
    start = Start(1, "engine", "namespace", "producer", "", 0, 0, 1.0, 1.0, config.remote_tiers, True, 1.0)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=AnyMessage)
    assert arrived == start
    assert "canary" not in repr(arrived) + str(arrived)


def test_a_new_tier_is_a_kind_and_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, plugin, store process and command line only consult the table."""

    def check(remote: Remote) -> None:
        if not remote.url.removeprefix("folder://"):
            raise ValueError("must be folder:///path")

    def opener(remote: Remote) -> Tier:
        assert remote.extra_config == {"folder_size": 1 << 20}
        return DiskTier(Path(remote.url.removeprefix("folder://")), int(str(remote.extra_config["folder_size"])))

    kind = RemoteKind("folder", ("folder",), check, opener, Lookup.PROBE, extra_keys=re.compile("folder_.*"))
    monkeypatch.setattr(kinds, "KINDS", (*KINDS, kind))
    monkeypatch.setitem(SCHEMES, "folder", kind)
    url, extra = f"folder://{tmp_path}", {"folder_size": 1 << 20, "s3_region": "x"}
    config = EncoderCacheConfig(remotes=[url], extra_config=extra)
    settings = read_settings({"lmcache_ec.remotes": [url], **extra})
    assert config.remote_tiers == remote_tiers(settings, extra)
    [remote] = config.remote_tiers
    assert remote.lookup is Lookup.PROBE
    assert isinstance(open_remote(remote), DiskTier)
    [named] = named_tiers(config)
    assert (named.name, named.where) == ("folder", url)
    with pytest.raises(ValueError, match="must be folder:///path"):
        EncoderCacheConfig(remotes=["folder://"])


@pytest.mark.parametrize("url", ["redis://[host", "s3://[bucket", "nothing", "canary"])
def test_an_invalid_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be a URL|must be redis://") as caught:
        check_remote(configured(url, {}))
    assert url not in str(caught.value)
