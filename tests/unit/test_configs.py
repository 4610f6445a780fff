# SPDX-License-Identifier: Apache-2.0
"""The files in configs/ do what they claim. For LMCache's reading of them see test_lmcache_config.py."""

from pathlib import Path

import pytest
import yaml

from benchmarks.testbed.models import ROOT
from lmcache_ec.config import resolve

FILES = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.name != "prometheus-alerts.yaml")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_configuration_is_accepted_and_all_its_keys_have_an_effect(file: Path) -> None:
    resolved = resolve(environ={"LMCACHE_CONFIG_FILE": str(file)})
    assert resolved.notes == ()
    asked = yaml.safe_load(file.read_text()).get("ec", {})
    if "remote_url" in asked:
        assert resolved.config.remotes == (asked["remote_url"],)
    assert resolved.config.max_local_cpu_bytes == 2 << 30, "LMCache's own pool is not taken once more"


@pytest.mark.parametrize("name", ["producer", "consumer"])
def test_clients_names_leave_memory_only_once_their_line_is_uncommented(name: str, tmp_path: Path) -> None:
    """With the files as they are, no request gets a picture that was replaced behind its URL."""
    shipped = ROOT / "configs" / f"{name}.yaml"
    assert not resolve(environ={"LMCACHE_CONFIG_FILE": str(shipped)}).config.persist_client_ids
    vouching = tmp_path / shipped.name
    vouching.write_text(shipped.read_text().replace("# persist_client_ids: true\n", "persist_client_ids: true\n"))
    assert resolve(environ={"LMCACHE_CONFIG_FILE": str(vouching)}).config.persist_client_ids
