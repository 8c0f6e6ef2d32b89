"""gRPC and HTTP are two doors to the same thing: what one says of a request, the other says too."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from live.gateway.conftest import Scene, spell
from support.waiting import until
from towline.config import TenantSettings
from towline.pb import policy_pb2
from towline.pb import rollout_pb2 as pb
from towline.pb.policy_pb2_grpc import PolicyServiceStub
from towline.pb.rollout_pb2_grpc import RolloutServiceStub

if TYPE_CHECKING:
    from towline.pb.rollout_pb2_grpc import RolloutServiceAsyncStub

LONG = pb.SamplingParams(max_new_tokens=300, ignore_eos=True, seed=4)


def asked(text: str = "abc", *, sampling: pb.SamplingParams | None = None, **fields: Any) -> pb.GenerateRequest:
    prompt = pb.Prompt(tokens=pb.TokenIds(ids=spell(text)))
    return pb.GenerateRequest(prompts=[prompt], sampling=sampling or pb.SamplingParams(max_new_tokens=40, seed=4), **fields)


@asynccontextmanager
async def rollouts(scene: Scene) -> AsyncIterator[RolloutServiceAsyncStub]:
    async with grpc.aio.insecure_channel(scene.grpc_address) as channel:
        yield RolloutServiceStub(channel)


async def refused(call: Any) -> tuple[grpc.aio.AioRpcError, pb.Refusal, float | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    assert status is not None, caught.value
    assert status.code == caught.value.code().value[0]
    refusal, retry = pb.Refusal(), RetryInfo()
    assert status.details[0].Unpack(refusal)
    delay = (
        retry.retry_delay.ToTimedelta().total_seconds() if len(status.details) > 1 and status.details[1].Unpack(retry) else None
    )
    return caught.value, refusal, delay


async def test_grpc_and_http_give_the_same_samples_whole_and_streamed(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments={"mean_tokens": 20, "sigma": 0.5, "tokens_per_second": 100.0})
    http = await scene.gateway(grpc_port=0)
    sampling = {"max_new_tokens": 40, "sampling_seed": 4, "n": 3, "stop": ["q"], "no_stop_trim": True}
    told = (
        await http.post("/generate", json={"input_ids": spell("abc"), "sampling_params": sampling, "return_logprob": True})
    ).json()
    request = asked(sampling=pb.SamplingParams(max_new_tokens=40, seed=4, n=3, stop=["q"], keep_stop=True))
    async with rollouts(scene) as stub:
        answer = await stub.Generate(request)
        events = [event async for event in stub.StreamGenerate(request)]
    assert len(answer.samples) == len(told) == 3
    for sample, one in zip(answer.samples, told, strict=True):
        meta = one["meta_info"]
        assert list(sample.tokens) == one["output_ids"]
        assert list(sample.logprobs) == pytest.approx([entry[0] for entry in meta["output_token_logprobs"]])
        assert (sample.text, sample.seed, sample.prompt_tokens) == (one["text"], meta["seed"], 3)
        assert [[s.start, s.end, s.version, s.cut] for s in sample.spans] == meta["spans"]
        assert pb.FinishReason.Name(sample.finish) == f"FINISH_REASON_{meta['finish_reason']['type'].upper()}"
        matched = sample.WhichOneof("matched")
        assert (getattr(sample, matched) if matched else None) == meta["finish_reason"].get("matched")
        assert (sample.weight_version_start, sample.weight_version_end) == (0, 0)
    for index, whole in enumerate(answer.samples):
        pieces = [sample for event in events for sample in event.samples if sample.index == index]
        tokens: list[int] = []
        for piece in pieces:
            assert piece.start == len(tokens), "each token once, in order"
            tokens += piece.tokens
            if piece.tokens:
                assert (piece.spans[0].start, piece.spans[-1].end) == (piece.start, len(tokens))
        assert tokens == list(whole.tokens)
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.finish for piece in pieces[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (len(pieces) - 1)
        assert pieces[-1].finish == whole.finish
    assert len(events) > 1


async def test_versions_bind_and_refusals_are_statuses_with_their_details(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    http = await scene.gateway(grpc_port=0, max_body_bytes=20_000)
    async with rollouts(scene) as stub:
        error, refusal, delay = await refused(stub.Generate(asked(weight_version=pb.VersionConstraint(min_version=2))))
        assert (error.code(), refusal.type) == (grpc.StatusCode.FAILED_PRECONDITION, "WeightVersionNotReady")
        assert (refusal.retryable, refusal.target_version, refusal.applied, delay) == (True, 2, 0, 1.0)
        said = await http.post("/generate", json={"input_ids": [1], "weight_version": {"min_version": 2}})
        assert error.details() == said.json()["message"]
        bounded = asked(weight_version=pb.VersionConstraint(exact_version=2), wait_seconds=30)
        error, refusal, _ = await refused(stub.Generate(bounded, timeout=3.0))
        assert refusal.type == "WeightVersionNotReady", "said before the deadline"
        waiting = asyncio.create_task(_whole(stub, bounded))
        await asyncio.to_thread(scene.world.commit, 1)
        (sample,) = (await waiting).samples
        assert (sample.weight_version_start, sample.weight_version_end) == (2, 2)
        for broken, words in (
            (pb.GenerateRequest(), "prompts"),
            (pb.GenerateRequest(prompts=[pb.Prompt(text="a"), pb.Prompt(tokens=pb.TokenIds(ids=[1]))]), "prompts"),
            (asked(sampling=pb.SamplingParams(temperature=-1)), "temperature"),
            (asked(sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
            (asked(sampling=pb.SamplingParams(max_new_tokens=100_000)), "context"),
            (asked(wait_seconds=float("nan"), weight_version=pb.VersionConstraint(exact_version=9)), "wait_seconds"),
            (pb.GenerateRequest(prompts=[pb.Prompt(tokens=pb.TokenIds(ids=[-3]))]), "input_ids"),
        ):
            error, refusal, delay = await refused(stub.Generate(broken))
            assert (error.code(), refusal.type, delay) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", None)
            assert words in (error.details() or "")
            assert not refusal.retryable
        with pytest.raises(grpc.aio.AioRpcError) as large:
            await stub.Generate(pb.GenerateRequest(prompts=[pb.Prompt(text="a" * 30_000)]))
        assert large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def _whole(stub: RolloutServiceAsyncStub, request: pb.GenerateRequest) -> pb.GenerateResponse:
    answer: pb.GenerateResponse = await stub.Generate(request)
    return answer


async def test_a_key_gives_the_same_tokens_by_either_method_and_another_request_is_refused(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    await scene.gateway(grpc_port=0)
    metadata = (("idempotency-key", "mine"),)
    seedless = asked(sampling=pb.SamplingParams(max_new_tokens=40, ignore_eos=True))
    async with rollouts(scene) as stub:
        first = await stub.Generate(seedless, metadata=metadata)
        assert await stub.Generate(asked(sampling=seedless.sampling, wait_seconds=5), metadata=metadata) == first
        streamed = [s async for event in stub.StreamGenerate(seedless, metadata=metadata) for s in event.samples]
        assert [token for sample in streamed for token in sample.tokens] == list(first.samples[0].tokens)
        assert (await stub.Generate(seedless)).samples[0].seed != first.samples[0].seed
        error, refusal, _ = await refused(stub.Generate(asked("abd", sampling=seedless.sampling), metadata=metadata))
        assert (error.code(), refusal.type) == (grpc.StatusCode.ALREADY_EXISTS, "IdempotencyKeyReused")


@pytest.mark.parametrize("how", ["cancelled", "deadline", "whole"])
async def test_a_call_that_nobody_waits_for_leaves_its_replica(scene: Scene, how: str) -> None:
    scene.seed()
    worker = (await scene.worker(engine="synthetic", arguments={"tokens_per_second": 20.0})).worker
    await scene.gateway(grpc_port=0)
    async with rollouts(scene) as stub:
        if how == "whole":
            whole = stub.Generate(asked(sampling=LONG))
            await until(lambda: worker.busy == 1)
            whole.cancel()
        else:
            events = stub.StreamGenerate(asked(sampling=LONG), timeout=2.0 if how == "deadline" else None)
            if how == "cancelled":
                async for _ in events:
                    assert worker.busy == 1
                    break
                events.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as late:
                    async for _ in events:
                        pass
                assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: worker.busy == 0)


async def test_tenants_tokens_limits_and_tls(scene: Scene, tmp_path: Path) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    named = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    await asyncio.to_thread(lambda: subprocess.run([*made, *named], check=True, capture_output=True))
    tenants = {"m": TenantSettings(token="m" * 20, requests_per_minute=3)}  # type: ignore[arg-type]
    await scene.gateway(grpc_port=0, tenants=tenants, tls_certificate=str(certificate), tls_key=str(key))
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    mine = (("authorization", f"Bearer {'m' * 20}"),)
    async with grpc.aio.secure_channel(scene.grpc_address, trusted) as channel:
        stub = RolloutServiceStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            error, refusal, _ = await refused(stub.Generate(asked(), metadata=metadata))
            assert (error.code(), refusal.type) == (grpc.StatusCode.UNAUTHENTICATED, "authentication_error")
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await anext(aiter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]))))
        assert stranger.value.code() == grpc.StatusCode.UNAUTHENTICATED
        for _ in range(3):
            assert (await stub.Generate(asked(), metadata=mine)).samples
        error, refusal, delay = await refused(stub.Generate(asked(), metadata=mine))
        assert (error.code(), refusal.retryable) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert delay is not None
        assert delay > 0
    async with grpc.aio.insecure_channel(scene.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as plain:
            await RolloutServiceStub(channel).Generate(asked(), metadata=mine, timeout=5)
        assert plain.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_health_reflection_and_the_versions_as_they_come(scene: Scene) -> None:
    scene.seed()
    http = await scene.gateway(grpc_port=0, ready=False)
    async with grpc.aio.insecure_channel(scene.grpc_address) as channel:
        health, policy = health_pb2_grpc.HealthStub(channel), PolicyServiceStub(channel)

        async def state() -> int:
            asks = health_pb2.HealthCheckRequest(service="towline.v1.RolloutService")
            found: int = (await health.Check(asks)).status
            return found

        async def serves() -> bool:
            return bool(await state() == health_pb2.HealthCheckResponse.SERVING)

        assert not await serves()
        watch = policy.WatchVersions(policy_pb2.WatchVersionsRequest())
        seen: list[policy_pb2.PolicyStatus] = []

        async def read_on() -> None:
            async for status in watch:
                seen.append(status)

        reading = asyncio.create_task(read_on())
        await scene.worker(engine="synthetic")
        await until(serves)
        version = await asyncio.to_thread(scene.world.commit, 1)
        await until(lambda: bool(seen) and [one.version for one in seen[-1].serving] == [version])
        assert not seen[0].serving
        assert [(0, 1)] in [[(one.version, one.replicas) for one in status.serving] for status in seen]
        last = await policy.GetStatus(policy_pb2.GetStatusRequest())
        assert last == seen[-1]
        info = (await http.get("/server_info")).json()
        assert (last.run, last.latest_version, last.latest_depth, last.applied) == (
            info["run"], info["latest_version"], info["depth"], info["applied"],
        )  # fmt: skip
        assert last.serving[0].depth == last.latest_depth
        asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = await anext(aiter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asks)))
        assert {"towline.v1.RolloutService", "towline.v1.PolicyService", "grpc.health.v1.Health"} <= {
            one.name for one in listed.list_services_response.service
        }
        reading.cancel()


ODD_TEXT = st.text(max_size=20)
ODD_NUMBER = st.integers(-(2**31), 2**31 - 1)
ODD_FLOAT = st.floats(allow_nan=True, width=64)
ODD_SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(0, 2**32 - 1), "max_new_tokens": st.integers(0, 2**32 - 1), "temperature": ODD_FLOAT, "top_p": ODD_FLOAT,
    "top_k": ODD_NUMBER, "seed": st.integers(-(2**63), 2**63 - 1), "stop": st.lists(ODD_TEXT, max_size=20),
    "stop_token_ids": st.lists(ODD_NUMBER, max_size=5), "ignore_eos": st.booleans(), "skip_special_tokens": st.booleans(),
    "keep_stop": st.booleans(),
}  # fmt: skip
ODD_PROMPT = st.one_of(
    st.builds(pb.Prompt, text=ODD_TEXT),
    st.builds(pb.Prompt, tokens=st.builds(pb.TokenIds, ids=st.lists(ODD_NUMBER | st.integers(0, 60), max_size=5))),
    st.just(pb.Prompt()),
)
ODD_REQUEST = st.builds(
    pb.GenerateRequest,
    prompts=st.lists(ODD_PROMPT, max_size=3),
    sampling=st.fixed_dictionaries({}, optional=ODD_SAMPLING).map(lambda fields: pb.SamplingParams(**fields)),
    weight_version=st.none()
    | st.builds(pb.VersionConstraint, min_version=st.integers(-(2**63), 2**63 - 1))
    | st.builds(pb.VersionConstraint, exact_version=st.integers(-1, 3)),
    wait_seconds=ODD_FLOAT,
    session=ODD_TEXT,
)
ODD_KEY = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300)


async def check_odd(scene: Scene, examples: int) -> Counter[grpc.StatusCode]:
    scene.seed()
    await scene.worker(engine="synthetic", gateway={"waiting": 1000})
    await scene.gateway(grpc_port=0, max_wait_seconds=0.1, max_choices=8)
    found: Counter[grpc.StatusCode] = Counter()
    address = scene.grpc_address

    @given(request=ODD_REQUEST, key=st.none() | ODD_KEY)
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def send(request: pb.GenerateRequest, key: str | None) -> None:
        code = grpc.StatusCode.OK
        try:
            stub.Generate(request, timeout=20, metadata=() if key is None else (("idempotency-key", key),))
        except grpc.RpcError as error:
            code = error.code()
        found[code] += 1
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), request

    with grpc.insecure_channel(address) as channel:
        stub = RolloutServiceStub(channel)
        await asyncio.to_thread(send)
    return found


async def test_odd_requests_are_refused_by_name_and_break_nothing(scene: Scene) -> None:
    found = await check_odd(scene, 60)
    assert found[grpc.StatusCode.INVALID_ARGUMENT] > 20


@pytest.mark.slow
async def test_a_thousand_odd_requests_break_nothing(scene: Scene) -> None:
    found = await check_odd(scene, 1000)
    assert found[grpc.StatusCode.OK] > 20
