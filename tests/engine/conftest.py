# SPDX-License-Identifier: Apache-2.0
"""The engine without a cache that all engine tests compare against."""

from collections.abc import Iterator

import pytest

from tests.engine.rig import Reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    reference = Reference(tmp_path_factory.mktemp("reference"))
    yield reference
    reference.close()
