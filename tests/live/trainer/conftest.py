"""The trainer's tests need a model and settings; the servers are the session's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from live.trainer.harness import VOCABULARY, settings_for
from towline.config import BusSettings, Settings, StoreSettings


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed trainer leaves behind stays here. One short path: sockets are made in it, and theirs have 107 bytes."""
    folder = tmp_path_factory.getbasetemp() / "scratch"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def make_settings(
    run_name: str, model_folder: Path, file_store_settings: StoreSettings, bus_settings: BusSettings
) -> Callable[..., Settings]:
    """Settings of a run of this test's own, on a store in a folder; sections as keyword arguments."""

    def make(**sections: Any) -> Settings:
        store = sections.pop("store", file_store_settings)
        small = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
        return settings_for(run_name, model_folder, store, small, **sections)

    return make
