"""The trainer as a process, with the real publisher: readiness, status, drain, hand-over, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from live.trainer.harness import Stage, expected_digest, on_stage
from support.waiting import until
from towline.bus.topology import STATUS
from towline.config import Settings
from towline.contract.entries import OpenEntry

Make = Callable[..., Settings]


def write_toml(path: Path, settings: Settings) -> Path:
    """What the processes need of the settings; JSON's values are TOML's."""
    lines = []
    for section, values in settings.model_dump(mode="json", exclude_unset=True).items():
        lines.append(f"[{section}]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict | type(None)))
    path.write_text("\n".join(lines))
    return path


@contextlib.asynccontextmanager
async def process(service: str, config: Path, replica: str = "0") -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"towline.{service}", "--config", str(config), "--replica", replica,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def status(stage: Stage, replica: str = "0") -> dict[str, Any]:
    data = await stage.bus.kv(STATUS).get(f"trainer.{replica}")
    found: dict[str, Any] = msgspec.json.decode(data) if data else {"ready": None, "reason": "", "figures": {}}
    return found


async def test_it_drains_hands_over_and_ends_with_the_run(make_settings: Make, model_folder: Path, tmp_path: Path) -> None:
    settings = make_settings(run={"steps": 24}, buffer={"max_staleness": 1}, trainer={"checkpoint_every": 10})
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings, publisher=False) as stage, process("publisher", config), process("trainer", config) as first:
        stage.buffer.hold_at = 4

        def depth() -> int:
            versions = stage.versions()
            return versions[-1].depth if versions else 0

        await until(lambda: depth() == 4, 60)
        found = await status(stage)
        async with httpx.AsyncClient(timeout=10) as client:
            answer = await client.get(f"http://127.0.0.1:{found['port']}/readyz")
        assert (answer.status_code, answer.json()) == (200, {"ready": True, "reason": ""})
        async with process("trainer", config, "1") as second:

            async def on_standby() -> bool:
                return str((await status(stage, "1"))["reason"]).startswith("standby")

            await until(on_standby, 60)
            # It has loaded the learner's code, without the lease: a take-over needn't wait for that.
            await until(lambda: "libtorch" in Path(f"/proc/{second.pid}/maps").read_text(), 60)
            assert await on_standby()
            stage.buffer.hold_at = 10
            await until(lambda: depth() > 4, 60)
            first.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(first.wait(), settings.service.drain_seconds + 2) == 0
            stage.buffer.hold_at = None
            assert await asyncio.wait_for(second.wait(), 60) == 0
            figures = (await status(stage, "1"))["figures"]
        versions = stage.versions()
    assert versions[-1].depth == 24
    assert versions[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 24)
    opened = [entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
    assert len(opened) == 2
    assert figures["epoch"] == opened[1].number
    assert opened[1].depth <= figures["depth"] <= 24
    assert {"loss", "reward_mean", "learning_rate", "idle_seconds", "train_seconds", "encode_seconds", "upload_seconds"} <= set(
        figures
    )
    assert figures["model_bytes"] == versions[-1].model_bytes


async def test_a_missing_model_is_one_line_and_exit_2(make_settings: Make, tmp_path: Path) -> None:
    settings = make_settings(model={"source": str(tmp_path / "absent")})
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings, publisher=False), process("trainer", config) as trainer:
        _, errors = await asyncio.wait_for(trainer.communicate(), 60)
    assert trainer.returncode == 2
    assert errors.decode().splitlines() == [f"model_missing: model.source = {str(tmp_path / 'absent')!r}: no such folder"]
