# SPDX-License-Identifier: Apache-2.0
"""The installed packages are those of the tree: with an editable install, one missing from a wheel goes unnoticed."""

import tomllib

from benchmarks.testbed.models import ROOT


def test_every_folder_with_code_is_a_package_that_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"lmcache_ec": ROOT / "lmcache_ec", "lmcache_ec.adapters": ROOT / "adapters"}
    there = {
        ".".join((name, *path.parent.relative_to(top).parts))
        for name, top in folders.items()
        for path in top.rglob("*.py")
    }
    assert set(setuptools["packages"]) == there
