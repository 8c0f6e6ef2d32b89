"""One base model for the suite, and engines that are stopped whatever happens. A server takes half a minute to start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.sglang_model import build
from support.sglang_requests import Started
from towline.engine.sglang.engine import SglangEngine


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    build(folder, seed=0)
    return folder


@pytest_asyncio.fixture
async def started(base: Path, tmp_path: Path) -> AsyncIterator[Started]:
    """Starts an engine on the base model, or on `model`, as version 0."""
    engines = []

    async def start(*, model: Path = base, **arguments: Any) -> SglangEngine:
        engine = SglangEngine(slots=4, max_context_tokens=2000, **arguments)
        engines.append(engine)
        folder = tmp_path / f"model{len(engines)}"
        folder.symlink_to(model)
        await engine.start(folder, 0)
        return engine

    yield start
    for engine in engines:
        await engine.stop()
