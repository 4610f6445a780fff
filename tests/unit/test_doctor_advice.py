# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec doctor` suggests what may have been meant, and prints the intended command."""

import json
import shlex
from pathlib import Path

import pytest

from lmcache_ec.cli.doctor import examine, render
from lmcache_ec.cli.round_trip import look_up_mode
from lmcache_ec.tiers.disk import DiskTier
from lmcache_ec.tiers.remote import Lookup


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ({"locl_disk": "/x"}, "local_disk"),
        ({"max_cpu": 2}, "max_local_cpu_size"),
        ({"max_local_disk_size": "4 GB"}, "max_local_disk_size"),
        ({"lookup": "probe"}, "remote_lookup"),
        ({"load_deadline": 10}, "load_deadline_ms"),
    ],
)
def test_a_wrong_key_or_value_shows_the_keys_near_it_with_what_they_accept(wrong: dict[str, object], near: str) -> None:
    report = examine(json.dumps(wrong), {})
    shown = {key["key"]: key["accepted"] for key in report.keys}
    assert near in shown
    assert len(shown) <= 3
    assert f"{near}" in render(report).partition("Keys near these")[2]
    assert all(shown.values())


def test_a_wrong_variable_shows_the_keys_near_it_too() -> None:
    (key,) = examine("{}", {"LMCACHE_EC_LOAD_DEADLINE_MS": "soon"}).keys
    assert (key["key"], "milliseconds" in key["accepted"]) == ("load_deadline_ms", True)
    assert examine("{}", {}).keys == []


@pytest.mark.parametrize("wrong", [{"remotes": "gopher://x"}, {"remote_url": "x"}, {"remote_ulr": "redis://x"}])
def test_no_keys_are_shown_for_a_wrong_address_whose_error_is_clear_by_itself(wrong: dict[str, object]) -> None:
    report = examine(json.dumps(wrong), {})
    assert (len(report.problems), report.keys) == (1, [])


def test_a_size_in_bytes_is_recognised() -> None:
    (problem,) = examine('{"max_local_cpu_size": 4294967296}', {}).problems
    assert "looks like bytes: 4294967296 bytes are 4.0 GiB" in problem
    (problem,) = examine('{"max_local_disk_size": "500000000"}', {}).problems
    assert "500000000 bytes are 0.5 GiB" in problem


def test_the_command_has_the_role_that_is_meant_and_the_kv_connector_of_the_file(tmp_path: Path) -> None:
    ours, both = tmp_path / "ours.yaml", tmp_path / "both.yaml"
    ours.write_text("ec: {max_local_cpu_size: 0.25}")
    both.write_text("chunk_size: 256\nec: {max_local_cpu_size: 0.25}")
    for file, kv in ((ours, False), (both, True)):
        command = examine("{}", {"LMCACHE_CONFIG_FILE": str(file)}, "ec_producer").command
        assert command is not None
        words = shlex.split(command)
        assert json.loads(words[words.index("--ec-transfer-config") + 1])["ec_role"] == "ec_producer"
        assert ("--kv-transfer-config" in words) is kv
        if kv:
            transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
            assert transfer == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def test_problems_that_prevent_a_start_are_distinguished_from_others() -> None:
    report = examine('{"max_local_cpu_size": 1048576}', {"VLLM_PLUGINS": "other"})
    (plugins,) = report.prevents_start
    assert "add lmcache_ec" in plugins
    assert any("LocalCPU may grow" in problem for problem in report.problems)
    text = render(report)
    assert text.index("Problems that prevent a start") < text.index(plugins) < text.index("\nProblems\n")
    assert examine('{"epoch": "x"}', {}).prevents_start


@pytest.mark.parametrize(
    ("lookup", "expected"),
    [
        (Lookup.AUTO, "asked for every item (auto: at most 25 ms)"),
        (Lookup.PROBE, "asked for every item (probe)"),
        (Lookup.CATALOG, "asked only for entries in its listing (catalog)"),
    ],
)
def test_how_quickly_a_tier_answers_and_how_it_is_asked_are_reported(
    tmp_path: Path, lookup: Lookup, expected: str
) -> None:
    text = look_up_mode(DiskTier(tmp_path, 1 << 20), lookup)
    assert text.startswith("round trip ")
    assert text.endswith(expected)
