"""Gets a version into the running server, by the way that it can take, and proves what it holds where that way can.

Nothing is paused before the weights are written to this host's disk. What fails before the first write leaves the old
version serving; after it the live weights may be mixed, so the server is started anew on the last copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import structlog

from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.engine.base import Activation, ActivationMode
from towline.engine.sglang.digests import live_digest
from towline.engine.sglang.generation import Generations
from towline.engine.sglang.served import Served
from towline.engine.sglang.supervisor import Supervisor
from towline.engine.sglang.weights import Outcome, Way, WeightFiles, check_layout
from towline.errors import EngineError, TowlineError, UnavailableError, UsageError

Load: TypeAlias = Callable[[str, bool], Awaitable[Outcome]]
"""(label, whether to flush the caches) -> what came of it. Refused other than by the loader, it may have been half written:
those raise."""
_log = structlog.get_logger("towline.engine")


class Activator:
    """`wanted` is `rollout.arguments.weights`; `choose` settles the way. `ranks` are the tensor-parallel ones."""

    def __init__(self, served: Served, files: WeightFiles, *, wanted: Literal["auto"] | Way, ranks: int, digest: bool) -> None:
        self.way: Way = "overlay"
        self._served, self._files = served, files
        self._wanted, self._ranks, self._digest = wanted, ranks, digest

    async def choose(self, server: Supervisor) -> str | None:
        """The live weights' digest, by the loader. Where it doesn't answer, overlays it is, if that is allowed."""
        if self._wanted == "overlay" or self._wanted == "tensors":
            self.way = self._wanted
            return None
        self.way = "loader"
        outcome = await self._by_loader(server, self._served.state, None, None, flush=False)
        if outcome.error is None:
            return await _digest(outcome, self._served.state)
        if self._wanted == "loader":
            raise UsageError(
                f"the SGLang server can't take weights by Towline's loader: {outcome.error}; "
                "set rollout.arguments.weights to overlay",
                code="weights_loader",
            )
        _log.warning("weights_by_overlay", reason=outcome.error)
        self.way = "overlay"
        return None

    async def prove(self, server: Supervisor) -> None:
        """`EngineError` where the server says that it holds other weights than the served copy."""
        if self.way != "loader":
            return
        served = self._served
        outcome = await self._by_loader(server, served.state, None, None, flush=False)
        reason = outcome.error
        if reason is None and (found := await _digest(outcome, served.state)) is not None:
            expected = await asyncio.to_thread(lambda: model_digest(tensor_digests(served.state)))
            reason = None if found == expected else f"its live weights have the digest {found}, not {expected}"
        if reason is not None:
            raise EngineError(f"the SGLang server doesn't hold version {served.version}: {reason}", code="engine_digest")

    async def activate(
        self, server: Supervisor, generations: Generations, state: ModelState, version: int, mode: ActivationMode,
        changed: set[str] | None,
    ) -> Activation:  # fmt: skip
        served = self._served
        async with served.changing:
            server.check()
            # A version that changed nothing still needs its label in the server, which comes with a load.
            names = check_layout(served.layout, state, changed) or [served.layout[0].name]
            load = await asyncio.to_thread(self._prepared, server, state, names)
            served.open.clear()
            try:
                await generations.settle(mode)
                return await self._replace(server, state, version, mode, load)
            finally:
                served.open.set()

    async def _replace(self, server: Supervisor, state: ModelState, version: int, mode: ActivationMode, load: Load) -> Activation:
        served = self._served
        for again in (True, False):
            label = served.new_label(version, "in_place" if mode == "in_place" else "retract")
            began = time.perf_counter()
            outcome = await _written(server, mode, label, load)
            pause = time.perf_counter() - began
            if outcome.error is None:
                served.state, served.version, served.label = state, version, label
                return Activation(pause_seconds=pause, engine_digest=await _digest(outcome, state))
            if outcome.written:
                await server.restart(f"version {version}: {outcome.error}")
            # A server that went away may have done so for another reason than this version.
            if not (outcome.lost and again):
                break
        raise EngineError(f"SGLang didn't take version {version}: {outcome.error}", code="weights_load")

    def _prepared(self, server: Supervisor, state: ModelState, names: Sequence[str]) -> Load:
        """Puts the tensors where the way takes them from; what is left is to be done while generation pauses. Blocks."""
        if self.way == "tensors":
            from towline.engine.sglang.torch_tensors import payload

            body = payload(state, names)

            async def by_tensors(label: str, flush: bool) -> Outcome:
                await server.client.load_tensors(body, ranks=self._ranks, label=label, flush=flush)
                return Outcome(None, written=True)

            return by_tensors
        folder = self._files.write_changed(state, names)

        async def by_overlay(label: str, flush: bool) -> Outcome:
            await server.client.load_folder(str(folder), label=label, flush=flush)
            return Outcome(None, written=True)

        async def by_loader(label: str, flush: bool) -> Outcome:
            return await self._by_loader(server, state, folder, label, flush=flush)

        return by_loader if self.way == "loader" else by_overlay

    async def _by_loader(
        self, server: Supervisor, state: ModelState, folder: Path | None, label: str | None, *, flush: bool
    ) -> Outcome:
        return await self._files.load(
            server.client, state, folder, ranks=self._ranks, label=label, flush=flush, digest=self._digest
        )


async def _written(server: Supervisor, mode: ActivationMode, label: str, load: Load) -> Outcome:
    """Pause, load, go on; where a write began and failed, the server stays paused."""
    kept = mode == "in_place"
    try:
        await server.client.pause("in_place" if kept else "retract")
        outcome = await load(label, not kept)
        if outcome.error is None or not outcome.written:
            await server.client.resume()
    except TowlineError as error:
        return Outcome(error.message, written=True, lost=isinstance(error, UnavailableError))
    return outcome


async def _digest(outcome: Outcome, state: ModelState) -> str | None:
    ranks = outcome.ranks
    return None if ranks is None else await asyncio.to_thread(lambda: live_digest(ranks, state))
