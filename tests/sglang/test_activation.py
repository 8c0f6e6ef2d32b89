"""Weights that get into a running SGLang server, against transformers on the same materialised version."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from support.sglang_model import VOCABULARY, changed, oracle, weights
from support.waiting import until
from towline.contract.task import SamplingParams
from towline.delta.files import save_folder
from towline.delta.state import ModelState, RawTensor, TensorSpec, model_digest, tensor_digests
from towline.engine.base import GenerateRequest, Generation
from towline.engine.sglang.engine import SglangEngine
from towline.errors import EngineError, UsageError

pytestmark = pytest.mark.sglang
TOLERANCE = 1e-4


def request(name: str, tokens: list[int], limit: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, tokens=tokens, seed=7, sampling=SamplingParams(max_tokens=limit, **sampling))


def furthest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def folder_of(engine: SglangEngine, state: ModelState) -> Path:
    """The version as the Hugging Face folder that the oracle reads; written by the delta store's code, not the engine's."""
    folder = engine._folder.with_name(f"{engine._folder.name}-oracle-{id(state)}")
    save_folder(state, folder)
    (folder / "config.json").write_bytes((engine._folder / "config.json").read_bytes())
    return folder


async def long_run(engine: SglangEngine, name: str, prompt: list[int], limit: int = 600) -> asyncio.Task[Generation]:
    """A generation that is underway: it has brought its first tokens."""
    task = asyncio.create_task(engine.generate(request(name, prompt, limit)))
    for _ in range(2000):
        if (run := engine._runs.get(name)) is not None and run.began:
            return task
        await asyncio.sleep(0.005)
    raise AssertionError("the generation didn't begin")


@pytest.mark.parametrize("way", ["loader", "overlay"])
async def test_each_way_serves_what_transformers_computes_from_the_same_version(started: Any, base: Path, way: str) -> None:
    engine: SglangEngine = await started(weights=way)
    assert engine.capabilities is not None
    assert engine.capabilities.weights == way
    old = weights(base)
    new, names = changed(old, seed=1)
    old_folder, new_folder = folder_of(engine, old), folder_of(engine, new)
    prompt = random.Random(3).choices(range(2, VOCABULARY), k=30)

    # Retract: the spans divide the tokens; each is its own policy's, the second as if recomputed from the start.
    task = await long_run(engine, "cut", prompt)
    activation = await engine.activate(new, 1, "retract", names)
    cut = await task
    assert len(cut.tokens) == 600
    assert [(span.version, span.cut) for span in cut.spans] == [(0, "start"), (1, "retract")]
    assert [span.start for span in cut.spans] == [0, cut.spans[0].end]
    assert 0 < cut.spans[0].end < cut.spans[1].end == 600
    at, sequence = cut.spans[0].end, prompt + cut.tokens
    before, after = oracle(old_folder, sequence)[29:], oracle(new_folder, sequence)[29:]
    assert furthest(cut.logprobs[:at], before[:at]) < TOLERANCE
    assert furthest(cut.logprobs[at:], after[at:]) < TOLERANCE
    assert furthest(before[at:], after[at:]) > 0.1, "the versions are too alike for this to tell"

    # A proof of what it holds: the digest of the live weights is the version's, or isn't given.
    assert activation.engine_digest == (model_digest(tensor_digests(new)) if way == "loader" else None)
    assert engine.version == 1

    # A whole sample, and the probe, on the new version. The prompt is the one whose cache the old weights filled.
    fresh = await engine.generate(request("fresh", prompt, 40, temperature=1.0))
    assert [(span.version, span.start, span.end) for span in fresh.spans] == [(1, 0, 40)]
    assert furthest(fresh.logprobs, oracle(new_folder, prompt + fresh.tokens)[29:]) < TOLERANCE
    assert furthest(await engine.logprobs(prompt), oracle(new_folder, prompt)) < TOLERANCE

    if way == "loader":
        await in_place_and_drain(engine, new, prompt)


async def in_place_and_drain(engine: SglangEngine, new: ModelState, prompt: list[int]) -> None:
    newer, names = changed(new, seed=2)
    newest, last_names = changed(newer, seed=3)
    task = await long_run(engine, "kept", prompt)
    await engine.activate(newer, 2, "in_place", names)
    kept = await task
    assert [(span.version, span.cut) for span in kept.spans] == [(1, "start"), (2, "in_place")]
    at = kept.spans[0].end
    new_folder, newer_folder = folder_of(engine, new), folder_of(engine, newer)
    sequence = prompt + kept.tokens
    assert furthest(kept.logprobs[:at], oracle(new_folder, sequence)[29:][:at]) < TOLERANCE
    # Its cache is still the old policy's, so these are nobody's logprobs but the sampler's own.
    assert furthest(kept.logprobs[at:], oracle(newer_folder, sequence)[29:][at:]) > TOLERANCE
    # What begins afterwards must not find the old policy's cache of the same prompt.
    fresh = await engine.generate(request("after", prompt, 20))
    assert furthest(fresh.logprobs, oracle(newer_folder, prompt + fresh.tokens)[29:]) < TOLERANCE

    task = await long_run(engine, "drained", prompt, limit=200)
    change = asyncio.create_task(engine.activate(newest, 3, "drain", last_names))
    await until(lambda: not engine._open.is_set())
    later = asyncio.create_task(engine.generate(request("later", prompt, 5)))
    drained = await task
    await change
    assert [(span.version, span.start, span.end) for span in drained.spans] == [(2, 0, 200)]
    assert {span.version for span in (await later).spans} == {3}


async def test_what_would_end_the_server_never_reaches_it(started: Any, base: Path) -> None:
    engine: SglangEngine = await started()
    pid, old = engine.server_pid, weights(base)
    new, names = changed(old, seed=1)
    with pytest.raises(UsageError, match="isn't in the model's vocabulary"):
        await engine.generate(request("wild", [5, VOCABULARY], 5))
    with pytest.raises(UsageError, match="exceed the context"):
        await engine.generate(request("long", [5] * 1990, 11))
    with pytest.raises(UsageError, match="below 512"):
        await engine.logprobs([1, VOCABULARY])

    name = "model.layers.0.mlp.down_proj.weight"
    bent = dict(new)
    bent[name] = RawTensor(TensorSpec(name, "F32", new[name].spec.shape[::-1]), new[name].data)
    with pytest.raises(EngineError, match=r"down_proj.*the served model's is"):
        await engine.activate(bent, 1, "retract", names)
    with pytest.raises(EngineError, match="in only one of"):
        await engine.activate({key: value for key, value in new.items() if key != name}, 1, "retract", None)

    # The longest that it says it takes, to the last token.
    whole = await engine.generate(request("whole", [5] * 1900, 100))
    assert len(whole.tokens) == 100
    assert engine.server_pid == pid

    # A file that the loader refuses: the server lives, and serves what it served.
    assert engine._files is not None
    write = engine._files.write_changed

    def cut_short(state: ModelState, chosen: Any) -> Path | None:
        folder = write(state, chosen)
        assert folder is not None
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        return folder

    engine._files.write_changed = cut_short  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="didn't take version 1"):
        await engine.activate(new, 1, "retract", names)
    assert engine.server_pid == pid
    again = await engine.generate(request("again", [5, 6, 7], 10))
    assert {span.version for span in again.spans} == {0}
    assert furthest(again.logprobs, oracle(base, [5, 6, 7, *again.tokens])[2:]) < TOLERANCE

    # An abort keeps what there is, with its logprobs.
    task = await long_run(engine, "stopped", [9, 8, 7], limit=1500)
    await asyncio.sleep(0.3)
    engine.abort("stopped")
    stopped = await task
    assert stopped.finish == "abort"
    assert 0 < len(stopped.tokens) < 1500
    assert furthest(stopped.logprobs, oracle(base, [9, 8, 7, *stopped.tokens])[2:]) < TOLERANCE
    # A stop token of the request's own; the model's end of sequence (1) isn't one.
    ended = await engine.generate(request("ended", [9, 8, 7], 1500, stop_token_ids=tuple(range(2, 40))))
    assert ended.finish == "stop"
    assert 2 <= ended.tokens[-1] < 40
    # Greedy: the logprob is that of temperature 1. Temperature: after it, before top-k.
    greedy = await engine.generate(request("greedy", [9, 8, 7], 8, temperature=0.0))
    assert furthest(greedy.logprobs, oracle(base, [9, 8, 7, *greedy.tokens])[2:]) < TOLERANCE


async def test_a_killed_server_comes_back_on_its_last_version_and_goes_on(started: Any, base: Path) -> None:
    engine: SglangEngine = await started()
    new, names = changed(weights(base), seed=1)
    await engine.activate(new, 1, "retract", names)
    folder = folder_of(engine, new)
    task = await long_run(engine, "survivor", [4, 5, 6], limit=1500)
    pid = engine.server_pid
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    survivor = await asyncio.wait_for(task, 240)
    assert engine.server_pid != pid
    engine.health()
    assert survivor.finish == "length"
    assert [(span.version, span.start, span.end) for span in survivor.spans] == [(1, 0, 1500)]
    assert furthest(survivor.logprobs, oracle(folder, [4, 5, 6, *survivor.tokens])[2:]) < TOLERANCE
    # And it takes the next version.
    newer, more = changed(new, seed=2)
    activation = await engine.activate(newer, 2, "retract", more)
    assert activation.engine_digest == model_digest(tensor_digests(newer))


async def test_a_server_with_logprobs_of_another_kind_is_refused(started: Any) -> None:
    with pytest.raises(UsageError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=0"):
        await started(environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
