"""Tokenizer files that nothing can read are one line, wherever a tokenizer is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.errors import UsageError
from towline.verifiers.model_tokenizer import prompt_tokenizer
from towline.verifiers.tokenizer import load_tokenizer

BROKEN = [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe\x00"]
IDS = ["empty", "cut-off", "no-model", "no-text"]


@pytest.mark.parametrize("data", BROKEN, ids=IDS)
def test_a_models_broken_tokenizer_is_one_line_at_its_first_use(data: bytes) -> None:
    tokenizer = prompt_tokenizer({"tokenizer.json": data})
    with pytest.raises(UsageError, match=r"tokenizer\.json can't be read: .+; give the model's own") as caught:
        tokenizer.encode("")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", BROKEN, ids=IDS)
def test_a_folders_broken_tokenizer_is_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"tokenizer\.json can't be read: .+; give the model's own") as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
