"""`towline.client` against a real gateway: chats, sessions and versions over HTTP, and the same rollouts over gRPC."""

from __future__ import annotations

import asyncio

import pytest

from live.gateway.conftest import Scene, events, spell
from live.gateway.test_claims import BUFFER, admit
from live.gateway.test_sessions import seed_chat
from support.proxy import proxied
from towline.client.gateway import AsyncGateway, Gateway
from towline.client.grpc import AsyncGrpcGateway, GrpcGateway
from towline.client.rules import VersionNotReadyError, Versions
from towline.config import TenantSettings
from towline.errors import ConflictError, UnavailableError, UsageError

SAMPLING = {"max_new_tokens": 60, "sampling_seed": 4, "ignore_eos": True}


async def test_a_session_from_its_opening_to_its_sample_by_both_clients(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    http = await scene.gateway()
    url = str(http.base_url)
    async with AsyncGateway(url) as gateway:
        talk = [{"role": "user", "content": "hi"}]
        chat = await gateway.chat(talk, max_tokens=4, seed=3)
        assert (chat.version_start, chat.version_end, chat.session) == (0, 0, None)
        assert chat.answer["usage"]["completion_tokens"] == 4
        assert (await gateway.chat(talk, max_tokens=4, seed=3, exact_version=0)).message == chat.message
        session = await gateway.open_session(ttl_seconds=600)
        for _ in range(2):
            said = await gateway.turn(session, talk, max_tokens=6, min_version=0)
            talk = [*talk, said.message, {"role": "user", "content": "more"}]
        assert said.session is not None
        assert (said.session["turns"], said.session["mismatches"]) == (2, {})
        rolled = await gateway.rollback(session)
        assert rolled["turns"] == 1
        with pytest.raises(ConflictError):
            await gateway.rollback(session)
        again = await gateway.turn(session, talk[:-2], max_tokens=6, key="mine")
        assert (await gateway.turn(session, talk[:-2], max_tokens=6, key="mine")).message == again.message
        view = await gateway.view_session(session)
        assert [node["kind"] for node in view["nodes"]] == ["prompt", "policy", "environment", "policy", "policy"]
        with pytest.raises(UsageError, match="stream"):
            await gateway.chat(talk, stream=True)
        done = await gateway.finish(session, group="g", sample=1, group_size=2)
        assert done["policy_tokens"] > 6
        with pytest.raises(UsageError, match="no tasks to claim"):
            await gateway.claim()

    def sync() -> None:
        with Gateway(url, model=scene.world.run) as gateway:
            assert gateway.finish(session, group="g", sample=1, group_size=2) == done, "a repeat"
            with pytest.raises(ConflictError):
                gateway.turn(session, talk, max_tokens=6)
            other = gateway.open_session()
            assert gateway.turn(other, talk[:1], max_tokens=4).message["role"] == "assistant"
            for _ in range(2):
                gateway.delete_session(other)
            with pytest.raises(UsageError, match="no session"):
                gateway.view_session(other)

    await asyncio.to_thread(sync)


async def test_a_claimed_task_s_session_becomes_its_sample_with_a_streamed_turn_in_it(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    http = await scene.gateway(buffer=BUFFER)
    async with AsyncGateway(str(http.base_url), model=scene.world.run) as gateway:
        assert await gateway.claim() is None
        await admit(scene, 5, 1)
        claimed = await gateway.claim(environment="agent", wait_seconds=20, key="claim")
        assert claimed is not None
        assert (claimed["task"]["group"], claimed["task"]["sample"]) == (5, 1)
        assert await gateway.claim(environment="agent", wait_seconds=20, key="claim") == claimed, "a repeat is the same claim"
        session, talk = claimed["id"], [{"role": "user", "content": "hi"}]
        said = await gateway.turn(session, talk, max_tokens=6)
        talk += [said.message, {"role": "user", "content": "more"}]
        body = {"model": scene.world.run, "messages": talk, "max_tokens": 6, "stream": True}
        async with http.stream("POST", f"/sessions/{session}/v1/chat/completions", json=body) as response:
            told = [event async for event in events(response)]
        assert told[-1] == "DONE"
        assert (told[-2]["session"]["turns"], told[-2]["session"]["mismatches"]) == (2, {})
        view = await gateway.view_session(session)
        done = await gateway.finish(session)
        sampled = sum(len(node["tokens"]) for node in view["nodes"] if node["kind"] == "policy")
        assert (done["group"], done["sample"], done["policy_tokens"]) == (5, 1, sampled)
        (trajectory,) = (await scene.world.trajectories()).values()
        assert trajectory.tokens.tolist() == view["tokens"]


async def test_versions_are_told_and_waited_for(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    http = await scene.gateway(grpc_port=0)
    run = scene.world.run
    async with AsyncGateway(str(http.base_url)) as gateway, AsyncGrpcGateway(scene.grpc_address) as over_grpc:
        at_first = Versions(run=run, latest=0, depth=0, applied=0, serving={0: 1})
        assert await gateway.versions() == await over_grpc.versions() == at_first
        watched = over_grpc.watch_versions()
        assert await anext(watched) == at_first
        with pytest.raises(VersionNotReadyError):
            await gateway.wait_for_version(min_version=2, seconds=0.1)
        waiting = asyncio.create_task(gateway.wait_for_version(min_version=2))
        version = await asyncio.to_thread(scene.world.commit, 1)
        found = await waiting
        assert (found.applied, found.serving) == (version, {version: 1})
        assert await gateway.wait_for_version(exact_version=version) == found
        async for status in watched:
            if status == found:
                break
        with pytest.raises(VersionNotReadyError):
            await gateway.wait_for_version(exact_version=0, seconds=0.1)
        assert (await http.get("/server_info?version=x")).status_code == 400


async def test_over_grpc_a_broken_stream_goes_on_and_refusals_are_the_same_errors(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 60.0})
    tenants = {"m": TenantSettings(token="m" * 20)}  # type: ignore[arg-type]
    http = await scene.gateway(grpc_port=0, tenants=tenants)
    async with AsyncGateway(str(http.base_url), token="m" * 20) as gateway:
        (whole,) = await gateway.generate(spell("abc"), sampling=SAMPLING)
    async with proxied(f"nats://{scene.grpc_address}") as proxy:
        address = proxy.url.removeprefix("nats://")
        async with AsyncGrpcGateway(address, token="m" * 20) as over_grpc:
            pieces, cuts = [], 0
            async for piece in over_grpc.stream(spell("abc"), sampling=SAMPLING, min_version=0):
                pieces.append(piece)
                if cuts < 2:
                    cuts += 1
                    proxy.cut()
            assert cuts == 2
            assert [token for piece in pieces for token in piece.tokens] == whole.tokens
            assert [logprob for piece in pieces for logprob in piece.logprobs] == pytest.approx(whole.logprobs)
            assert "".join(piece.text for piece in pieces) == whole.text
            assert [(span.start, span.end) for piece in pieces for span in piece.spans][-1][1] == len(whole.tokens)
            (same,) = await over_grpc.generate(spell("abc"), sampling=SAMPLING, exact_version=0)
            assert (same.tokens, same.spans, same.seed, same.finish) == (whole.tokens, whole.spans, 4, "length")

    def sync() -> None:
        with GrpcGateway(scene.grpc_address, token="m" * 20, patience_seconds=0.5) as gateway:
            pieces = list(gateway.stream(spell("abc"), sampling=SAMPLING))
            assert [token for piece in pieces for token in piece.tokens] == whole.tokens
            assert gateway.generate("abc", sampling=SAMPLING)[0].tokens == whole.tokens
            assert gateway.versions().serving == {0: 1}
            with pytest.raises(VersionNotReadyError) as refused:
                gateway.generate(spell("a"), exact_version=9)
            assert (refused.value.target_version, refused.value.applied) == (9, 0)
            first = gateway.generate(spell("abc"), sampling={"max_new_tokens": 4}, key="mine")
            assert gateway.generate(spell("abc"), sampling={"max_new_tokens": 4}, key="mine") == first
            for words, broken in (
                ("another request", lambda: gateway.generate(spell("abd"), sampling={"max_new_tokens": 4}, key="mine")),
                ("nonsense", lambda: gateway.generate([1], sampling={"nonsense": 1})),
                ("not both", lambda: gateway.generate([1], min_version=1, exact_version=1)),
                ("one sample", lambda: list(gateway.stream([1], sampling={"n": 2}))),
                ("temperature", lambda: gateway.generate([1], sampling={"temperature": -1})),
            ):
                with pytest.raises(UsageError, match=words):
                    broken()
        with GrpcGateway(scene.grpc_address, token="wrong") as stranger, pytest.raises(UsageError, match="bearer token"):
            stranger.generate([1])
        with GrpcGateway("127.0.0.1:1", patience_seconds=0.1) as nobody:
            with pytest.raises(UnavailableError, match="lost"):
                nobody.generate([1])
            with pytest.raises(UnavailableError, match="lost"):
                nobody.versions()

    await asyncio.to_thread(sync)
