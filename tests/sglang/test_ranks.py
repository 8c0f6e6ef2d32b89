"""Two tensor-parallel ranks: each writes its own shard, and together they prove what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from support.sglang_model import build, changed, folder_of, oracle, weights
from support.sglang_requests import TOLERANCE, Started, furthest, request
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import EngineError

pytestmark = pytest.mark.sglang
VOCABULARY = 500
"""The server pads it to 512, so the second rank holds rows that are no token's."""


async def test_two_ranks_take_a_version_and_prove_it_by_their_slices(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    # One head of keys and values: both ranks hold it, so they must agree on it.
    build(base, seed=5, vocabulary=VOCABULARY, kv_heads=1)
    engine = await started(model=base, weights="loader", tp=2)
    pid, old = engine.server_pid, weights(base)
    assert engine.capabilities is not None
    assert engine.capabilities.proves
    new, names = changed(old, seed=1)
    prompt = [3, 1, 4, 499, 5]

    assert engine._activator is not None
    files = engine._activator._files
    write = files.write_changed
    with monkeypatch.context() as broken:

        def cut_short(state: ModelState, chosen: Iterable[str]) -> Path:
            folder = write(state, chosen)
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1000])
            return folder

        broken.setattr(files, "write_changed", cut_short)
        with pytest.raises(EngineError, match=r"rank 0: .*rank 1: "):
            await engine.activate(new, 1, "retract", names)
    assert engine.server_pid == pid
    still = await engine.generate(request("still", prompt, 20))
    assert furthest(still.logprobs, oracle(base, prompt + still.tokens)[len(prompt) - 1 :]) < TOLERANCE

    with monkeypatch.context() as lying:
        lying.setattr(files, "write_changed", lambda state, chosen: write(state, sorted(chosen)[1:]))
        kept = await engine.activate(new, 1, "retract", names)
    assert kept.engine_digest not in (None, model_digest(tensor_digests(new)))

    whole = await engine.activate(new, 2, "retract", names)
    assert whole.engine_digest == model_digest(tensor_digests(new))
    folder = folder_of(base, new, tmp_path / "new")
    fresh = await engine.generate(request("fresh", prompt, 40))
    assert {span.version for span in fresh.spans} == {2}
    assert furthest(fresh.logprobs, oracle(folder, prompt + fresh.tokens)[len(prompt) - 1 :]) < TOLERANCE
    assert furthest(await engine.logprobs(prompt), oracle(folder, prompt)) < TOLERANCE
