"""The SGLang engine: a server of our own as a child process, kept on the version that it was told and restarted when it dies.

Nothing that would end the server reaches it. Where it ends all the same it comes back on the last copy that it served, is
proved against that copy where the loader can, and what was being generated goes on from the tokens that had arrived.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from towline.delta.files import load_folder
from towline.delta.state import ModelState, layout_of
from towline.engine.base import Activation, ActivationMode, GenerateRequest, Generation, token_budget
from towline.engine.sglang.activation import Activator
from towline.engine.sglang.checks import check_logprob_kind
from towline.engine.sglang.command import ServerPlan, find_python, options_of
from towline.engine.sglang.generation import Generations
from towline.engine.sglang.scoring import score
from towline.engine.sglang.served import Served
from towline.engine.sglang.supervisor import Supervisor
from towline.engine.sglang.weights import Way, WeightFiles
from towline.errors import EngineError, UsageError

_CPU_TOKENS = 32_768
_WAYS = ("auto", "loader", "overlay", "tensors")
_HELD_BY = {"F32": {"float32"}, "BF16": {"bfloat16", "float32"}, "F16": {"float16", "float32"}}
"""Published dtype -> rollout.dtype that holds it exactly."""
_log = structlog.get_logger("towline.engine")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a started server can do. `seeded`: a seed gives the same tokens again; `proves`: it answers its weights' digest."""

    weights: Way
    seeded: bool
    proves: bool


class SglangEngine:
    """See `towline.engine.base.Engine`. Beyond that, `rollout.arguments`:

    `python` of the environment that has SGLang; `tp` ranks; `weights`: auto (the loader, else overlay folders), loader,
    overlay, or on a CPU tensors; `digest`: prove each activation by a digest over the live weights (lengthens the pause);
    `deterministic`: draw by the samples' seeds, slower; `options` for sglang.launch_server and `environment` for its process;
    `max_total_tokens` of its KV cache; `start_seconds` that a start may take.
    """

    name = "sglang"

    def __init__(
        self,
        *,
        slots: int,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        max_context_tokens: int = 4096,
        python: str = "",
        tp: int = 1,
        weights: Literal["auto"] | Way = "auto",
        digest: bool = True,
        deterministic: bool = False,
        options: Sequence[str] | str = (),
        environment: Mapping[str, str] | None = None,
        max_total_tokens: int | None = None,
        start_seconds: float = 600.0,
    ) -> None:
        if weights not in _WAYS:
            raise UsageError(f"rollout.arguments.weights = {weights!r}: use one of {', '.join(_WAYS)}", code="engine_arguments")
        if weights == "tensors" and device != "cpu":
            raise UsageError(
                f"rollout.arguments.weights = 'tensors' is for tests on a CPU, not for {device!r}; use auto",
                code="engine_arguments",
            )
        if tp < 1:
            raise UsageError(f"rollout.arguments.tp = {tp}: it counts ranks, so at least 1", code="engine_arguments")
        self.slots, self.max_context = slots, max_context_tokens
        self.capabilities: Capabilities | None = None
        self._settings: dict[str, Any] = dict(
            python=find_python(python), device=device, dtype=dtype, threads=threads, slots=slots, tp=tp,
            loader=weights in ("auto", "loader"), deterministic=deterministic, options=options_of(options),
            environment=dict(environment or {}),
        )  # fmt: skip
        self._given_tokens, self._weights, self._digest = max_total_tokens, weights, digest
        self._start_seconds = start_seconds
        self._served = Served()
        self._server: Supervisor | None = None
        self._activator: Activator | None = None
        self._generations: Generations | None = None
        self._running = False

    @property
    def version(self) -> int | None:
        return self._served.version if self._running else None

    @property
    def server_pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    async def start(self, folder: Path, version: int) -> Activation:
        """Raises `UsageError` where the folder or the settings can't be served, `EngineError` where the server doesn't start."""
        if self._server is not None:
            raise UsageError("the engine has been started already; make a new one", code="engine_started")
        served, dtype = self._served, self._settings["dtype"]
        served.state = await asyncio.to_thread(load_folder, folder)
        served.layout = layout_of(served.state)
        for spec in served.layout:
            if dtype not in _HELD_BY.get(spec.dtype, ()):
                raise UsageError(
                    f"tensor {spec.name!r} is published as {spec.dtype}, which a {dtype} engine can't hold exactly; "
                    "set rollout.dtype to the published dtype or a wider one",
                    code="weights_dtype",
                )
        plan = self._plan(folder)
        files = WeightFiles(folder.with_name(f"{folder.name}.sglang"))
        await asyncio.to_thread(files.prepare)
        activator = self._activator = Activator(served, files, wanted=self._weights, ranks=plan.tp, digest=self._digest)
        server = self._server = Supervisor(
            plan, files, folder, served, start_seconds=self._start_seconds, prove=lambda: activator.prove(server)
        )
        self._generations = Generations(server, served, seeded=plan.deterministic)
        served.version = version
        try:
            await server.launch(folder, served.new_label(version, "start"))
            digest = await activator.choose(server)
            await check_logprob_kind(server.client, vocabulary=served.vocabulary, dtype=dtype)
        except BaseException:
            await server.end()
            raise
        self.capabilities = Capabilities(weights=activator.way, seeded=plan.deterministic, proves=digest is not None)
        _log.info("engine_capabilities", weights=activator.way, seeded=plan.deterministic, proves=digest is not None)
        server.watch()
        served.open.set()
        self._running = True
        return Activation(pause_seconds=0.0, engine_digest=digest)

    async def stop(self) -> None:
        self._running = False
        self._served.open.set()
        if self._generations is not None:
            self._generations.end()
        if self._server is not None:
            await self._server.end()

    @property
    def recovering(self) -> str:
        return "" if self._server is None else self._server.recovering

    async def generate(self, request: GenerateRequest) -> Generation:
        self.health()
        assert self._generations is not None
        budget = token_budget(request, vocabulary=self._served.vocabulary, max_context=self.max_context)
        return await self._generations.generate(request, budget)

    def abort(self, request_id: str) -> None:
        if self._generations is not None:
            self._generations.abort(request_id)

    async def activate(self, state: ModelState, version: int, mode: ActivationMode, changed: set[str] | None) -> Activation:
        self.health()
        assert self._server is not None
        assert self._activator is not None
        assert self._generations is not None
        return await self._activator.activate(self._server, self._generations, state, version, mode, changed)

    async def logprobs(self, tokens: list[int]) -> list[float]:
        self.health()
        assert self._server is not None
        served = self._served
        if len(tokens) < 2 or not 0 <= min(tokens) <= max(tokens) < served.vocabulary or len(tokens) > self.max_context:
            raise UsageError(
                f"the probe needs 2 to {self.max_context} tokens below {served.vocabulary}, got {len(tokens)} tokens",
                code="probe_tokens",
            )
        async with served.changing:
            self._server.check()
            return await score(self._server.client, tokens, vocabulary=served.vocabulary, salt=f"{served.label}/probe")

    def health(self) -> None:
        """A server that is being restarted doesn't count as failed: requests wait for it."""
        if self._server is not None:
            self._server.check()
        if not self._running:
            raise EngineError("the SGLang engine isn't running; start one", code="engine_stopped")

    def _plan(self, folder: Path) -> ServerPlan:
        """Vocabulary and context from the model's config.json, and with them how its servers are started."""
        try:
            config = json.loads((folder / "config.json").read_bytes())
            text = config.get("text_config", config)
            self._served.vocabulary = int(text["vocab_size"])
            longest = int(text.get("max_position_embeddings") or self.max_context)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{folder / 'config.json'} can't be read: {error}", code="model_load") from error
        self.max_context = min(self.max_context, longest)
        tokens = self._given_tokens
        if tokens is None and self._settings["device"] == "cpu":
            # Without a limit a CPU server takes most of the machine's memory for its cache.
            tokens = max(2 * self.max_context, min(self.slots * self.max_context, _CPU_TOKENS))
        return ServerPlan(**self._settings, context=self.max_context, max_total_tokens=tokens)
