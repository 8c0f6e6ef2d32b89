"""A trainer in a process of its own, so that it can be killed. Forked from a process that has torch loaded already."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.context import ForkServerProcess

from towline import faults
from towline.bus.client import Bus
from towline.config import Settings
from towline.errors import TowlineError
from towline.store.objects import open_store
from towline.trainer.figures import Figures
from towline.trainer.run import run_trainer

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["live.trainer.child", "towline.learner.torch_backend", "transformers.models.qwen3.modeling_qwen3"]
)


def start(settings: Settings, fault: str | None = None) -> ForkServerProcess:
    """A running trainer; `fault` as in `TOWLINE_FAULT`. Its exit code is the trainer's, -9 where it was killed."""
    process = _context.Process(target=_main, args=(settings, fault, tempfile.gettempdir()), daemon=True)
    process.start()
    return process


def _main(settings: Settings, fault: str | None, scratch: str) -> None:
    tempfile.tempdir = scratch
    if fault is not None:
        os.environ[faults.VARIABLE] = fault
    try:
        asyncio.run(_run(settings))
    except TowlineError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        sys.exit(error.exit_status)


async def _run(settings: Settings) -> None:
    bus = await Bus.connect(settings.bus, run=settings.run.name, client_name="trainer")
    try:
        await run_trainer(
            settings, bus, open_store(settings.store), replica=settings.run.name, figures=Figures(), draining=asyncio.Event(),
            tell=lambda _: None,
        )  # fmt: skip
    finally:
        await bus.close()
