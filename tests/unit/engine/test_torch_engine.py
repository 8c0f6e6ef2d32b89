"""The torch engine against plain transformers forwards: the same logprobs, whatever runs beside and whatever is activated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from towline.contract.task import SamplingParams, VersionSpan
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.engine.base import GenerateRequest, Generation, Progress
from towline.engine.torch_engine import TorchEngine
from towline.errors import EngineError, UsageError
from unit.engine.models import VOCABULARY, Family, digest_of, make_model, plain_logprobs, save, state_of

TOLERANCE = 1e-5
both_ways = pytest.mark.parametrize("swap_share", [None, 1.0], ids=["exchanged", "written"])
both_families = pytest.mark.parametrize("family", ["qwen3-tied", "llama"])


@dataclass
class Rig:
    """A started engine of 40 slots serving `old` as version 3, and another model's published state."""

    engine: TorchEngine
    old: Any
    new: Any
    state: ModelState


@pytest.fixture
def family() -> Family:
    """Of the rig's models; a test whose promise depends on it is run with both."""
    return "qwen3-tied"


@pytest.fixture
def swap_share() -> float | None:
    """Of the rig's engine: by default most of these tests' changes are exchanges of memory."""
    return None


@pytest.fixture
async def rig(family: Family, swap_share: float | None, tmp_path: Path) -> AsyncIterator[Rig]:
    old, new = make_model(family, 0), make_model(family, 1)
    engine = TorchEngine(slots=40, max_context_tokens=400, prefill_tokens=100, swap_share=swap_share)
    started = await engine.start(save(old, tmp_path / "model"), 3)
    assert started.engine_digest == digest_of(state_of(old))
    yield Rig(engine, old, new, state_of(new))
    await engine.stop()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()  # type: ignore[no-any-return]


def request(name: str, tokens: list[int], max_tokens: int, *, position0: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, tokens=tokens, sampling=SamplingParams(max_tokens=max_tokens, **sampling), seed=hash_seed(name),
        position0=position0,
    )  # fmt: skip


def hash_seed(name: str) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(name.split("@")[0]))


def assert_logprobs(
    model: Any, context: list[int], generation: Generation, start: int, end: int, temperature: float = 1.0
) -> None:
    """Of the generated tokens [start, end), against one plain forward of everything."""
    want = plain_logprobs(model, context + generation.tokens, temperature)[len(context) - 1 :]
    np.testing.assert_allclose(generation.logprobs[start:end], want[start:end], rtol=0, atol=TOLERANCE)


async def running_until(engine: TorchEngine, short: GenerateRequest, *long: GenerateRequest) -> list[asyncio.Task[Generation]]:
    """Start the long requests; returns once the short one, begun with them, is done, so that they're amid their output."""
    tasks = [asyncio.create_task(engine.generate(item)) for item in long]
    await engine.generate(short)
    assert not any(task.done() for task in tasks)
    return tasks


@both_families
async def test_logprobs_are_those_of_a_plain_forward_of_the_finished_sequence(rig: Rig) -> None:
    stopping: dict[str, Any] = {"stop_token_ids": (5, 9, 11)}
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 7}, {"top_p": 0.6}, {"temperature": 0.0}, stopping,
    ]  # fmt: skip
    requests = [request(f"r{i}", prompt(1 + 7 * (i % 9), i), 3 + 5 * (i % 11), **kinds[i % 6]) for i in range(60)]
    results = await asyncio.gather(*map(rig.engine.generate, requests))
    for item, result in zip(requests, results, strict=True):
        assert_logprobs(rig.old, item.tokens, result, 0, len(result.tokens), item.sampling.temperature or 1.0)
        stops = item.sampling.stop_token_ids
        if result.finish == "stop":
            assert result.tokens[-1] in stops
        else:
            assert (result.finish, len(result.tokens)) == ("length", item.sampling.max_tokens)
        assert not set(result.tokens[:-1]) & set(stops)
        assert result.spans == [VersionSpan(0, len(result.tokens), 3, "start")]
    assert {result.finish for result in results} == {"stop", "length"}


@both_families
async def test_greedy_output_is_hugging_face_s_own(rig: Rig) -> None:
    tokens = prompt(9, 4)
    got = await rig.engine.generate(request("g", tokens, 24, temperature=0.0))
    want = rig.old.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert got.tokens == want[0, len(tokens) :].tolist()


async def test_a_seed_gives_the_same_tokens_alone_and_among_thirty_others(rig: Rig) -> None:
    wanted = request("same", prompt(11, 1), 40, temperature=0.9)
    alone = await rig.engine.generate(wanted)
    others = [request(f"other{i}", prompt(3 + i, i), 5 + 2 * i) for i in range(30)]
    tasks = [asyncio.create_task(rig.engine.generate(item)) for item in others[:15]]
    await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(rig.engine.generate(item)) for item in others[15:]]
    among = await rig.engine.generate(wanted)
    await asyncio.gather(*tasks)
    assert among.tokens == alone.tokens
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=TOLERANCE)


async def test_a_hand_over_goes_on_with_the_same_tokens(rig: Rig) -> None:
    whole = await rig.engine.generate(request("hand", prompt(6, 2), 30))
    first = whole.tokens[:13]
    rest = await rig.engine.generate(request("hand@2", prompt(6, 2) + first, 30, position0=13))
    assert first + rest.tokens == whole.tokens


async def test_what_a_request_has_so_far_is_told_at_each_mark_and_is_the_beginning_of_its_end(rig: Rig) -> None:
    told: list[Progress] = []
    wanted = replace(request("told", prompt(6, 3), 150), on_progress=told.append, progress_every=40)
    others = [request(f"beside{i}", prompt(3 + i, i), 20 + 9 * i) for i in range(8)]
    tasks = await running_until(rig.engine, request("short", prompt(5), 50), wanted)
    beside = [asyncio.create_task(rig.engine.generate(item)) for item in others]
    await rig.engine.activate(rig.state, 8, "retract", None)
    [whole], _ = await asyncio.gather(asyncio.gather(*tasks), asyncio.gather(*beside))
    assert [len(progress.tokens) for progress in told] == [40, 80, 120]
    assert len(whole.spans) == 2
    for progress in told:
        count = len(progress.tokens)
        assert (progress.tokens, progress.logprobs) == (whole.tokens[:count], whole.logprobs[:count])
        spans = [(span.version, position) for span in progress.spans for position in range(span.start, span.end)]
        assert spans == [(span.version, position) for span in whole.spans for position in range(span.start, span.end)][:count]


@both_ways
@both_families
async def test_retract_gives_the_old_weights_tokens_before_the_cut_and_exactly_the_new_ones_after(rig: Rig) -> None:
    requests = [request(f"long{i}", prompt(4 + 13 * i, i), 250) for i in range(5)]
    tasks = await running_until(rig.engine, request("short", prompt(5), 20), *requests)
    activation = await rig.engine.activate(rig.state, 8, "retract", None)
    assert activation.engine_digest == digest_of(rig.state)
    assert activation.pause_seconds > 0
    for item, result in zip(requests, await asyncio.gather(*tasks), strict=True):
        cut = result.spans[0].end
        assert 0 < cut < 250
        assert result.spans == [VersionSpan(0, cut, 3, "start"), VersionSpan(cut, 250, 8, "retract")]
        assert_logprobs(rig.old, item.tokens, result, 0, cut)
        assert_logprobs(rig.new, item.tokens, result, cut, 250)
        off = np.abs(np.array(plain_logprobs(rig.old, item.tokens + result.tokens)[-20:]) - result.logprobs[-20:])
        assert off.max() > 0.1, "the two models are too alike for the test to tell them apart"
    after = await rig.engine.generate(request("after", prompt(5), 4))
    assert after.spans == [VersionSpan(0, 4, 8, "start")]


@both_ways
@both_families
async def test_in_place_keeps_the_old_cache_under_the_new_weights(rig: Rig) -> None:
    item = request("kept", prompt(9, 7), 200)
    [task] = await running_until(rig.engine, request("short", prompt(5), 12), item)
    await rig.engine.activate(rig.state, 4, "in_place", None)
    result = await task
    cut = result.spans[0].end
    assert result.spans == [VersionSpan(0, cut, 3, "start"), VersionSpan(cut, 200, 4, "in_place")]
    assert_logprobs(rig.old, item.tokens, result, 0, cut)
    cache, text = DynamicCache(), item.tokens + result.tokens
    known = len(item.tokens) + cut - 1
    with torch.no_grad():
        rig.old(input_ids=torch.tensor([text[:known]]), past_key_values=cache)
        logits = rig.new(input_ids=torch.tensor([text[known:-1]]), past_key_values=cache).logits[0]
    want = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[known + 1 :])[:, None])[:, 0]
    np.testing.assert_allclose(result.logprobs[cut:], want, rtol=0, atol=TOLERANCE)


async def test_drain_lets_what_runs_finish_first_and_starts_nothing_before_the_new_version(rig: Rig) -> None:
    [running] = await running_until(rig.engine, request("short", prompt(5), 5), request("long", prompt(6), 150))
    activation = asyncio.create_task(rig.engine.activate(rig.state, 4, "drain", None))
    await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    later = asyncio.create_task(rig.engine.generate(request("later", prompt(7), 6)))
    assert (await running).spans == [VersionSpan(0, 150, 3, "start")]
    await activation
    assert (await later).spans == [VersionSpan(0, 6, 4, "start")]


async def test_many_activations_leave_spans_that_cover_the_output_once(rig: Rig) -> None:
    item = request("spans", prompt(9, 7), 150)
    task = asyncio.create_task(rig.engine.generate(item))
    states = {0: state_of(rig.old), 1: rig.state}
    version = 3
    while not task.done():
        version += 1
        await rig.engine.activate(states[version % 2], version, "retract", None)
    result = await task
    assert len(result.spans) > 2
    assert [span.start for span in result.spans[1:]] == [span.end for span in result.spans[:-1]]
    assert (result.spans[0].start, result.spans[-1].end) == (0, 150)
    for span in result.spans[1:]:
        assert_logprobs(rig.new if span.version % 2 else rig.old, item.tokens, result, span.start, span.end)


@both_families
async def test_only_the_changed_tensors_are_written(rig: Rig) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    await rig.engine.activate(rig.state, 5, "retract", {name})
    mixed = state_of(rig.old) | {name: rig.state[name]}
    tokens = prompt(20)
    rig.old.load_state_dict({name: rig.new.state_dict()[name]}, strict=False)
    np.testing.assert_allclose(await rig.engine.logprobs(tokens), plain_logprobs(rig.old, tokens), atol=TOLERANCE)
    assert (await rig.engine.activate(mixed, 6, "retract", set())).engine_digest == digest_of(mixed)


@both_families
async def test_the_engine_digest_sees_one_ulp_of_the_live_weights(rig: Rig) -> None:
    weights = rig.engine._weights
    assert weights is not None
    live = weights._tensors["model.layers.0.mlp.up_proj.weight"]
    with torch.inference_mode():
        live[3, 4] = torch.nextafter(live[3, 4].bfloat16(), torch.tensor(torch.inf).bfloat16()).float()
    again = await rig.engine.activate(state_of(rig.old), 4, "retract", set())
    assert again.engine_digest != digest_of(state_of(rig.old))


async def test_the_probe_is_a_plain_forward_amid_running_requests(rig: Rig) -> None:
    tasks = await running_until(rig.engine, request("short", prompt(5), 5), request("long", prompt(6), 200))
    tokens = prompt(31, 5)
    np.testing.assert_allclose(await rig.engine.logprobs(tokens), plain_logprobs(rig.old, tokens), rtol=0, atol=TOLERANCE)
    await asyncio.gather(*tasks)


async def test_an_abort_keeps_the_partial_output(rig: Rig) -> None:
    item = request("cancelled", prompt(6), 300)
    [task] = await running_until(rig.engine, request("short", prompt(5), 8), item)
    rig.engine.abort("cancelled")
    rig.engine.abort("unknown")
    result = await task
    assert result.finish == "abort"
    assert 8 <= len(result.tokens) < 300
    assert result.spans == [VersionSpan(0, len(result.tokens), 3, "start")]
    assert_logprobs(rig.old, item.tokens, result, 0, len(result.tokens))


async def test_more_requests_than_slots_wait_their_turn_and_an_abort_of_a_waiting_one_is_empty(rig: Rig) -> None:
    tasks = [asyncio.create_task(rig.engine.generate(request(f"w{i}", prompt(4, i), 30))) for i in range(90)]
    await asyncio.sleep(0)
    rig.engine.abort("w89")
    results = await asyncio.gather(*tasks)
    assert (results[89].tokens, results[89].spans, results[89].finish) == ([], [], "abort")
    assert all(len(result.tokens) == 30 for result in results[:89])
    assert results[80].queue_seconds > results[0].queue_seconds


async def test_a_cancelled_call_frees_its_slot(rig: Rig) -> None:
    tasks = await running_until(
        rig.engine, request("short", prompt(5), 5), *[request(f"c{i}", prompt(6), 390) for i in range(39)]
    )
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*(rig.engine.generate(request(f"n{i}", prompt(6), 3)) for i in range(40)))
    assert all(len(result.tokens) == 3 for result in results)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (request("a", [], 4), "prompt_empty"),
        (request("b", [1, VOCABULARY], 4), "token_out_of_vocabulary"),
        (request("c", [-1], 4), "token_out_of_vocabulary"),
        (request("d", [1] * 390, 11), "context_exceeded"),
        (request("e", [1], 4, position0=4), "max_tokens"),
    ],
)
async def test_a_request_that_the_model_must_not_see_is_refused_and_harms_nobody(
    rig: Rig, bad: GenerateRequest, code: str
) -> None:
    with pytest.raises(UsageError) as refused:
        await rig.engine.generate(bad)
    assert refused.value.code == code
    rig.engine.health()
    assert len((await rig.engine.generate(request("good", [1] * 390, 10))).tokens) == 10


@both_families
async def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(rig: Rig) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    lacking = {key: tensor for key, tensor in rig.state.items() if key != name}
    wrong_shape = rig.state | {name: RawTensor(TensorSpec(name, "BF16", (32, 64)), rig.state[name].data)}
    unknown = rig.state | {"model.extra": RawTensor(TensorSpec("model.extra", "BF16", (1,)), np.zeros(2, np.uint8))}
    wide = rig.state | {name: RawTensor(TensorSpec(name, "F64", (64, 32)), np.zeros(64 * 32 * 8, np.uint8))}
    for state in (lacking, wrong_shape, unknown, wide):
        with pytest.raises(EngineError):
            await rig.engine.activate(state, 9, "retract", None)
    assert rig.engine.version == 3
    tokens = prompt(12)
    np.testing.assert_allclose(await rig.engine.logprobs(tokens), plain_logprobs(rig.old, tokens), atol=TOLERANCE)
    assert (await rig.engine.activate(state_of(rig.old), 4, "retract", set())).engine_digest == digest_of(state_of(rig.old))


async def test_a_failing_step_fails_every_request_and_the_health(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    assert rig.engine._batch is not None
    monkeypatch.setattr(rig.engine._batch, "step", broken)
    results = await asyncio.gather(
        *(rig.engine.generate(request(f"f{i}", prompt(4), 9)) for i in range(60)), return_exceptions=True
    )
    assert all(isinstance(result, EngineError) and "out of memory" in str(result) for result in results)
    rig.engine._failure, failure = None, rig.engine._failure
    monkeypatch.setattr(rig.engine, "health", lambda: None)
    with pytest.raises(EngineError, match="isn't running"):  # begun at the moment in which the thread died
        await rig.engine.generate(request("late", prompt(4), 9))
    monkeypatch.undo()
    rig.engine._failure = failure
    with pytest.raises(EngineError, match="out of memory"):
        rig.engine.health()
    with pytest.raises(EngineError, match="out of memory"):
        await rig.engine.activate(rig.state, 4, "retract", None)


async def test_weights_that_are_not_finite_fail_the_request_not_the_engine(rig: Rig) -> None:
    name = "model.norm.weight"
    data = torch.full((32,), torch.nan).bfloat16().view(torch.uint8).numpy()
    state = state_of(rig.old)
    await rig.engine.activate(state | {name: RawTensor(TensorSpec(name, "BF16", (32,)), data)}, 4, "retract", {name})
    with pytest.raises(EngineError, match="aren't finite"):
        await rig.engine.generate(request("nan", prompt(5), 4))
    await rig.engine.activate(state, 5, "retract", {name})
    assert len((await rig.engine.generate(request("fine", prompt(5), 4))).tokens) == 4


async def test_stop_gives_back_what_runs_as_an_abort(tmp_path: Path) -> None:
    engine = TorchEngine(slots=2, max_context_tokens=400)
    await engine.start(save(make_model("llama", 0), tmp_path), 0)
    tasks = await running_until(engine, request("s", prompt(4), 3), request("l", prompt(4), 390))
    waiting = [asyncio.create_task(engine.generate(request(f"q{i}", prompt(4), 300))) for i in range(4)]
    await asyncio.sleep(0)
    await engine.stop()
    assert (await tasks[0]).finish == "abort"
    assert (await tasks[0]).tokens
    assert {(await task).finish for task in waiting} == {"abort"}
    with pytest.raises(EngineError, match="isn't running"):
        await engine.generate(request("late", prompt(4), 3))


async def test_weights_wider_than_the_engine_are_refused_at_the_start(tmp_path: Path) -> None:
    engine = TorchEngine(slots=2, dtype="bfloat16")
    with pytest.raises(EngineError, match=r"rollout\.dtype"):
        await engine.start(save(make_model("llama", 0), tmp_path, torch.float32), 0)


async def test_a_folder_without_a_model_is_one_line_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \.safetensors file"):
        await TorchEngine(slots=2).start(tmp_path, 0)
