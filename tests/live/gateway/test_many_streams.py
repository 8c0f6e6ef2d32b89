"""200 streams at a time through two replicas while versions activate: each by versions that it accepts, every token's version
the one that sampled it, none hangs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from live.gateway.conftest import Scene, events
from support.waiting import until
from towline.pb import rollout_pb2 as pb
from towline.pb.rollout_pb2_grpc import RolloutServiceStub
from unit.engine.models import plain_logprobs

STREAMS = 200


async def stream(client: httpx.AsyncClient, seed: int, count: int, bound: dict[str, int]) -> dict[str, Any]:
    given = {
        "input_ids": [1 + seed % 50, 2, 3], "stream": True, "incremental_streaming_output": True, "return_logprob": True,
        "sampling_params": {"max_new_tokens": count, "sampling_seed": seed, "ignore_eos": True}, "weight_version": bound,
    }  # fmt: skip
    found: dict[str, Any] = {"bound": bound, "prompt": given["input_ids"], "tokens": [], "logprobs": [], "spans": []}
    async with client.stream("POST", "/generate", json=given, headers={"Prefer": "wait=8"}) as response:
        found["status"] = response.status_code
        if response.status_code != 200:
            found["said"] = (await response.aread()).decode()
            return found
        async for event in events(response):
            if event == "DONE":
                found["done"] = True
                break
            assert "error" not in event, event
            found["tokens"] += event["output_ids"]
            found["logprobs"] += [one[0] for one in event["meta_info"]["output_token_logprobs"]]
            found["spans"] += event["meta_info"]["spans"]
            found["finish"] = event["meta_info"]["finish_reason"]
    return found


async def stream_over_grpc(channel: grpc.aio.Channel, seed: int, count: int, bound: dict[str, int]) -> dict[str, Any]:
    """The same, told the same way."""
    prompt = [1 + seed % 50, 2, 3]
    request = pb.GenerateRequest(
        prompts=[pb.Prompt(tokens=pb.TokenIds(ids=prompt))], weight_version=pb.VersionConstraint(**bound), wait_seconds=8,
        sampling=pb.SamplingParams(max_new_tokens=count, seed=seed, ignore_eos=True),
    )  # fmt: skip
    found: dict[str, Any] = {"bound": bound, "prompt": prompt, "tokens": [], "logprobs": [], "spans": []}
    try:
        async for event in RolloutServiceStub(channel).StreamGenerate(request):
            (sample,) = event.samples
            found["tokens"] += sample.tokens
            found["logprobs"] += sample.logprobs
            found["spans"] += [[span.start, span.end, span.version, span.cut] for span in sample.spans]
            superseded = sample.finish == pb.FINISH_REASON_SUPERSEDED
            found["finish"] = {"type": "abort" if superseded else str(sample.finish), "err_type": "superseded"}
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
            raise
        return found | {"status": 409}
    return found | {"status": 200, "done": True}


def check(scene: Scene, found: dict[str, Any], count: int, *, exact_logprobs: bool) -> None:
    lineage = scene.world.log.lineage
    assert found["status"] == 200, found
    assert found["done"]
    assert [span[0] for span in found["spans"]] == [0, *(span[1] for span in found["spans"][:-1])][: len(found["spans"])]
    assert found["spans"][-1][1] == len(found["tokens"]) == len(found["logprobs"])
    versions = {span[2] for span in found["spans"]}
    if "exact_version" in found["bound"]:
        assert versions == {found["bound"]["exact_version"]}
    if "min_version" in found["bound"]:
        assert min(lineage.depth(version) for version in versions) >= lineage.depth(found["bound"]["min_version"])
    if found["finish"]["type"] == "abort":
        assert "exact_version" in found["bound"], "nothing else is ever superseded on a line that only grows"
        assert found["finish"]["err_type"] == "superseded"
    else:
        assert len(found["tokens"]) == count
    if not exact_logprobs:
        return
    # Retract recomputes the prefix, so each token's logprob is that of the version of its span, given all before it.
    tokens, at = found["prompt"] + found["tokens"], len(found["prompt"])
    for version in versions:
        expected = plain_logprobs(scene.world.models[version], tokens)[at - 1 :]
        for start, end, of, _ in found["spans"]:
            if of == version:
                assert found["logprobs"][start:end] == pytest.approx(expected[start:end], abs=2e-3), (version, start, end)


async def run(
    scene: Scene, *, versions: int, count: int, seconds: float, exact_logprobs: bool, over_grpc: bool = False, **rollout: Any
) -> None:
    scene.seed()
    commits = []
    for name in ("a", "b"):
        await scene.worker(name, slots=64, gateway={"exact_hold_seconds": 0.5, "waiting": 400}, **rollout)
    client = await scene.gateway(**({"grpc_port": 0} if over_grpc else {}))
    channel = grpc.aio.insecure_channel(scene.grpc_address) if over_grpc else None
    draw = random.Random(7)
    served = [0]
    tasks: set[asyncio.Task[None]] = set()
    answers: list[dict[str, Any]] = []
    activating = asyncio.Event()

    async def trainer() -> None:
        for seed in range(1, versions + 1):
            await asyncio.sleep(seconds)
            served.append(await asyncio.to_thread(scene.world.commit, seed))
            commits.append(served[-1])
        activating.set()

    async def one(seed: int) -> None:
        kind = seed % 3
        bound = {} if kind == 0 else {"min_version": served[-1]} if kind == 1 else {"exact_version": served[-1]}
        wanted = draw.randint(count // 2, count) if not bound else count
        if channel is not None:
            answers.append(await stream_over_grpc(channel, seed, wanted, bound))
        else:
            answers.append(await stream(client, seed, wanted, bound))

    training = asyncio.create_task(trainer())
    seed = 0
    async with asyncio.timeout(150):
        while not activating.is_set() or seed < STREAMS:
            while len(tasks) < STREAMS and (not activating.is_set() or seed < STREAMS):
                tasks.add(asyncio.create_task(one(seed)))
                seed += 1
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.gather(*tasks)
    await training
    if channel is not None:
        await channel.close()
    assert len(answers) == seed >= STREAMS
    moved = 0
    for found in answers:
        if found["status"] == 409:
            assert "exact_version" in found["bound"], found
            continue
        check(scene, found, len(found["tokens"]) if not found["bound"] else count, exact_logprobs=exact_logprobs and moved < 40)
        moved += len({span[2] for span in found["spans"]}) > 1
    assert moved > 10, "activations cut running streams"
    assert sum(found["status"] == 200 for found in answers) > len(answers) * 0.6
    await until(lambda: not any(one.worker.busy for one in scene.workers.values()))


@pytest.mark.parametrize(
    ("versions", "over_grpc"),
    [(2, False), pytest.param(10, False, marks=pytest.mark.slow), pytest.param(5, True, marks=pytest.mark.slow)],
)
async def test_200_streams_through_two_synthetic_replicas_while_versions_activate(
    scene: Scene, versions: int, over_grpc: bool
) -> None:
    await run(
        scene, versions=versions, count=60, seconds=1.0, exact_logprobs=False, over_grpc=over_grpc, engine="synthetic",
        arguments={"tokens_per_second": 60.0, "pause_seconds": 0.05},
    )  # fmt: skip


@pytest.mark.slow
async def test_200_streams_through_two_torch_replicas_while_versions_activate(scene: Scene) -> None:
    await run(scene, versions=5, count=24, seconds=1.0, exact_logprobs=True, engine="torch")
