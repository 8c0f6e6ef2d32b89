"""python -m live.worker.dying TOKENS --config … : a worker's process that dies, as by kill -9, as soon as a sample has TOKENS."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

from towline.engine.base import GenerateRequest, Generation, Progress
from towline.engine.torch_engine import TorchEngine
from towline.rollout_worker.service import RolloutWorkerService
from towline.runtime.service import service_main


def die_at(tokens: int) -> None:
    generate = TorchEngine.generate

    async def until_then(engine: TorchEngine, request: GenerateRequest) -> Generation:
        tell = request.on_progress
        assert tell is not None

        def told(progress: Progress) -> None:
            if request.position0 + len(progress.tokens) >= tokens:
                os.kill(os.getpid(), signal.SIGKILL)
            tell(progress)

        return await generate(engine, replace(request, on_progress=told))

    TorchEngine.generate = until_then  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    die_at(int(sys.argv.pop(1)))
    service_main(RolloutWorkerService)
