"""A gateway dies, as if by kill -9, between any two steps of a claim, a turn, a finish or a giving up: nothing is lost, and
nothing becomes two samples. Real processes; the client repeats what it got no answer to, at whichever gateway answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from live.gateway.conftest import Scene
from live.gateway.test_claims import admit, failures, settled
from live.gateway.test_kills import Processes
from live.gateway.test_sessions import Spy, Talk, seed_chat
from support.waiting import until
from towline.config import BusSettings
from towline.contract.task import SESSION
from towline.faults import POINTS, VARIABLE

GIVING_UP = ("gateway.end_marked", "gateway.failure_published", "gateway.end_acknowledged")
ON_THE_WAY = tuple(point for point in POINTS if point.startswith("gateway.") and point not in GIVING_UP)
WORST = ("gateway.session_claimed",)
SETTINGS = """
[buffer]
session_groups = 1
[gateway.sessions]
keep_seconds = 0.3
"""


class Mortal(Processes):
    """Gateways `a`, which dies at a point once, and `b`; a client goes from one to the other."""

    def __init__(self, scene: Scene, bus_settings: BusSettings) -> None:
        super().__init__(scene, bus_settings, "synthetic")
        text = self._config.read_text().replace("[rollout]\n", "[rollout]\nack_wait_seconds = 2.0\n")
        self._config.write_text(text + SETTINGS)
        self.urls: dict[str, str] = {}

    async def begin(self, point: str) -> None:
        marker = self._scene.world.folder / "died"
        for name, fault in (("a", f"{point}@{marker}"), ("b", "")):
            self.all[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "towline.gateway", "--config", str(self._config), "--replica", name,
                stdout=(self._scene.world.folder / f"{name}.log").open("wb"), stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **({VARIABLE: fault} if fault else {})},
            )  # fmt: skip
        self.urls = {name: await self.url(name) for name in ("a", "b")}

    async def send(self, method: str, path: str, **given: Any) -> httpx.Response:
        """To the first gateway that answers, `a` before `b`."""
        for name in ("a", "b"):
            if self.all[name].returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    async with httpx.AsyncClient(base_url=self.urls[name], timeout=60.0) as client:
                        return await client.request(method, path, **given)
        raise AssertionError("no gateway answered")

    async def died(self) -> bool:
        return self.all["a"].returncode is not None


@contextlib.asynccontextmanager
async def mortal(scene: Scene, bus_settings: BusSettings, point: str) -> Any:
    seed_chat(scene)
    spy = Spy((await scene.worker(engine="synthetic")).worker._engine)
    processes = Mortal(scene, bus_settings)
    try:
        await processes.begin(point)
        yield processes, spy
        assert await processes.died(), f"{point} was never reached"
    finally:
        for name in list(processes.all):
            if processes.all[name].returncode is None:
                await processes.kill(name)


def cases(points: tuple[str, ...]) -> list[Any]:
    return [point if point in WORST else pytest.param(point, marks=pytest.mark.slow) for point in points]


async def insist(send: Callable[[], Any], wanted: int) -> dict[str, Any]:
    """Until it's the wanted status: a task that died with its gateway comes again after the ack wait."""
    found: list[httpx.Response] = []

    async def there() -> bool:
        found[:] = [await send()]
        assert found[0].status_code in (wanted, 204), found[0].text
        return bool(found[0].status_code == wanted)

    await until(there, 40.0)
    answer: dict[str, Any] = found[0].json()
    return answer


@pytest.mark.parametrize("point", cases(ON_THE_WAY))
async def test_a_gateway_s_death_on_the_way_loses_nothing_and_makes_nothing_twice(
    scene: Scene, bus_settings: BusSettings, point: str
) -> None:
    async with mortal(scene, bus_settings, point) as (gateways, spy):
        sequence = await admit(scene, 4, 1)
        keys = {"Prefer": "wait=5"}
        told = await insist(lambda: gateways.send("POST", "/tasks/claim", json={}, headers=keys | {"Idempotency-Key": "c"}), 201)
        assert told["task"]["task_sequence"] == sequence
        messages: list[dict[str, Any]] = []
        for turn in ("hi", "more"):
            messages.append({"role": "user", "content": turn})
            given = {"model": scene.world.run, "messages": messages, "max_tokens": 8}
            path = f"/sessions/{told['id']}/v1/chat/completions"
            answer = await insist(lambda: gateways.send("POST", path, json=given, headers={"Idempotency-Key": turn}), 200)  # noqa: B023
            messages.append(answer["choices"][0]["message"])
        assert answer["session"]["turns"] == 2
        done = await insist(lambda: gateways.send("POST", f"/sessions/{told['id']}/finish"), 200)
        assert await insist(lambda: gateways.send("POST", f"/sessions/{told['id']}/finish"), 200) == done
        await settled(scene)
        assert (await scene.world.unacked(SESSION)) == (0, 0)
        assert (await gateways.send("POST", "/tasks/claim", json={})).status_code == 204
        ((where, found),) = (await scene.world.trajectories()).items()
        assert where == (4, 1)
        assert found.tokens.tolist() == spy.calls[-1][0] + spy.calls[-1][1].tokens, "what the engine saw and sampled last"
        assert found.policy_tokens == 16
        assert await failures(scene) == []


@pytest.mark.parametrize("point", cases(("gateway.finish_marked", "gateway.trajectory_published")))
async def test_a_finish_that_its_client_never_repeats_is_brought_to_its_end_by_another_gateway(
    scene: Scene, bus_settings: BusSettings, point: str
) -> None:
    async with mortal(scene, bus_settings, point) as (gateways, _):
        await admit(scene, 4)
        told = (await gateways.send("POST", "/tasks/claim", json={}, headers={"Prefer": "wait=5"})).json()
        talk = Talk(httpx.AsyncClient(base_url=gateways.urls["a"], timeout=60.0), scene.world.run, told["id"])
        await talk.ask("hi")
        with contextlib.suppress(httpx.TransportError):
            raise AssertionError(await talk.post("finish"))
        await talk.client.aclose()
        await scene.world.trajectory(4)
        await settled(scene)
        assert (await gateways.send("GET", f"/sessions/{told['id']}")).json()["state"] in ("finishing", "finished")
        assert len(await scene.world.trajectories()) == 1
        assert await failures(scene) == []


@pytest.mark.parametrize("point", cases(GIVING_UP))
async def test_a_gateway_s_death_while_a_session_is_given_up_leaves_one_failure_and_no_task_behind(
    scene: Scene, bus_settings: BusSettings, point: str
) -> None:
    async with mortal(scene, bus_settings, point) as (gateways, _):
        sequence = await admit(scene, 4)
        told = (await gateways.send("POST", "/tasks/claim", json={}, headers={"Prefer": "wait=5"})).json()
        async with httpx.AsyncClient(base_url=gateways.urls["a"], timeout=60.0) as client:
            with contextlib.suppress(httpx.TransportError):
                raise AssertionError(await client.delete(f"/sessions/{told['id']}"))

        async def over() -> bool:
            view = (await gateways.send("GET", f"/sessions/{told['id']}")).json()
            return bool(view.get("state") == "ended")

        await until(over, 40.0)
        await settled(scene)
        found = {(one.task_sequence, one.delivery, one.stage) for one in await failures(scene)}
        assert found == {(sequence, 1, "abandoned")}, "however often it's told, it counts once"
        assert (await gateways.send("POST", "/tasks/claim", json={})).status_code == 204
        assert await scene.world.trajectories() == {}
