"""A world with workers whose doors are open, and gateways over them, in this process; a tokenizer of one character a token."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from live.worker.conftest import Running
from live.worker.world import World
from support.waiting import until
from towline.bus.client import Bus
from towline.config import BusSettings, GatewaySettings, SamplingSettings, Settings, TenantSettings
from towline.engine.choice import make_engine
from towline.gateway.service import GatewayService
from towline.rollout_worker.worker import Worker

LETTERS = "abcdefghijklmnopqrstuvwxyz .,:!?\n0123456789ABCDEFGHIJ-é"
VOCABULARY = 61
EOS = 60
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def tokenizer_files() -> dict[str, bytes]:
    words = {letter: index for index, letter in enumerate(LETTERS)}
    words |= {f"<{index}>": index for index in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": CHAT_TEMPLATE}).encode(),
    }


def spell(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


class Scene:
    """The world, its workers and gateways. `seed` first."""

    def __init__(self, world: World, bus_settings: BusSettings) -> None:
        self.world, self._bus_settings = world, bus_settings
        self.workers: dict[str, Running] = {}
        self._gateways: list[tuple[GatewayService, asyncio.Task[None], Bus, httpx.AsyncClient]] = []

    def seed(self, *, text: bool = True) -> None:
        folder = self.world.folder / "base"
        folder.mkdir(parents=True)
        if text:
            for name, data in tokenizer_files().items():
                (folder / name).write_bytes(data)
        self.world.seed()

    def settings(self, *, gateway: dict[str, Any] | None = None, **rollout: Any) -> Settings:
        mine = GatewaySettings(**({"doors": True, "chunk_tokens": 4, "resume_seconds": 10.0} | (gateway or {})))
        given: dict[str, Any] = {"max_context_tokens": 512} | rollout
        if given.get("engine") == "synthetic":
            given["arguments"] = {"vocabulary": VOCABULARY, "mean_tokens": 10_000, "sigma": 0.0} | given.get("arguments", {})
        sampling = SamplingSettings(max_tokens=8, stop_token_ids=(EOS,))
        return self.world.settings(**given).model_copy(update={"gateway": mine, "sampling": sampling})

    async def worker(
        self, name: str = "w", *, version: int = 0, seconds: float = 20.0, gateway: dict[str, Any] | None = None, **rollout: Any
    ) -> Running:
        """Its start may take `seconds`."""
        settings = self.settings(gateway=gateway, **rollout)
        bus = await Bus.connect(self._bus_settings, run=self.world.run, client_name=name)
        worker = Worker(
            name=name, settings=settings, bus=bus, objects=self.world.objects, engine=make_engine(settings.rollout),
            folder=self.world.folder / f"copy-{name}",
        )  # fmt: skip
        self.workers[name] = Running(worker, bus)
        await self.world.served(version, name, seconds)
        return self.workers[name]

    async def gateway(
        self,
        *,
        ready: bool = True,
        tenants: dict[str, TenantSettings] | None = None,
        buffer: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        **gateway: Any,
    ) -> httpx.AsyncClient:
        """A client of a gateway of its own."""
        settings = self.settings(gateway=gateway | ({"tenants": tenants} if tenants else {}), buffer=buffer, **(rollout or {}))
        bus = await Bus.connect(self._bus_settings, run=self.world.run, client_name="gateway")
        service = GatewayService(settings, bus=bus, objects=self.world.objects, replica=f"g{len(self._gateways)}")
        running = asyncio.create_task(service.run())
        limits = httpx.Limits(max_connections=None)
        tls = settings.gateway.tls_certificate
        client = httpx.AsyncClient(
            base_url=f"{'https' if tls else 'http'}://127.0.0.1:{service.port}", timeout=30.0, limits=limits,
            verify=ssl.create_default_context(cafile=tls) if tls else True,
        )  # fmt: skip
        self._gateways.append((service, running, bus, client))

        async def up() -> bool:
            if running.done():
                running.result()
            try:
                return (await client.get("/health")).status_code == (200 if ready else 503)
            except httpx.TransportError:
                return False

        await until(up)
        return client

    @property
    def service(self) -> GatewayService:
        """The last gateway's."""
        return self._gateways[-1][0]

    @property
    def grpc_address(self) -> str:
        """Of the last gateway, which has gateway.grpc_port."""
        return f"127.0.0.1:{self.service.grpc_port}"

    async def close(self) -> None:
        broken: list[BaseException] = []
        for service, running, bus, client in self._gateways:
            await client.aclose()
            service.draining.set()
            running.cancel()
            broken += [one for one in await asyncio.gather(running, return_exceptions=True) if isinstance(one, Exception)]
            await bus.close()
        for worker in self.workers.values():
            if worker.ended.done() and not worker.ended.cancelled() and (error := worker.ended.exception()):
                broken.append(error)
            await worker.kill()
            await worker.bus.close()
        assert not broken, broken


@pytest.fixture
async def scene(bus_settings: BusSettings, tmp_path: Path, run_name: str) -> AsyncIterator[Scene]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    found = Scene(World(bus, tmp_path, run_name), bus_settings)
    yield found
    await found.close()
    await bus.close()


Ask = Callable[..., Awaitable[httpx.Response]]


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """A stream's JSON events; the last is the string DONE where the stream was whole."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield "DONE" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
