# SPDX-License-Identifier: Apache-2.0
"""LMCache's own loader decides: for shared keys we read the same from a file and an environment as it does.

LMCache is loaded in one separate process (2.4 s, 350 MB), which answers for all cases at once, and reads the files of
configs/.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_ec.config import EncoderCacheConfig, load_config, resolve
from lmcache_ec.config.lmcache_keys import NOTED, REFUSED
from lmcache_ec.config.resolve import SHARED
from tests.unit.test_configs import FILES

JUDGE = """
import json, os, sys
SHARED, cases, files = json.load(sys.stdin)
from lmcache.v1 import config
answers = []
for environ in cases:
    os.environ.update(environ)
    loaded = config.load_ec_engine_config().to_dict()
    answers.append({key: loaded[key] for key in SHARED})
    for name in environ:
        del os.environ[name]
definitions = {name: each["default"] for name, each in config._CONFIG_DEFINITIONS.items()}
old = [*config._CONFIG_ALIASES, *config._DEPRECATED_CONFIGS]
print()
sizes = [config.LMCacheEngineConfig.from_file(file).chunk_size for file in files]
print(json.dumps({"answers": answers, "definitions": definitions, "old": old, "chunk_sizes": sizes}))
"""

VALUES: Mapping[str, Mapping[str, object]] = {
    "max_local_cpu_size": {"kv": 20, "map": 3.5, "flat": "1.25", "environment": "0.75"},
    "local_disk": {"kv": "/kv/", "map": "file:///map/", "flat": "/flat", "environment": "file:///environment"},
    "max_local_disk_size": {"kv": 500.0, "map": 40, "flat": 30.5, "environment": "20"},
    "remote_url": {"kv": "redis://a", "map": "redis://b", "flat": "rediss://c:1/2", "environment": "s3://bucket/d"},
    "blocking_timeout_secs": {"kv": 11, "map": 12, "flat": 13, "environment": "14"},
    "extra_config": {
        "kv": {"s3_region": "a"},
        "map": {"s3_region": "b"},
        "flat": {"disable_tls": True},
        "environment": '{"s3_region": "d"}',
    },
    "cache_policy": {"kv": "FIFO", "map": "lru", "flat": "LRU", "environment": "Lru"},
}


@dataclass(frozen=True)
class Case:
    """One of the shared keys, written in some of its possible places, in this order in the file."""

    key: str
    places: tuple[str, ...]
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        spelled: dict[str, Callable[[Any], dict[str, Any]]] = {
            "kv": lambda value: {self.key: value},
            "map": lambda value: {"EC": {self.key.upper(): value}},
            "flat": lambda value: {f"ec_{self.key}": value},
        }
        file = self.folder / f"{self.key}-{'-'.join(self.places)}.yaml"
        content: dict[str, object] = {"chunk_size": 256}
        for place in self.places:
            if place in spelled:
                content |= spelled[place](VALUES[self.key][place])
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        environ = {"LMCACHE_CONFIG_FILE": str(file)}
        if "environment" in self.places:
            environ[f"LMCACHE_EC_{self.key.upper()}"] = str(VALUES[self.key]["environment"])
        return environ


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("files")
    places = [
        (*start, *order, *end)
        for start in ((), ("kv",))
        for order in ((), ("map",), ("flat",), ("map", "flat"), ("flat", "map"))
        for end in ((), ("environment",))
    ]
    return [Case(key, each, folder) for key, each in itertools.product(VALUES, places)]


@pytest.fixture(scope="module")
def judge(cases: list[Case]) -> dict[str, Any]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    done = subprocess.run(
        [sys.executable, "-c", JUDGE],
        input=json.dumps([list(VALUES), [case.environ for case in cases], [*map(str, FILES)]]),
        env=environ | {"LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_settings_of_the_encoder_cache_mean_what_they_mean_to_lmcache(cases: list[Case], judge: dict[str, Any]) -> None:
    compared = 0
    for case, theirs in zip(cases, judge["answers"], strict=True):
        if set(case.places) <= {"kv"}:
            continue
        config = load_config(environ=case.environ)
        expected = theirs[case.key]
        found = config.remotes if case.key == "remote_url" else getattr(config, case.key)
        if case.key == "local_disk":
            expected = Path(expected)
        elif case.key == "cache_policy":
            expected = expected.upper()
        elif case.key == "remote_url":
            expected = (expected,)
        assert found == expected, case
        compared += 1
    assert compared == len(VALUES) * 18


def test_the_places_of_the_kv_part_are_inherited_as_lmcache_reads_them_and_its_budgets_are_not(
    cases: list[Case], judge: dict[str, Any]
) -> None:
    """Here we deliberately differ: LMCache would create a second pool of 20 GiB."""
    answers = {
        case.key: (case, each) for case, each in zip(cases, judge["answers"], strict=True) if case.places == ("kv",)
    }
    assert answers.keys() == {*SHARED, "remote_url"}
    defaults = EncoderCacheConfig()
    for key, (case, theirs) in answers.items():
        config = load_config(environ=case.environ)
        if key == "local_disk":
            assert config.local_disk == Path(theirs["local_disk"]) / "encoder-cache"
        elif key == "remote_url":
            assert config.remotes == (theirs[key],)
        elif key == "extra_config":
            assert config.extra_config == theirs[key]
        else:
            assert theirs[key] == VALUES[key]["kv"]
            assert config == defaults


def test_every_key_of_lmcache_is_known_here_and_none_of_ours_is_taken(judge: dict[str, Any]) -> None:
    theirs = {*judge["definitions"], *judge["old"]}
    assert theirs - NOTED.keys() - REFUSED.keys() - set(SHARED) == {"remote_url"}
    assert (NOTED.keys() | REFUSED.keys()) - theirs == set()
    assert EncoderCacheConfig.model_fields.keys() & theirs == set(SHARED)
    assert not EncoderCacheConfig.model_fields.keys() & (NOTED.keys() | REFUSED.keys())
    assert not NOTED.keys() & REFUSED.keys()


def test_a_file_that_spells_out_all_of_lmcache_needs_no_change(judge: dict[str, Any], tmp_path: Path) -> None:
    """To migrate from LMCache's own encoder cache, change the connector's name; a note lists keys without effect."""
    every = judge["definitions"] | {"local_cpu": False}
    (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump({"ec": every}))
    resolved = resolve({}, {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")})
    assert resolved.config.max_local_cpu_size == every["max_local_cpu_size"]
    assert resolved.config.local_disk is None
    for key, value in every.items():
        noted = any(f"{key} (" in note for note in resolved.notes)
        assert noted == (key in NOTED and value is not None), key


def test_lmcache_reads_its_part_of_each_file_that_is_shipped(judge: dict[str, Any]) -> None:
    assert len(FILES) > 5
    assert judge["chunk_sizes"] == [256] * len(FILES)
