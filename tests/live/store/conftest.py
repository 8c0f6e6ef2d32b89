"""Both kinds of store, for suites that prove the same promises of each."""

from __future__ import annotations

import pytest

from towline.config import StoreSettings
from towline.store.objects import ObjectStore, open_store


@pytest.fixture(params=["file", "s3"])
def store_settings(request: pytest.FixtureRequest) -> StoreSettings:
    name = {"file": "file_store_settings", "s3": "s3_settings"}[request.param]
    settings = request.getfixturevalue(name)
    assert isinstance(settings, StoreSettings)
    return settings


@pytest.fixture
def objects(store_settings: StoreSettings) -> ObjectStore:
    return open_store(store_settings)
