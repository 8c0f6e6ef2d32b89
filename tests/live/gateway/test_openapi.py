"""Requests made of the gateway's own OpenAPI document, odd ones on purpose: whatever comes, there is no 5xx."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from live.gateway.conftest import VOCABULARY, Scene


def _run(schema: Any, base_url: str, examples: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for operation in (one.ok() for one in schema.get_all_operations()):

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples, deadline=None, derandomize=True, phases=[Phase.generate], database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def send(case: Any) -> None:
            response = case.call(base_url=base_url, timeout=20.0)
            found[response.status_code] += 1
            assert response.status_code < 500, (response.status_code, response.text, case.as_curl_command())

        send()
    return found


def _narrowed(tree: Any, run: str, name: str = "") -> Any:
    """The document with what this fleet can serve: its model, its vocabulary, short answers, versions 0 and 1. What it leaves out
    the document as it is brings."""
    if isinstance(tree, list):
        return [_narrowed(one, run, name) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("type") == "integer" and tree.get("maximum", 0) >= VOCABULARY:
        most = 1 if name.endswith("_version") else tree["maximum"] if "seed" in name else VOCABULARY - 1
        tree = tree | {"maximum": most}
    if name == "model":
        return {"const": run}
    return {key: _narrowed(one, run, name if key in ("anyOf", "items") else key) for key, one in tree.items()}


async def _check(scene: Scene, examples: int) -> Counter[int]:
    scene.seed()
    await scene.worker(engine="synthetic", gateway={"waiting": 1000})
    client = await scene.gateway(max_wait_seconds=0.2, max_choices=8)
    document = (await client.get("/openapi.json")).json()
    found: Counter[int] = Counter()
    for tree in (document, _narrowed(document, scene.world.run)):
        found += await asyncio.to_thread(_run, schemathesis.openapi.from_dict(tree), str(client.base_url), examples)
    assert (await client.get("/health")).status_code == 200
    return found


async def test_a_few_requests_of_each_kind_bring_no_5xx(scene: Scene) -> None:
    found = await _check(scene, 12)
    assert found[200] > 0


@pytest.mark.slow
async def test_hundreds_of_requests_of_each_kind_bring_no_5xx(scene: Scene) -> None:
    found = await _check(scene, 300)
    assert found[200] > 100
    assert found[400] > 100
