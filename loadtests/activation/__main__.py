"""What a new version costs a generating torch engine: the pause against loading the checkpoint, and tokens while it is prepared.

    python -m loadtests.activation [--dtype float32|bfloat16] [--density SHARE …] [--seconds N] [--json FILE] [--check]

The model is made, with over 100M parameters; so are the versions, each changing a share of the elements by one step. All ratios
are within this run. Run it with both cores idle: one is the engine's, the other the preparing thread's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loadtests.activation.run import CONFIG, MadeRun, make_run
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from towline.config import RolloutSettings
from towline.contract.task import SamplingParams
from towline.delta.files import load_folder
from towline.engine.base import Activation, ActivationMode, GenerateRequest
from towline.engine.torch_engine import TorchEngine
from towline.engine.torch_weights import own_memory
from towline.replica.host import Copy
from towline.replica.making import Taken
from towline.replica.prepare import Preparer

PAUSE_SHARE, SLOWDOWN = 1 / 20, 0.20
SLOTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 32, 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Fleet:
    """One replica's engine with its preparer, and sequences that run all the time."""

    def __init__(self, made: MadeRun, folder: Path, dtype: Literal["float32", "bfloat16"], threads: int) -> None:
        self.settings = RolloutSettings(slots=SLOTS, dtype=dtype, threads=threads)
        self.engine = TorchEngine(slots=SLOTS, dtype=dtype, threads=threads, max_context_tokens=4096)
        self.preparer = Preparer(
            objects=made.objects, log=made.log, settings=self.settings, engine="torch", folder=folder, on_wait=lambda why: None
        )
        self._tokens = dict.fromkeys(range(SLOTS), 0)
        self._rounds = 0

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum(self._tokens.values())

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._generate(slot)) for slot in range(SLOTS)]
            yield
            for task in tasks:
                task.cancel()

    async def _generate(self, slot: int) -> None:
        random = np.random.default_rng(slot)
        while True:
            self._rounds += 1
            before = self._tokens[slot]

            def count(progress: Any, before: int = before) -> None:
                self._tokens[slot] = before + len(progress.tokens)

            await self.engine.generate(
                GenerateRequest(
                    request_id=f"{slot}/{self._rounds}", tokens=random.integers(0, CONFIG.vocab_size, PROMPT_TOKENS).tolist(),
                    sampling=SamplingParams(max_tokens=OUTPUT_TOKENS), seed=self._rounds, on_progress=count, progress_every=1,
                )
            )  # fmt: skip

    def engine_seconds(self) -> float:
        """CPU time of the engine's thread."""
        thread = self.engine._thread
        assert thread is not None
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    async def take(self, version: int) -> Taken:
        taken = await self.preparer.prepare(version, lambda: True)
        assert taken is not None
        return taken

    async def rest(self, seconds: float) -> None:
        """Until so many seconds and at least one token of each sequence have passed."""
        until, tokens = time.monotonic() + seconds, self.tokens
        while time.monotonic() < until or self.tokens < tokens + SLOTS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def full_loads(folder: Path, dtype: str, repeats: int) -> tuple[float, float]:
    """(a new module by transformers with memory of its own, as an engine starts; every weight of a live module from the files) in
    seconds, the best of `repeats`, the files in the page cache."""
    loads, rewrites = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype], local_files_only=True).eval()
        own_memory(model)
        loads.append(time.perf_counter() - began)
        tensors = model.state_dict()
        began = time.perf_counter()
        with torch.no_grad():
            for name, tensor in load_folder(folder).items():
                tensors[name].view(-1).copy_(torch.from_numpy(tensor.data.copy()).view(torch.bfloat16))
        rewrites.append(time.perf_counter() - began)
    return min(loads), min(rewrites)


async def pauses(fleet: Fleet, versions: Iterator[int], count: int, mode: ActivationMode, held: list[Copy]) -> list[Activation]:
    """Of `count` activations amid generation, each proved by the engine's digest."""
    found = []
    for _ in range(count):
        version = next(versions)
        taken = await fleet.take(version)
        changed = await fleet.preparer.changed(taken, held[-1] if held else None, fleet.engine.version)
        activation = await fleet.engine.activate(taken.copy.state, version, mode, changed)
        if activation.engine_digest != taken.copy.files_digest:
            raise SystemExit(f"version {version}: the engine doesn't hold it")
        for copy in held:
            copy.release()
        held[:] = [taken.copy]
        found.append(activation)
        await fleet.rest(0.3)
    return found


async def throughput(fleet: Fleet, versions: list[int], seconds: float) -> dict[str, Any]:
    """Tokens a second alone, and while versions are prepared one after the other, in turns: by the clock, and by the CPU time of
    the engine's thread, which other processes on the machine take nothing from but cache."""
    spent, computed, tokens, prepares = [0.0, 0.0], [0.0, 0.0], [0, 0], []
    left = iter(versions)
    version = next(left, None)
    while version is not None:
        for busy in (False, True):
            began, before, used = time.perf_counter(), fleet.tokens, fleet.engine_seconds()
            if busy:
                while version is not None and time.perf_counter() - began < seconds:
                    taken = await fleet.take(version)
                    assert fleet.engine._weights is not None
                    await fleet.engine._beside(fleet.engine._prepare, taken.copy.state, None)
                    prepares.append(taken.prepare_seconds)
                    taken.copy.release()
                    version = next(left, None)
            else:
                await fleet.rest(seconds)
            spent[busy] += time.perf_counter() - began
            computed[busy] += fleet.engine_seconds() - used
            tokens[busy] += fleet.tokens - before
    alone, beside = tokens[0] / spent[0], tokens[1] / spent[1]
    return {
        "tokens_per_second": alone, "tokens_per_second_preparing": beside, "slowdown": 1 - beside / alone,
        "cpu_slowdown": 1 - (tokens[1] / computed[1]) / (tokens[0] / computed[0]),
        "engine_cores": computed[0] / spent[0], "engine_cores_preparing": computed[1] / spent[1],
        "prepare_seconds": statistics.median(prepares), "prepares": len(prepares),
    }  # fmt: skip


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    each = 2 * arguments.activations
    densities = [density for density in arguments.density for _ in range(each)]
    made = make_run(folder, densities + [max(arguments.density)] * arguments.prepares)
    load, rewrite = full_loads(made.base, arguments.dtype, 3)
    torch.set_num_threads(1)
    fleet = Fleet(made, folder / "replica", arguments.dtype, 1)
    first = await fleet.take(0)
    engine_folder = await fleet.preparer.engine_folder(first.copy)
    assert engine_folder is not None
    await fleet.engine.start(engine_folder, 0)
    found: dict[str, Any] = {
        "parameters": made.parameters, "dtype": arguments.dtype, "load_seconds": load, "rewrite_seconds": rewrite, "pauses": [],
    }  # fmt: skip
    held, versions = [first.copy], iter(made.versions)
    modes: tuple[ActivationMode, ...] = ("in_place", "retract")
    async with fleet.generating():
        await fleet.rest(1.0)
        for density in arguments.density if arguments.activations else ():
            for mode in modes:
                taken = await pauses(fleet, versions, arguments.activations, mode, held)
                found["pauses"].append(
                    {
                        "density": density, "mode": mode, "seconds": statistics.median(one.pause_seconds for one in taken),
                        "worst_seconds": max(one.pause_seconds for one in taken),
                    }
                )  # fmt: skip
        found |= await throughput(fleet, list(versions), arguments.seconds)
    fleet.preparer.close()
    await fleet.engine.stop()
    return found


def report(found: dict[str, Any]) -> bool:
    """Print the figures; whether the targets are met: the pause that the weights take (in_place), and the slowdown."""
    met = bool(found["slowdown"] <= SLOWDOWN)
    millions = found["parameters"] / 1e6
    print(f"{millions:.0f}M parameters, published bf16, engine {found['dtype']}, 1 engine thread, {SLOTS} sequences")
    load, rewrite = found["load_seconds"], found["rewrite_seconds"]
    print(f"loading the checkpoint: {load:.3f} s (transformers), {rewrite:.3f} s (into live weights)")
    for row in found["pauses"]:
        share, strict = row["seconds"] / load, row["seconds"] / rewrite
        kind = "weights alone" if row["mode"] == "in_place" else f"and {SLOTS} sequences recomputed"
        print(
            f"pause, {100 * row['density']:g}% changed, {row['mode']} ({kind}): median {1e3 * row['seconds']:.1f} ms, "
            f"worst {1e3 * row['worst_seconds']:.1f} ms; 1/{1 / share:.0f} of loading, 1/{1 / strict:.0f} of rewriting"
        )
        if row["mode"] == "in_place":
            met = met and share <= PAUSE_SHARE
    print(
        f"generation: {found['tokens_per_second']:.1f} tokens/s alone, {found['tokens_per_second_preparing']:.1f} with versions "
        f"prepared without a break: {100 * found['slowdown']:.1f}% slower ({found['prepares']} prepares of "
        f"{found['prepare_seconds']:.2f} s)"
    )
    alone, beside = 100 * found["engine_cores"], 100 * found["engine_cores_preparing"]
    print(
        f"the engine's thread had {alone:.0f}% of a core alone, {beside:.0f}% beside; a token took it "
        f"{100 * found['cpu_slowdown']:.1f}% more CPU time (well under 100% alone: the machine had no core to spare)"
    )
    print(f"targets (pause of the weights <= 1/20 of loading, slowdown <= 20%): {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32")
    parser.add_argument("--density", type=float, nargs="+", default=[0.0025, 0.02])
    parser.add_argument("--activations", type=int, default=5, help="of each density and mode")
    parser.add_argument("--prepares", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn with, and of one without preparing")
    parser.add_argument("--folder", type=Path, help="where everything is written, 2 GB (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    arguments = parser.parse_args()
    disable_progress_bar()
    sys.setswitchinterval(0.0005)  # as the worker does
    with tempfile.TemporaryDirectory(prefix="towline-activation-", dir=arguments.folder) as folder:
        found = asyncio.run(measure(arguments, Path(folder)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2))
    return 0 if report(found) or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
