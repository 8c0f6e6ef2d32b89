"""Claimed sessions: one task, one client, one trajectory, or the sample goes back, whoever's gateway dies.

The tests write CONTROL's tasks as the buffer would; what the lane's consumer holds unacked is the oracle of who has what.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from live.gateway.conftest import EOS, Scene, spell
from live.gateway.test_sessions import ASKS, Spy, Talk, one_line, said_by, seed_chat
from support.waiting import until
from towline.bus.topology import OUTCOME, SESSIONS
from towline.config import TenantSettings
from towline.contract.codec import encode
from towline.contract.control import ReissueRecord, TaskRecord
from towline.contract.outcome import Failure, decode_outcome
from towline.contract.task import SESSION, Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.contract.trajectory import Trajectory
from towline.gateway.claims import session_name

BUFFER = {"session_groups": 1, "max_staleness": 1}


def task_of(scene: Scene, group: int, sample: int = 0, **fields: Any) -> Task:
    import time

    given: dict[str, Any] = {
        "run": scene.world.run, "lane": SESSION, "group": group, "sample": sample, "group_size": 2,
        "prompt": pack_tokens(spell(f"task {group}")), "prompt_ref": PromptRef("s", 0, group), "cursor": Cursor(0, group),
        "sampling": SamplingParams(max_tokens=40, stop_token_ids=(EOS,)), "seed": 100 * group + sample, "not_before_depth": 0,
        "admitted_at": time.time(), "deadline": time.time() + 600, "reference": {"question": f"{group}?", "answer": "42"},
        "environment": "agent",
    }  # fmt: skip
    return Task(**(given | fields))


async def admit(scene: Scene, group: int, sample: int = 0, **fields: Any) -> int:
    record = TaskRecord(writer=scene.world.stamp(), task=task_of(scene, group, sample, **fields))
    return await scene.world.append(record, scene.world.bus.topology.task(SESSION))


async def claim(client: httpx.AsyncClient, wait: int = 0, **fields: Any) -> httpx.Response:
    return await client.post("/tasks/claim", json=fields, headers={"Prefer": f"wait={wait}"} if wait else {})


async def claimed(client: httpx.AsyncClient, run: str, wait: int = 20, **fields: Any) -> tuple[Talk, dict[str, Any]]:
    answer = await claim(client, wait, **fields)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return Talk(client, run, found["id"]), found


async def failures(scene: Scene) -> list[Failure]:
    found = [decode_outcome(message.data) async for message in scene.world.bus.read(OUTCOME, follow=False)]
    assert all(isinstance(one, Failure) for one in found)
    return [one for one in found if isinstance(one, Failure)]


async def settled(scene: Scene, unacked: int = 0) -> None:
    async def there() -> bool:
        return (await scene.world.unacked(SESSION))[0] == unacked

    await until(there)


async def only_trajectory(scene: Scene) -> Trajectory:
    (found,) = (await scene.world.trajectories()).values()
    return found


async def test_a_claim_s_turns_become_the_trajectory_of_its_sample_and_its_task_is_acked(scene: Scene) -> None:
    seed_chat(scene)
    spy = Spy((await scene.worker()).worker._engine)
    sequence = await admit(scene, 5, 1)
    client = await scene.gateway(buffer=BUFFER, sessions={"show": ("question", "nothing")})
    talk, told = await claimed(client, scene.world.run, environment="agent")
    assert (told["prompt_text"], told["prompt"], told["reference"]) == ("task 5", spell("task 5"), {"question": "5?"})
    task = {key: told["task"][key] for key in ("task_sequence", "group", "sample", "group_size", "attempt", "lane")}
    assert task == {"task_sequence": sequence, "group": 5, "sample": 1, "group_size": 2, "attempt": 0, "lane": SESSION}
    assert (await claim(client)).status_code == 204, "there is one task, and it is taken"
    await talk.ask("hi", max_tokens=8)
    await talk.ask("more", max_tokens=8)
    assert await scene.world.unacked(SESSION) == (1, 0)
    done = (await talk.post("finish")).raise_for_status().json()
    assert (done["group"], done["sample"], done["group_size"]) == (5, 1, 2)
    assert (await talk.post("finish")).json() == done, "who lost the answer asks again"
    await settled(scene)

    found = await only_trajectory(scene)
    assert found.tokens.tolist() == spy.calls[1][0] + spy.calls[1][1].tokens
    assert spy.calls[0][0] == said_by("user", "hi") + ASKS
    assert [one.kind for one in found.segments] == ["prompt", "policy", "environment", "policy"]
    logprobs = found.logprobs[found.loss_mask == 1].tolist()
    assert logprobs == pytest.approx([value for _, answer in spy.calls for value in answer.logprobs], abs=1e-6)
    assert (found.lane, found.group, found.sample, found.group_size, found.task_sequence) == (SESSION, 5, 1, 2, sequence)
    assert (found.attempt, found.seed, found.sampling, found.reference) == (
        0, 501, SamplingParams(max_tokens=40, stop_token_ids=(EOS,)), {"question": "5?", "answer": "42"},
    )  # fmt: skip
    assert (found.version_start, found.version_end, found.given_reward) == (0, 0, None)
    assert found.prompt_ref == PromptRef("s", 0, 5)
    one_line(await talk.send(), 409, "finished")
    assert await failures(scene) == []
