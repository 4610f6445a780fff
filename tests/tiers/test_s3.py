# SPDX-License-Identifier: Apache-2.0
import uuid
from collections.abc import Iterator

import pytest
from tests.seaweed import Seaweed, seaweed
from tests.tiers.conformance import TierConformance

from lmcache_ec.tiers.s3 import S3Tier, open_s3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("s3") / "data") as running:
        yield running


@pytest.fixture
def url(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    for k,v in server.environment.items(): monkeypatch.setenv(k,v)
    return f"s3://{server.bucket}/{uuid.uuid4().hex}?endpoint={server.endpoint}"


class TestS3Tier(TierConformance):
    @pytest.fixture
    def tier(self, url: str) -> S3Tier:
        return open_s3(url)
