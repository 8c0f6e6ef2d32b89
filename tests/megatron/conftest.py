"""Tests on real Megatron-Core ranks: `make test-megatron`. A start of ranks costs many seconds, so each does many checks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from live.trainer.harness import settings_for
from support.megatron_model import make_model
from towline.config import BusSettings, Settings, StoreSettings


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose heads and layers two ranks can split."""
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(autouse=True)
def own_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed trainer leaves behind stays in the test's folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def make_settings(
    run_name: str, model_folder: Path, file_store_settings: StoreSettings, bus_settings: BusSettings
) -> Callable[..., Settings]:
    """Settings of a run of this test's own, on a store in a folder; sections as keyword arguments."""

    def make(**sections: Any) -> Settings:
        small = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
        return settings_for(run_name, model_folder, file_store_settings, small, **sections)

    return make
