"""From a claim to the batch: real servers, buffer, reward and gateway processes, one of each killed on the way; each sample
counts once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from typing import Any

import httpx
import pytest

from live.gateway.conftest import Scene
from live.gateway.test_claims_kills import SETTINGS
from live.gateway.test_kills import Processes
from live.gateway.test_sessions import seed_chat
from support.waiting import until
from towline.audit.run import audit
from towline.bus.topology import CONTROL, OUTCOME
from towline.config import BusSettings, StoreSettings, load_settings
from towline.contract.control import BatchRecord, TaskRecord, decode_control
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.contract.task import SESSION
from towline.store.log import Log
from towline.store.objects import open_store

TASK = '''
"""Prompts and reward of the test's run."""
from towline.environment.prompts import Shuffled

def prompts(tokenizer, seed):
    return Shuffled("claims", 50, lambda row: ([1, 2, 3], {"question": f"q{row}", "least": row}), seed=seed)

def judge(sample):
    return float(sample.reference["least"])
'''


class Run(Processes):
    """Everything but trainer and worker as processes; both gateways' clients go on with whichever answers."""

    def __init__(self, scene: Scene, bus_settings: BusSettings, store: StoreSettings) -> None:
        super().__init__(scene, bus_settings, "synthetic")
        (scene.world.folder / "claims_task.py").write_text(TASK)
        text = self._config.read_text().replace('source = "a:b"', 'source = "claims_task:prompts"')
        place = f'url = "{store.url}"\nendpoint = "{store.endpoint}"\naccess_key = "{store.access_key}"\n'
        place += f'secret_key = "{store.secret_key.get_secret_value()}"\n'
        text = re.sub(r"(?<=\[store\]\n).*\n", lambda _: place, text)
        text = text.replace('function = "a:b"', 'function = "claims_task:judge"\nack_wait_seconds = 2.0')
        text = text.replace("[rollout]\n", "[rollout]\nack_wait_seconds = 2.0\n")
        mine = SETTINGS.replace(
            "session_groups = 1", "session_groups = 2\ngroups_per_batch = 2\ngroup_size = 2\nmax_staleness = 0"
        )
        self._config.write_text(text + mine + 'show = ["question"]\n[eval]\nevery = 0\n')
        self.settings = load_settings(self._config)
        self.urls: dict[str, str] = {}

    async def gateway(self, name: str) -> None:
        await self.start("gateway", name)
        self.urls[name] = await self.url(name)

    async def send(self, method: str, path: str, **given: Any) -> httpx.Response | None:
        """None where the gateway that was asked died over it."""
        name = random.choice(sorted(self.urls))
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=self.urls[name], timeout=60.0) as client:
                return await client.request(method, path, **given)
        return None

    async def insist(self, method: str, path: str, key: str = "", **given: Any) -> httpx.Response:
        """Until it's answered with something that isn't to be tried again."""
        headers = {"Prefer": "wait=10", **({"Idempotency-Key": key} if key else {})}
        while True:
            answer = await self.send(method, path, headers=headers, **given)
            if answer is not None and answer.status_code not in (204, 503):
                return answer
            await asyncio.sleep(0.1)


async def agent(run: Run, name: str, done: list[tuple[int, int]]) -> None:
    """Claims one sample, talks two turns, finishes."""
    told = (await run.insist("POST", "/tasks/claim", f"claim-{name}", json={})).json()
    task = told["task"]
    messages = [{"role": "user", "content": told["reference"]["question"]}]
    for turn in range(2):
        body = {"model": told["model"], "messages": messages, "max_tokens": 3}
        answer = await run.insist("POST", f"/sessions/{told['id']}/v1/chat/completions", f"turn-{name}-{turn}", json=body)
        assert answer.status_code == 200, answer.text
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    finished = await run.insist("POST", f"/sessions/{told['id']}/finish")
    assert finished.status_code == 200, finished.text
    done.append((task["group"], task["sample"]))


async def records(scene: Scene) -> list[Any]:
    return [decode_control(message.data) async for message in scene.world.bus.read(CONTROL, follow=False)]


async def test_claimed_samples_reach_their_batch_exactly_once_whoever_is_killed(
    scene: Scene, bus_settings: BusSettings, s3_settings: StoreSettings
) -> None:
    scene.world.objects = open_store(s3_settings)
    scene.world.log = Log(scene.world.objects, scene.world.run)
    seed_chat(scene)
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 20.0})
    run = Run(scene, bus_settings, s3_settings)
    done: list[tuple[int, int]] = []
    try:
        await asyncio.gather(run.start("buffer", "buffer"), run.start("reward", "reward"), run.gateway("a"), run.gateway("b"))
        agents = [asyncio.create_task(agent(run, str(number), done)) for number in range(4)]
        await until(lambda: any(one.done() for one in agents) or scene.workers["w"].worker.busy > 0, 60.0)
        await run.kill("a")
        await run.kill("buffer")
        await run.kill("reward")
        await asyncio.gather(run.start("buffer", "buffer"), run.start("reward", "reward"), run.gateway("a"))
        async with asyncio.timeout(120):
            await asyncio.gather(*agents)
        assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1)]

        async def batched() -> bool:
            return any(isinstance(record, BatchRecord) for record in await records(scene))

        await until(batched, 60.0)
        found = await records(scene)
        (batch,) = [record for record in found if isinstance(record, BatchRecord)]
        assert sorted((row.group, row.sample) for row in batch.rows) == sorted(done)
        tasks = {(record.task.group, record.task.sample): record.task for record in found if isinstance(record, TaskRecord)}
        assert {task.lane for task in tasks.values()} == {SESSION}
        assert all(row.reward == tasks[row.group, row.sample].reference["least"] for row in batch.rows)
        outcomes = [decode_outcome(message.data) async for message in scene.world.bus.read(OUTCOME, follow=False)]
        assert [one for one in outcomes if isinstance(one, Failure)] == []
        assert len([one for one in outcomes if isinstance(one, Score)]) == 4
        trajectories = await scene.world.trajectories()
        assert all(one.policy_tokens == 6 and one.lane == SESSION for one in trajectories.values())
        report = await audit(scene.world.bus, scene.world.log, run.settings)
        assert report.violations == []
        assert report.rows_checked == 4
    finally:
        for name in list(run.all):
            if run.all[name].returncode is None:
                await run.kill(name)


@pytest.fixture(autouse=True)
def _chance() -> None:
    random.seed(1)
