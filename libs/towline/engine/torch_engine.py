"""The built-in engine: continuous batching of a Hugging Face causal LM, on a thread of its own.

The step thread owns model and batch; everything else hands it commands, which it runs between two steps. Requests that
begin in one turn of the event loop reach it together, and what finishes in one step goes back in one call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from towline.delta.state import ModelState
from towline.engine.base import Activation, ActivationMode, GenerateRequest, Generation, Progress, token_budget
from towline.engine.priority import background_executor
from towline.engine.torch_batch import Sequence, TorchBatch
from towline.engine.torch_weights import LiveWeights, Patch, folder_layout, own_memory
from towline.errors import EngineError, TowlineError, UsageError

T = TypeVar("T")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STOP_SECONDS = 30.0
_loading = threading.Lock()
"""transformers changes the process's defaults while it loads a model: two at a time leave each other's weights unset."""


class TorchEngine:
    """See `towline.engine.base.Engine`. `prefill_tokens` bounds the padded tokens of one prefill pass, and so its memory.

    Where a version changes more than `swap_share` of a tensor (default: 0.005 on a CPU, 0.1 elsewhere), its new memory is filled
    beside the live one, which shortens the pause and takes memory for those tensors until it ends; 1.0 never does that.
    """

    name = "torch"

    def __init__(
        self,
        *,
        slots: int,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        max_context_tokens: int = 4096,
        prefill_tokens: int = 16_384,
        swap_share: float | None = None,
    ) -> None:
        self.slots = slots
        self.max_context = max_context_tokens
        self._device, self._dtype, self._threads = torch.device(device), _DTYPES[dtype], threads
        self._prefill_tokens, self._swap_share = prefill_tokens, swap_share
        self._vocabulary = 0
        self._weights: LiveWeights | None = None
        self._batch: TorchBatch | None = None
        self._failure: EngineError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._activating = asyncio.Lock()
        self._background = background_executor("engine-weights")
        self._tickets: dict[str, Sequence] = {}
        self._outbox: list[Sequence] = []
        self._wake = threading.Condition()
        # Under the condition: what the step thread takes between steps.
        self._arrived: deque[Sequence] = deque()
        self._aborts: list[Sequence] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._ending = False
        self._left = False
        """The step thread takes nothing any more."""
        # The step thread's alone.
        self._waiting: deque[Sequence] = deque()
        self._draining: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int | None:
        return self._batch.version if self._batch is not None and self._thread is not None else None

    async def start(self, folder: Path, version: int) -> Activation:
        """Raises `UsageError` where the folder or the dtype can't be served."""
        if self._thread is not None:
            raise UsageError("the engine has been started already; make a new one", code="engine_started")
        self._loop = asyncio.get_running_loop()
        digest = await asyncio.to_thread(self._load, folder, version)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return Activation(pause_seconds=0.0, engine_digest=digest)

    async def stop(self) -> None:
        self._send()  # what was asked for a moment ago ends as all the rest does
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._background.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.health()
        assert self._loop is not None
        budget = token_budget(request, vocabulary=self._vocabulary, max_context=self.max_context)
        if request.request_id in self._tickets:
            raise UsageError(f"request {request.request_id} runs already; give each an id of its own", code="request_twice")
        future: asyncio.Future[Generation] = self._loop.create_future()
        sequence = Sequence(request, budget, future, time.perf_counter())
        self._tickets[request.request_id] = sequence
        if not self._outbox:
            self._loop.call_soon(self._send)
        self._outbox.append(sequence)
        try:
            return await future
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise
        finally:
            del self._tickets[request.request_id]

    def abort(self, request_id: str) -> None:
        if (sequence := self._tickets.get(request_id)) is not None:
            self._send()
            with self._wake:
                self._aborts.append(sequence)
                self._wake.notify()

    async def activate(self, state: ModelState, version: int, mode: ActivationMode, changed: set[str] | None) -> Activation:
        self.health()
        assert self._weights is not None
        async with self._activating:
            patches = await self._beside(self._prepare, state, changed)
            pause = await self._between_steps(lambda: self._apply(patches, version, mode), drain=mode == "drain")
            # The weights hold still until the next activation, so the digest needn't lengthen the pause.
            digest = await self._beside(self._digest)
        return Activation(pause_seconds=pause, engine_digest=digest)

    async def logprobs(self, tokens: list[int]) -> list[float]:
        self.health()
        assert self._batch is not None
        if len(tokens) < 2 or not 0 <= min(tokens) <= max(tokens) < self._vocabulary or len(tokens) > self.max_context:
            raise UsageError(
                f"the probe needs 2 to {self.max_context} tokens below {self._vocabulary}, got {len(tokens)} tokens",
                code="probe_tokens",
            )
        batch = self._batch
        return await self._between_steps(lambda: batch.logprobs(tokens))

    def health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._thread is None or not self._thread.is_alive() or self._ending:
            raise EngineError("the torch engine isn't running; start one", code="engine_stopped")

    # The event loop's side

    def _send(self) -> None:
        sent, self._outbox = self._outbox, []
        with self._wake:
            if not self._left:
                self._arrived.extend(sent)
                self._wake.notify()
                return
        failure = self._failure or EngineError("the torch engine isn't running; start one", code="engine_stopped")
        _settle([(sequence.ticket, failure) for sequence in sent])

    async def _between_steps(self, work: Callable[[], T], *, drain: bool = False) -> T:
        """Run `work` on the step thread between two steps; with `drain` once nothing runs, and nothing starts before it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = work()
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, [(future, error)])
                raise
            loop.call_soon_threadsafe(_settle, [(future, result)])

        def wait_for_room() -> None:
            self._draining = command

        with self._wake:
            self._commands.append(wait_for_room if drain else command)
            self._wake.notify()
        while not future.done():
            # The thread may die of something else, with the command still in its queue.
            await asyncio.wait([future], timeout=1.0)
            if not future.done():
                self.health()
        return future.result()

    # The step thread's side

    def _load(self, folder: Path, version: int) -> str:
        layout = folder_layout(folder)
        disable_progress_bar()
        try:
            with _loading:
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=self._dtype, attn_implementation="sdpa", local_files_only=True
                )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"{folder}: transformers can't load it as a causal LM: {reason}", code="model_load") from error
        model = model.to(self._device).eval().requires_grad_(False)
        own_memory(model)
        config = model.config.get_text_config()
        self.max_context = min(self.max_context, int(getattr(config, "max_position_embeddings", None) or self.max_context))
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        with torch.inference_mode():
            self._weights = LiveWeights(model, layout, self._swap_share)
            self._batch = TorchBatch(model, self.slots, self._prefill_tokens, version)
            return self._weights.digest()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:  # noqa: BLE001  (the thread's end: whoever waits must learn of it)
            self._failure = EngineError(f"the torch engine failed: {type(error).__name__}: {error}", code="engine_failed")
            self._failure.__cause__ = error
        self._leave()

    def _turn(self) -> bool:
        """Commands, aborts, admission, one step. False ends the thread."""
        batch = self._batch
        assert batch is not None
        with self._wake:
            while (
                not (self._arrived or self._commands or self._aborts or self._waiting or batch.running or self._draining)
                and not self._ending
            ):
                self._wake.wait()
            if self._ending:
                return False
            self._waiting.extend(self._arrived)
            aborts, commands = self._aborts, self._commands
            self._arrived, self._aborts, self._commands = deque(), [], deque()
        for command in commands:
            command()
        if self._draining is not None and not batch.running:
            command, self._draining = self._draining, None
            command()
        for sequence in aborts:
            self._abort(batch, sequence)
        if self._waiting and batch.free and self._draining is None:
            batch.admit([self._waiting.popleft() for _ in range(min(len(self._waiting), batch.free))])
        if batch.running:
            batch.step()
        self._deliver(batch)
        return True

    def _apply(self, patches: list[Patch], version: int, mode: ActivationMode) -> float:
        assert self._batch is not None
        assert self._weights is not None
        began = time.perf_counter()
        self._weights.write(patches)
        self._batch.version = version
        if self._batch.running:
            self._batch.cut("retract" if mode == "retract" else "in_place")
            if mode == "retract":
                self._batch.retract()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    async def _beside(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run it while the engine generates, at low priority."""
        return await asyncio.get_running_loop().run_in_executor(self._background, work, *arguments)

    def _prepare(self, state: ModelState, changed: set[str] | None) -> list[Patch]:
        assert self._weights is not None
        with torch.no_grad():  # what may become a parameter's memory can't be an inference tensor
            return self._weights.prepare(state, changed)

    def _digest(self) -> str:
        assert self._weights is not None
        with torch.inference_mode():
            return self._weights.digest()

    def _abort(self, batch: TorchBatch, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            if batch.holds(sequence):
                batch.abort(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            batch.finished.append((sequence, _nothing(sequence)))

    def _deliver(self, batch: TorchBatch) -> None:
        assert self._loop is not None
        if batch.progressed:
            told, batch.progressed = batch.progressed, []
            self._loop.call_soon_threadsafe(_tell, told)
        if batch.finished:
            done, batch.finished = batch.finished, []
            _call(self._loop, [(sequence.ticket, result) for sequence, result in done])

    def _leave(self) -> None:
        """Give back what was running: as aborts where the engine was stopped, as the failure where it failed."""
        batch = self._batch
        assert batch is not None
        with self._wake:
            self._left = True
            self._waiting.extend(self._arrived)
            self._arrived.clear()
        if self._failure is None:
            for sequence in batch.sequences():
                batch.abort(sequence)
            batch.finished.extend((sequence, _nothing(sequence)) for sequence in self._waiting)
        else:
            batch.finished.extend((sequence, self._failure) for sequence in [*batch.sequences(), *self._waiting])
        self._waiting.clear()
        self._deliver(batch)


def _nothing(sequence: Sequence) -> Generation:
    waited = time.perf_counter() - sequence.enqueued
    return Generation(tokens=[], logprobs=[], spans=[], finish="abort", queue_seconds=waited, generate_seconds=0.0)


def _call(loop: asyncio.AbstractEventLoop, results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    loop.call_soon_threadsafe(_settle, results)


def _tell(told: list[tuple[Sequence, Progress]]) -> None:
    for sequence, progress in told:
        if sequence.request.on_progress is not None and not sequence.ticket.done():
            sequence.request.on_progress(progress)


def _settle(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, TowlineError):
            future.set_exception(result)
        elif isinstance(result, BaseException):
            future.set_exception(EngineError(f"the torch engine failed: {type(result).__name__}: {result}", code="engine_failed"))
        else:
            future.set_result(result)
