"""`towline.client` against a real gateway: versions that come, connections that break, keys that make a repeat safe."""

from __future__ import annotations

import asyncio

import pytest

from live.gateway.conftest import Scene, spell
from support.proxy import proxied
from towline.client.gateway import AsyncGateway, Gateway
from towline.client.rules import VersionNotReadyError
from towline.config import TenantSettings
from towline.errors import UsageError

SAMPLING = {"max_new_tokens": 60, "sampling_seed": 4, "ignore_eos": True}


async def test_a_stream_that_breaks_goes_on_where_it_broke_and_the_sync_client_says_the_same(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 60.0})
    http = await scene.gateway()
    async with proxied(f"nats://{http.base_url.host}:{http.base_url.port}") as proxy:
        async with AsyncGateway(proxy.url.replace("nats", "http")) as gateway:
            tokens: list[int] = []
            cuts = 0
            async for piece in gateway.stream(spell("abc"), sampling=SAMPLING, min_version=0):
                tokens += piece.tokens
                if cuts < 2:
                    cuts += 1
                    proxy.cut()
            assert cuts == 2
            (whole,) = await gateway.generate(spell("abc"), sampling=SAMPLING)
    assert whole.tokens == tokens
    assert (whole.finish, whole.version_start, len(whole.logprobs), whole.seed) == ("length", 0, 60, 4)

    def again() -> list[int]:
        with Gateway(str(http.base_url)) as gateway:
            (sample,) = gateway.generate(spell("abc"), sampling=SAMPLING)
            assert sample == whole or sample.id != whole.id
            pieces = list(gateway.stream("abc", sampling=SAMPLING))
            assert gateway.server_info()["applied"] == 0
            assert "".join(piece.text for piece in pieces) == sample.text
            return sample.tokens

    assert await asyncio.to_thread(again) == tokens


async def test_it_waits_for_a_version_and_gives_up_by_name(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    http = await scene.gateway()
    async with AsyncGateway(str(http.base_url), patience_seconds=30.0) as gateway:
        waiting = asyncio.create_task(gateway.generate(spell("a"), sampling=SAMPLING, min_version=2))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        version = await asyncio.to_thread(scene.world.commit, 1)
        assert (await waiting)[0].version_start == version == 2
    async with AsyncGateway(str(http.base_url), patience_seconds=0.5) as gateway:
        with pytest.raises(VersionNotReadyError) as refused:
            await gateway.generate(spell("a"), exact_version=9)
        assert (refused.value.target_version, refused.value.applied) == (9, 2)


async def test_under_a_key_the_answer_is_the_same_and_another_request_is_refused(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    http = await scene.gateway(tenants={name: TenantSettings(token=name * 20) for name in ("m", "o")})  # type: ignore[arg-type]
    many = {"max_new_tokens": 3000 // 8, "n": 8, "ignore_eos": True}  # more than an entry holds
    async with AsyncGateway(str(http.base_url), token="m" * 20) as gateway:
        first = await gateway.generate(spell("abc"), sampling=many, key="mine")
        assert len({one.seed for one in first}) == 8
        assert await gateway.generate(spell("abc"), sampling=many, key="mine") == first, "seeds that nobody gave included"
        with pytest.raises(UsageError, match="another request"):
            await gateway.generate(spell("abd"), sampling=many, key="mine")
    async with AsyncGateway(str(http.base_url), token="o" * 20) as other:
        assert await other.generate(spell("abc"), sampling=many, key="mine") != first, "a key is its tenant's"
    async with AsyncGateway(str(http.base_url), token="wrong") as stranger:
        with pytest.raises(UsageError, match="bearer token"):
            await stranger.generate(spell("abc"))
