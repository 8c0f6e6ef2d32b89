"""The SGLang engine: a server of our own as a child process, kept on the version that it was told and restarted when it dies.

Nothing that would end the server reaches it. Where it ends all the same it comes back on the last copy that it served, is
proved against that copy where the loader can, and what was being generated goes on from the tokens that had arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from towline.contract.task import Cut
from towline.delta.files import load_folder
from towline.delta.state import ModelState, TensorSpec, layout_of, model_digest, tensor_digests
from towline.engine.base import Activation, ActivationMode, GenerateRequest, Generation, token_budget
from towline.engine.sglang.checks import check_logprob_kind
from towline.engine.sglang.client import SglangClient
from towline.engine.sglang.server import HOST, ServerPlan, ServerProcess, find_python, options_of
from towline.engine.sglang.stream import Label, Run
from towline.engine.sglang.weights import Outcome, Way, WeightFiles, check_layout
from towline.errors import EngineError, TowlineError, UnavailableError, UsageError

_READY_POLL_SECONDS = 0.25
_WATCH_SECONDS = 5.0
_SILENT_CHECKS = 6
"""Unanswered checks in a row before a server that still runs counts as dead."""
_FIRST_TOKEN_SECONDS = 10.0
_ABORT_RETRY_SECONDS, _ABORT_TRIES = 0.5, 20
_MOST_STREAMS = 20
_RESTARTS, _RESTART_WINDOW_SECONDS = 4, 600.0
_CPU_TOKENS = 32_768
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

    `python` of the environment that has SGLang; `tp` ranks; `weights`: auto (the loader, else overlay folders), loader or
    overlay; `digest`: prove each activation by a digest over the live weights (one rank; lengthens the pause);
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
        weights: Literal["auto", "loader", "overlay"] = "auto",
        digest: bool = True,
        deterministic: bool = False,
        options: Sequence[str] | str = (),
        environment: Mapping[str, str] | None = None,
        max_total_tokens: int | None = None,
        start_seconds: float = 600.0,
    ) -> None:
        if weights not in ("auto", "loader", "overlay"):
            raise UsageError(f"rollout.arguments.weights = {weights!r}: use auto, loader or overlay", code="engine_arguments")
        self.slots, self.max_context = slots, max_context_tokens
        self.capabilities: Capabilities | None = None
        self._settings = dict(
            python=find_python(python), device=device, dtype=dtype, threads=threads, slots=slots, tp=tp,
            loader=weights != "overlay", deterministic=deterministic, options=options_of(options),
            environment=dict(environment or {}),
        )  # fmt: skip
        self._given_tokens, self._weights, self._digest, self._tp = max_total_tokens, weights, digest, tp
        self._seeded, self._dtype, self._start_seconds = deterministic, dtype, start_seconds
        self._plan: ServerPlan | None = None
        self._way: Way = "overlay"
        self._files: WeightFiles | None = None
        self._folder = Path()
        self._layout: list[TensorSpec] = []
        self._vocabulary = 0
        self._state: ModelState = {}
        self._version: int | None = None
        self._labels: dict[str, Label] = {}
        self._label = ""
        self._process: ServerProcess | None = None
        self._client: SglangClient | None = None
        self._runs: dict[str, Run] = {}
        self._streams: set[Run] = set()
        self._open = asyncio.Event()
        """Whether streams may begin."""
        self._changing = asyncio.Lock()
        """Held by whoever changes the weights or the process."""
        self._restarted: list[float] = []
        self._failure: EngineError | None = None
        self._ending = False
        self._watcher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int | None:
        return self._version if self._watcher is not None else None

    @property
    def server_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, folder: Path, version: int) -> Activation:
        """Raises `UsageError` where the folder or the settings can't be served, `EngineError` where the server doesn't start."""
        if self._process is not None:
            raise UsageError("the engine has been started already; make a new one", code="engine_started")
        self._folder = folder
        self._state = await asyncio.to_thread(load_folder, folder)
        self._layout = layout_of(self._state)
        self._read_config()
        for spec in self._layout:
            if self._dtype not in _HELD_BY.get(spec.dtype, ()):
                raise UsageError(
                    f"tensor {spec.name!r} is published as {spec.dtype}, which a {self._dtype} engine can't hold exactly; "
                    "set rollout.dtype to the published dtype or a wider one",
                    code="weights_dtype",
                )
        self._files = WeightFiles(folder.with_name(f"{folder.name}.sglang"))
        await asyncio.to_thread(self._files.prepare)
        self._version = version
        try:
            await self._launch(folder, self._new_label(version, "start"))
            digest = await self._choose_way()
            assert self._client is not None
            await check_logprob_kind(self._client, vocabulary=self._vocabulary, dtype=self._dtype)
        except BaseException:
            await self._end_server()
            raise
        self.capabilities = Capabilities(weights=self._way, seeded=self._seeded, proves=digest is not None)
        _log.info("engine_capabilities", weights=self._way, seeded=self._seeded, proves=digest is not None)
        self._watcher = asyncio.create_task(self._watch(), name="sglang-watch")
        self._open.set()
        return Activation(pause_seconds=0.0, engine_digest=digest)

    async def stop(self) -> None:
        self._ending = True
        self._open.set()
        if self._watcher is not None:
            self._watcher.cancel()
        for run in self._runs.values():
            run.aborted.set()
        await self._end_server()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.health()
        budget = token_budget(request, vocabulary=self._vocabulary, max_context=self.max_context)
        if request.request_id in self._runs:
            raise UsageError(f"request {request.request_id} runs already; give each an id of its own", code="request_twice")
        run = self._runs[request.request_id] = Run(request, budget)
        try:
            while True:
                await self._admitted(run)
                if run.aborted.is_set():
                    return run.generation("abort")
                self._check_failed()
                reason = await self._stream(run)
                if (finish := run.finished(reason)) is not None:
                    return run.generation(finish)
                if run.streams >= _MOST_STREAMS:
                    raise EngineError(
                        f"request {request.request_id}: its stream broke {run.streams} times", code="engine_unreachable"
                    )
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise
        finally:
            del self._runs[request.request_id]

    def abort(self, request_id: str) -> None:
        if (run := self._runs.get(request_id)) is not None and not run.aborted.is_set():
            run.aborted.set()
            self._abort_stream(run)

    async def activate(self, state: ModelState, version: int, mode: ActivationMode, changed: set[str] | None) -> Activation:
        self.health()
        assert self._files is not None
        async with self._changing:
            self._check_failed()
            names = check_layout(self._layout, state, changed) or [self._layout[0].name]
            folder = await asyncio.to_thread(self._files.write_changed, state, names)
            assert folder is not None
            self._open.clear()
            try:
                await self._settle(mode)
                return await self._replace(state, version, mode, folder)
            finally:
                self._open.set()

    async def logprobs(self, tokens: list[int]) -> list[float]:
        self.health()
        if len(tokens) < 2 or not 0 <= min(tokens) <= max(tokens) < self._vocabulary or len(tokens) > self.max_context:
            raise UsageError(
                f"the probe needs 2 to {self.max_context} tokens below {self._vocabulary}, got {len(tokens)} tokens",
                code="probe_tokens",
            )
        async with self._changing:
            self._check_failed()
            assert self._client is not None
            try:
                answer = await self._client.generate_once(
                    {
                        "input_ids": tokens, "return_logprob": True, "logprob_start_len": 0,
                        "token_ids_logprob": [self._vocabulary - 1], "extra_key": f"{self._label}/probe",
                        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
                    }
                )  # fmt: skip
            except UnavailableError as error:
                raise EngineError(error.message, code="engine_unreachable") from error
        meta, final = answer["meta_info"], self._vocabulary - 1
        rows, finals = meta["input_token_logprobs"][1:], meta["input_token_ids_logprobs"][1:]
        # SGLang scores the vocabulary's last token as token 0 (it takes it for padding), so that one is asked for by name.
        scored = [extra[0] if token == final else row for token, row, extra in zip(tokens[1:], rows, finals, strict=True)]
        if [int(row[1]) for row in scored] != tokens[1:]:
            raise EngineError("SGLang scored other tokens than the probe's", code="engine_answer")
        return [float(row[0]) for row in scored]

    def health(self) -> None:
        """A server that is being restarted doesn't count as failed: requests wait for it."""
        self._check_failed()
        if self._watcher is None or self._ending:
            raise EngineError("the SGLang engine isn't running; start one", code="engine_stopped")

    # Streams

    async def _admitted(self, run: Run) -> None:
        """Until streams may begin, or the run is aborted."""
        if not self._open.is_set():
            waits = [asyncio.ensure_future(self._open.wait()), asyncio.ensure_future(run.aborted.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _stream(self, run: Run) -> str:
        """One stream to its end; why it ended, "lost" where the connection or the server went away."""
        assert self._client is not None
        run.started = run.started or time.perf_counter()
        last: dict[str, Any] | None = None
        certain: dict[str, Any] | None = None
        reason: dict[str, Any] | None = None
        label = self._label
        self._streams.add(run)
        try:
            async for answer in self._client.generate(run.body(label, seeded=self._seeded)):
                reason = answer["meta_info"].get("finish_reason")
                run.began = True
                # An abort's last answer may hold less than the one before it.
                if last is None or len(answer.get("output_ids") or ()) >= len(last.get("output_ids") or ()):
                    last = answer
                    if self._open.is_set() and self._label == label:
                        certain = answer
        except UnavailableError:
            # The server's watcher sees to it; until then each try ends here.
            await asyncio.sleep(_READY_POLL_SECONDS)
            reason = None
        finally:
            self._streams.discard(run)
            run.rid = None
        if last is not None and "weight_versions" in last["meta_info"]:
            run.take(last, self._labels)
        elif certain is not None:
            # Only a stream's last answer has the spans. Of one that broke, what came before any change of the weights counts.
            count = len(certain.get("output_ids") or ())
            spans = [{"version": label, "start": 0, "end": count}]
            run.take(certain | {"meta_info": certain["meta_info"] | {"weight_versions": spans}}, self._labels)
        if reason is None:
            return "lost"
        return str(reason["type"]) if reason["type"] != "abort" else f"abort: {reason.get('message')}"

    def _abort_stream(self, run: Run) -> None:
        if (rid := run.rid) is not None:
            task = asyncio.create_task(self._insist_abort(run, rid), name="sglang-abort")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _insist_abort(self, run: Run, rid: str) -> None:
        """An abort that overtakes its request finds nothing to abort: repeat it until the stream has ended."""
        for attempt in range(_ABORT_TRIES):
            if self._client is None or self._ending or (attempt and run.rid != rid):
                return
            with contextlib.suppress(TowlineError):
                await self._client.abort(rid)
            await asyncio.sleep(_ABORT_RETRY_SECONDS)

    # Weights

    async def _settle(self, mode: ActivationMode) -> None:
        """Before the pause: `drain` lets streams end; `in_place` lets each get its first token, so that none begins on new
        weights with a cache of the old ones."""
        if mode == "drain":
            # Nothing else wakes this but the server's end, so it looks now and then.
            while self._streams and self._process is not None and self._process.alive:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        elif mode == "in_place":
            until = time.monotonic() + _FIRST_TOKEN_SECONDS
            while (late := [run for run in self._streams if not run.began]) and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for run in late:
                run.again = True
                self._abort_stream(run)

    async def _replace(self, state: ModelState, version: int, mode: ActivationMode, folder: Path) -> Activation:
        assert self._client is not None
        label = self._new_label(version, "in_place" if mode == "in_place" else "retract")
        began = time.perf_counter()
        try:
            await self._client.pause("in_place" if mode == "in_place" else "retract")
            outcome = await self._load(state, folder, label, flush=mode != "in_place")
            if outcome.error is None or not outcome.written:
                await self._client.resume()
        except TowlineError as error:
            outcome = Outcome(error.message, written=True, digest=None)
        pause = time.perf_counter() - began
        if outcome.error is not None:
            if outcome.written:
                await self._restart(f"version {version}: {outcome.error}")
            raise EngineError(f"SGLang didn't take version {version}: {outcome.error}", code="weights_load")
        self._state, self._version, self._label = state, version, label
        return Activation(pause_seconds=pause, engine_digest=outcome.digest)

    async def _load(self, state: ModelState, folder: Path | None, label: str | None, *, flush: bool) -> Outcome:
        """By the way of this server. An overlay that was refused may have been half written."""
        assert self._files is not None
        assert self._client is not None
        if self._way == "loader":
            return await self._files.load(
                self._client, state, folder, ranks=self._tp, label=label, flush=flush, digest=self._digest
            )
        assert folder is not None
        assert label is not None
        await self._client.load_folder(str(folder), label=label, flush=flush)
        return Outcome(None, written=True, digest=None)

    async def _choose_way(self) -> str | None:
        """Ask the loader for the live weights' digest; where it doesn't answer, overlays it is, if that is allowed."""
        assert self._files is not None
        assert self._client is not None
        if self._weights == "overlay":
            return None
        self._way = "loader"
        outcome = await self._load(self._state, None, None, flush=False)
        if outcome.error is None:
            return outcome.digest
        if self._weights == "loader":
            raise UsageError(
                f"the SGLang server can't take weights by Towline's loader: {outcome.error}; "
                "set rollout.arguments.weights to overlay",
                code="weights_loader",
            )
        _log.warning("weights_by_overlay", reason=outcome.error)
        self._way = "overlay"
        return None

    def _new_label(self, version: int, cut: Cut) -> str:
        label = f"{version}-{len(self._labels)}"
        self._labels[label] = Label(version, cut)
        return label

    # The process

    async def _launch(self, folder: Path, label: str) -> None:
        """Start a server on the folder and wait until it answers."""
        assert self._plan is not None
        assert self._files is not None
        log = self._files.directory / "server.log"
        self._process = process = await ServerProcess.start(self._plan, folder, label, log=log, command_file=self._files.command)
        if self._client is not None:
            await self._client.close()
        self._client = SglangClient(f"http://{HOST}:{process.port}", connections=self.slots + 8)
        until = time.monotonic() + self._start_seconds
        while True:
            with contextlib.suppress(TowlineError):
                await self._client.model_info()
                break
            if not process.alive:
                raise process.failure("ended while it started")
            if time.monotonic() > until:
                await process.end()
                raise process.failure(f"didn't start within {self._start_seconds:g} s")
            await asyncio.sleep(_READY_POLL_SECONDS)
        self._label = label

    async def _watch(self) -> None:
        """Restart the server when it ends, or when it is silent for too long."""
        while True:
            process, silent = self._process, 0
            assert process is not None
            while process.alive and silent < _SILENT_CHECKS:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        await process.wait()
                if process.alive and self._process is process and self._client is not None:
                    try:
                        await self._client.model_info()
                        silent = 0
                    except TowlineError:
                        silent += 1
                if self._process is not process:
                    break
            async with self._changing:
                if self._process is not process or self._failure is not None:
                    if self._failure is not None:
                        return
                    continue
                self._open.clear()
                try:
                    await self._restart("it ended by itself" if not process.alive else "it didn't answer")
                except TowlineError as error:
                    _log.error("engine_failed", reason=error.message)
                    return
                finally:
                    self._open.set()

    async def _restart(self, why: str) -> None:
        """A new server on the copy that was served last, proved where it can be. Sets the failure where that isn't to be had."""
        assert self._files is not None
        assert self._process is not None
        _log.warning("engine_restarts", version=self._version, reason=why)
        try:
            now = time.monotonic()
            self._restarted = [*(at for at in self._restarted if now - at < _RESTART_WINDOW_SECONDS), now]
            if len(self._restarted) > _RESTARTS:
                raise self._process.failure(f"had to be started {len(self._restarted)} times")
            await self._process.end()
            folder = await asyncio.to_thread(self._files.write_full, self._folder, self._state)
            assert self._version is not None
            await self._launch(folder, self._new_label(self._version, "retract"))
            if self._way == "loader":
                outcome = await self._load(self._state, None, None, flush=False)
                expected = await asyncio.to_thread(lambda: model_digest(tensor_digests(self._state)))
                if outcome.error is not None or outcome.digest not in (None, expected):
                    reason = outcome.error or "its digest differs"
                    raise EngineError(
                        f"the restarted SGLang server doesn't hold version {self._version}: {reason}",
                        code="engine_digest",
                    )
        except TowlineError as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(error.message, code="engine_failed")
            raise self._failure from error
        _log.info("engine_restarted", version=self._version, seconds=round(time.monotonic() - now, 1))

    async def _end_server(self) -> None:
        if self._process is not None:
            await self._process.end()
        if self._client is not None:
            await self._client.close()

    def _check_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _read_config(self) -> None:
        """Vocabulary and context from the model's config.json, and with them the plan."""
        try:
            config = json.loads((self._folder / "config.json").read_bytes())
            text = config.get("text_config", config)
            self._vocabulary = int(text["vocab_size"])
            longest = int(text.get("max_position_embeddings") or self.max_context)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{self._folder / 'config.json'} can't be read: {error}", code="model_load") from error
        self.max_context = min(self.max_context, longest)
        tokens = self._given_tokens
        if tokens is None and self._settings["device"] == "cpu":
            # Without a limit a CPU server takes most of the machine's memory for its cache.
            tokens = max(2 * self.max_context, min(self.slots * self.max_context, _CPU_TOKENS))
        self._plan = ServerPlan(**self._settings, context=self.max_context, max_total_tokens=tokens)  # type: ignore[arg-type]
