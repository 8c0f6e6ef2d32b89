"""Weights that get into a running SGLang server, against transformers on the same materialised version."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from support.sglang_model import VOCABULARY, changed, folder_of, oracle, weights
from support.sglang_requests import TOLERANCE, Started, check_progress, furthest, long_run, request
from support.waiting import until
from towline.delta.state import ModelState, RawTensor, TensorSpec, model_digest, tensor_digests
from towline.engine.base import Progress
from towline.engine.sglang import server, supervisor
from towline.engine.sglang.client import SglangClient
from towline.engine.sglang.engine import SglangEngine
from towline.errors import EngineError, UsageError

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("way", ["loader", "overlay", "tensors"])
async def test_each_way_serves_what_transformers_computes_from_the_same_version(
    started: Started, base: Path, tmp_path: Path, way: str
) -> None:
    engine = await started(weights=way)
    assert engine.capabilities is not None
    assert engine.capabilities.weights == way
    old = weights(base)
    new, names = changed(old, seed=1)
    new_folder = folder_of(base, new, tmp_path / "new")
    prompt = random.Random(3).choices(range(2, VOCABULARY), k=30)

    # Retract: the spans divide the tokens; each is its own policy's, the second as if recomputed from the start.
    told: list[Progress] = []
    task = await long_run(engine, request("cut", prompt, 600, on_progress=told.append, every=50))
    activation = await engine.activate(new, 1, "retract", names)
    cut = await task
    assert len(cut.tokens) == 600
    assert [(span.version, span.cut) for span in cut.spans] == [(0, "start"), (1, "retract")]
    assert [span.start for span in cut.spans] == [0, cut.spans[0].end]
    assert 0 < cut.spans[0].end < cut.spans[1].end == 600
    at, sequence = cut.spans[0].end, prompt + cut.tokens
    before, after = oracle(base, sequence)[29:], oracle(new_folder, sequence)[29:]
    assert furthest(cut.logprobs[:at], before[:at]) < TOLERANCE
    assert furthest(cut.logprobs[at:], after[at:]) < TOLERANCE
    assert furthest(before[at:], after[at:]) > 0.1, "the versions are too alike for this to tell"
    # What a PARTIAL would have been made of, on both sides of the cut.
    check_progress(told, cut, 50)
    assert len(told[-1].tokens) > 500
    assert len(told[-1].spans) == 2

    # A proof of what it holds: the digest of the live weights is the version's, or isn't given.
    assert activation.engine_digest == (model_digest(tensor_digests(new)) if way == "loader" else None)
    assert engine.version == 1

    # A whole sample, and the probe, on the new version. The prompt is the one whose cache the old weights filled.
    fresh = await engine.generate(request("fresh", prompt, 40, temperature=1.0))
    assert [(span.version, span.start, span.end) for span in fresh.spans] == [(1, 0, 40)]
    assert furthest(fresh.logprobs, oracle(new_folder, prompt + fresh.tokens)[29:]) < TOLERANCE
    assert furthest(await engine.logprobs(prompt), oracle(new_folder, prompt)) < TOLERANCE

    if way == "loader":
        await in_place_and_drain(engine, base, new, prompt, tmp_path)
        await back_and_nothing_new(engine, base, prompt)


async def in_place_and_drain(engine: SglangEngine, base: Path, new: ModelState, prompt: list[int], tmp_path: Path) -> None:
    newer, names = changed(new, seed=2)
    newest, last_names = changed(newer, seed=3)
    told: list[Progress] = []
    task = await long_run(engine, request("kept", prompt, 600, on_progress=told.append))
    await engine.activate(newer, 2, "in_place", names)
    kept = await task
    assert [(span.version, span.cut) for span in kept.spans] == [(1, "start"), (2, "in_place")]
    check_progress(told, kept, 50)
    at = kept.spans[0].end
    newer_folder = folder_of(base, newer, tmp_path / "newer")
    sequence = prompt + kept.tokens
    assert furthest(kept.logprobs[:at], oracle(tmp_path / "new", sequence)[29:][:at]) < TOLERANCE
    # Its cache is still the old policy's, so these are nobody's logprobs but the sampler's own.
    assert furthest(kept.logprobs[at:], oracle(newer_folder, sequence)[29:][at:]) > TOLERANCE
    # What begins afterwards must not find the old policy's cache of the same prompt.
    fresh = await engine.generate(request("after", prompt, 20))
    assert furthest(fresh.logprobs, oracle(newer_folder, prompt + fresh.tokens)[29:]) < TOLERANCE

    task = await long_run(engine, request("drained", prompt, 200))
    change = asyncio.create_task(engine.activate(newest, 3, "drain", last_names))
    await until(lambda: not engine._served.open.is_set())
    later = asyncio.create_task(engine.generate(request("later", prompt, 5)))
    drained = await task
    await change
    assert [(span.version, span.start, span.end) for span in drained.spans] == [(2, 0, 200)]
    assert {span.version for span in (await later).spans} == {3}


async def back_and_nothing_new(engine: SglangEngine, base: Path, prompt: list[int]) -> None:
    """To an earlier version, as after a failed proof, and to a version that changes nothing, as after a skipped step."""
    old = weights(base)
    activation = await engine.activate(old, 0, "retract", None)
    assert activation.engine_digest == model_digest(tensor_digests(old))
    again = await engine.generate(request("again", prompt, 20))
    assert {span.version for span in again.spans} == {0}
    # The cache of its first time as version 0 was thrown away, and what version 3 left isn't found.
    assert furthest(again.logprobs, oracle(base, prompt + again.tokens)[29:]) < TOLERANCE
    task = await long_run(engine, request("same", prompt, 400))
    assert (await engine.activate(old, 4, "retract", set())).engine_digest == activation.engine_digest
    same = await task
    assert [span.version for span in same.spans] == [0, 4]
    assert furthest(same.logprobs, oracle(base, prompt + same.tokens)[29:]) < TOLERANCE


async def test_what_would_end_the_server_never_reaches_it(started: Started, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await started()
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
    assert engine._activator is not None
    files = engine._activator._files
    write = files.write_changed

    def cut_short(state: ModelState, chosen: Any) -> Path:
        folder = write(state, chosen)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        return folder

    monkeypatch.setattr(files, "write_changed", cut_short)
    with pytest.raises(EngineError, match="didn't take version 1"):
        await engine.activate(new, 1, "retract", names)
    assert engine.server_pid == pid
    again = await engine.generate(request("again", [5, 6, 7], 10))
    assert {span.version for span in again.spans} == {0}
    assert furthest(again.logprobs, oracle(base, [5, 6, 7, *again.tokens])[2:]) < TOLERANCE


async def test_requests_end_as_they_ask(started: Started, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await started(weights="overlay")
    prompt = [9, 8, 7]
    # An abort keeps what there is, with its logprobs.
    task = await long_run(engine, request("stopped", prompt, 1500))
    await asyncio.sleep(0.3)
    engine.abort("stopped")
    stopped = await task
    assert stopped.finish == "abort"
    assert 0 < len(stopped.tokens) < 1500
    assert furthest(stopped.logprobs, oracle(base, [*prompt, *stopped.tokens])[2:]) < TOLERANCE
    # A request that is cancelled is aborted in the server too.
    aborted, honest = [], SglangClient.abort

    async def abort(client: SglangClient, rid: str) -> None:
        aborted.append(rid)
        await honest(client, rid)

    monkeypatch.setattr(SglangClient, "abort", abort)
    task = await long_run(engine, request("left", prompt, 1900))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: aborted == ["left/1"])
    # A stop token of the request's own; the model's end of sequence (1) isn't one.
    ended = await engine.generate(request("ended", prompt, 1500, stop_token_ids=tuple(range(2, 40))))
    assert ended.finish == "stop"
    assert 2 <= ended.tokens[-1] < 40
    # Greedy: the logprob is that of temperature 1. Temperature: after it, before top-k and top-p.
    greedy = await engine.generate(request("greedy", prompt, 8, temperature=0.0))
    assert furthest(greedy.logprobs, oracle(base, [*prompt, *greedy.tokens])[2:]) < TOLERANCE
    warm = await engine.generate(request("warm", prompt, 40, temperature=0.7, top_k=5, top_p=0.9))
    assert furthest(warm.logprobs, oracle(base, [*prompt, *warm.tokens], temperature=0.7)[2:]) < TOLERANCE


async def test_a_killed_server_comes_back_on_its_last_version_and_goes_on(started: Started, base: Path, tmp_path: Path) -> None:
    engine = await started()
    new, names = changed(weights(base), seed=1)
    folder = folder_of(base, new, tmp_path / "new")
    told: list[Progress] = []
    task = await long_run(engine, request("survivor", [4, 5, 6], 1500, on_progress=told.append))
    await engine.activate(new, 1, "retract", names)
    await until(lambda: bool(told) and told[-1].spans[-1].version == 1)
    pid = engine.server_pid
    assert pid is not None
    assert engine.recovering == ""
    os.killpg(pid, signal.SIGKILL)
    await until(lambda: "started again on version 1" in engine.recovering)
    survivor = await asyncio.wait_for(task, 240)
    assert engine.server_pid != pid
    assert engine.recovering == ""
    engine.health()
    assert survivor.finish == "length"
    # What the killed server had sent is kept, on both sides of the cut, and what follows is the same version's.
    check_progress(told, survivor, 50)
    assert [span.version for span in survivor.spans] == [0, 1]
    assert survivor.spans[-1].end == 1500
    at = survivor.spans[0].end
    sequence = [4, 5, 6, *survivor.tokens]
    assert furthest(survivor.logprobs[:at], oracle(base, sequence)[2:][:at]) < TOLERANCE
    assert furthest(survivor.logprobs[at:], oracle(folder, sequence)[2:][at:]) < TOLERANCE
    # A server that dies under an activation: the next one takes the version all the same.
    newer, more = changed(new, seed=2)
    pid = engine.server_pid
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    activation = await engine.activate(newer, 2, "retract", more)
    assert activation.engine_digest == model_digest(tensor_digests(newer))
    assert engine.version == 2
    assert engine.server_pid != pid


async def test_a_server_that_hangs_is_replaced(
    started: Started, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_WATCH_SECONDS", 2.0)
    engine = await started(weights="overlay")
    new, names = changed(weights(base), seed=1)
    folder = folder_of(base, new, tmp_path / "new")
    await engine.activate(new, 1, "retract", names)
    task = await long_run(engine, request("survivor", [4, 5, 6], 1500))
    pid = engine.server_pid
    assert pid is not None
    os.killpg(pid, signal.SIGSTOP)
    survivor = await asyncio.wait_for(task, 240)
    assert engine.server_pid != pid
    assert not server.runs(pid), "the hanging processes still hold the device"
    assert [(span.version, span.start, span.end) for span in survivor.spans] == [(1, 0, 1500)]
    assert furthest(survivor.logprobs, oracle(folder, [4, 5, 6, *survivor.tokens])[2:]) < TOLERANCE


async def test_a_server_with_logprobs_of_another_kind_is_refused(started: Started) -> None:
    with pytest.raises(UsageError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=0"):
        await started(environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
