"""A run that the publisher serves: settings, what the trainer would send, and a publisher in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from live.store.models import Run, stepped
from towline.bus.client import Bus
from towline.bus.topology import POLICY
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.codec import encode
from towline.contract.policy import PolicyMessage, Staged, decode_policy
from towline.store.manifest import Manifest


def settings_for(run: str, bus: BusSettings, store: StoreSettings, **publisher: Any) -> Settings:
    """Short polls; the sections that a publisher doesn't look at hold whatever is allowed."""
    return Settings.model_validate(
        {
            "run": {"name": run, "steps": 3},
            "bus": bus.model_copy(update={"budget_bytes": 64 << 20}).model_dump(),
            "store": store.model_dump(),
            "model": {"source": "unused"},
            "prompts": {"source": "unused:unused"},
            "sampling": {"max_tokens": 1},
            "reward": {"function": "unused:unused"},
            "publisher": {"poll_seconds": 0.05} | publisher,
        }
    )


def write_config(path: Path, settings: Settings) -> None:
    """The settings as the TOML file that a process reads."""

    def literal(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, int | float) else f'"{value}"'

    sections: dict[str, dict[str, Any]] = {
        "run": {"name": settings.run.name, "steps": settings.run.steps},
        "bus": {
            "url": settings.bus.url,
            "budget_bytes": settings.bus.budget_bytes,
            "connect_timeout_seconds": settings.bus.connect_timeout_seconds,
        },
        "store": {
            "url": settings.store.url,
            "endpoint": settings.store.endpoint,
            "access_key": settings.store.access_key,
            "secret_key": settings.store.secret_key.get_secret_value(),
        },
        "model": {"source": "unused"},
        "prompts": {"source": "unused:unused"},
        "sampling": {"max_tokens": 1},
        "reward": {"function": "unused:unused"},
        "publisher": settings.publisher.model_dump(),
    }
    lines = []
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {literal(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines))


def staged_of(manifest: Manifest) -> Staged:
    return Staged(
        epoch=manifest.epoch,
        base=manifest.base,
        write_id=manifest.write_id,
        folder=manifest.folder,
        manifest_digest=manifest.digest,
    )


async def send(bus: Bus, staged: Staged) -> None:
    """As the trainer does, again and again until the entry stands or a refusal does."""
    await bus.publish(bus.topology.policy("staged"), encode(staged))


def next_staged(run: Run) -> tuple[Staged, Any]:
    """The next step on the head, staged but not announced, and its state."""
    run.log.refresh()
    epoch = run.log.lineage.newest_epoch
    assert epoch is not None
    head = run.log.lineage.epoch_head(epoch)
    state = stepped(run.states[head], run.log.next_number)
    return staged_of(run.stage(state)), state


async def said(bus: Bus) -> list[PolicyMessage]:
    """Every verdict in the stream, in order."""
    subjects = [bus.topology.policy("committed"), bus.topology.policy("refused")]
    return [decode_policy(message.data) async for message in bus.read(POLICY, subjects=subjects, follow=False)]


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def publisher_process(config: Path) -> tuple[int | None, str]:
    """`python -m towline.publisher` to its end: exit code, standard error."""
    async with _process("-m", "towline.publisher", "--config", str(config)) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode, stderr.decode()


class Lives:
    """Publisher processes one after another; see lives.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = 0

    async def start(self, fault: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(fault.encode() + b"\n")
        self.pid = await self._number()

    async def end(self) -> int:
        """The exit code, negative for a signal."""
        code = await self._number()
        self.pid = 0
        return code

    async def _number(self) -> int:
        assert self._process.stdout is not None
        return int(await asyncio.wait_for(self._process.stdout.readline(), 20))


@asynccontextmanager
async def publisher_lives(config: Path) -> AsyncIterator[Lives]:
    """The last life is killed at the end if it's still there."""
    async with _process(str(Path(__file__).with_name("lives.py")), str(config)) as process:
        lives = Lives(process)
        try:
            yield lives
        finally:
            if lives.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(lives.pid, signal.SIGKILL)
