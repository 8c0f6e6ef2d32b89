"""Claimed sessions: one task, one client, one trajectory, or the sample goes back, whoever's gateway dies.

The tests write CONTROL's tasks as the buffer would; what the lane's consumer holds unacked is the oracle of who has what.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
import schemathesis

from live.gateway.conftest import EOS, Scene, spell
from live.gateway.test_openapi import _narrowed as narrowed
from live.gateway.test_openapi import _run as send_odd
from live.gateway.test_sessions import ASKS, Spy, Talk, one_line, said_by, seed_chat
from support.waiting import until
from towline.bus.topology import OUTCOME, SESSIONS
from towline.config import TenantSettings
from towline.contract.codec import encode
from towline.contract.control import TaskRecord
from towline.contract.outcome import Failure, decode_outcome
from towline.contract.task import SESSION, Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.contract.trajectory import Trajectory
from towline.gateway.claims import session_name

BUFFER = {"session_groups": 1, "max_staleness": 1}


def task_of(scene: Scene, group: int, sample: int = 0, **fields: Any) -> Task:
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


async def test_gateways_that_claim_at_once_never_give_one_sample_to_two_clients(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    clients = [await scene.gateway(buffer=BUFFER) for _ in range(3)]
    for group in range(6):
        for sample in range(2):
            await admit(scene, group, sample)
    answers = await asyncio.gather(*(claim(client, 2) for client in clients for _ in range(5)))
    given = [answer.json()["task"] for answer in answers if answer.status_code == 201]
    assert sorted((task["group"], task["sample"]) for task in given) == [(g, s) for g in range(6) for s in range(2)]
    empty = [answer for answer in answers if answer.status_code != 201]
    assert [answer.status_code for answer in empty] == [204] * 3
    assert empty[0].headers["retry-after"] == "1"
    assert await scene.world.unacked(SESSION) == (12, 0)


async def test_a_claim_that_waits_gets_the_task_that_comes_and_holds_up_no_other(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER)
    waiting = asyncio.create_task(claim(client, 60))
    assert (await claim(client)).status_code == 204, "who doesn't wait isn't behind who does"
    sequence = await admit(scene, 1)
    assert (await waiting).json()["task"]["task_sequence"] == sequence


async def test_a_task_waits_for_its_depth_and_a_claim_for_a_version_that_serves_it(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER)
    await admit(scene, 1, not_before_depth=1)
    refused = await claim(client)
    assert (refused.status_code, refused.json()["type"]) == (409, "WeightVersionNotReady")
    assert "depth 1" in refused.json()["message"]
    waiting = asyncio.create_task(claim(client, 60))
    await asyncio.sleep(0.3)
    version = scene.world.commit(1)
    talk = Talk(client, scene.world.run, (await waiting).json()["id"])
    answer = await talk.ask("hi")
    assert answer["weight_version_start"] == version
    talk.messages.append({"role": "user", "content": "more"})
    refused = await talk.send(weight_version={"exact_version": 0})
    assert (refused.status_code, refused.json()["type"]) == (409, "WeightVersionNotReady")
    assert "depth 1" in refused.json()["message"]
    await admit(scene, 2)
    refused = await claim(client, weight_version={"exact_version": 77})
    assert (refused.status_code, refused.json()["target_version"]) == (409, 77)
    refused = await claim(client, environment="chess")
    one_line(refused, 409, "agent", "chess")
    held, _ = await claimed(client, scene.world.run, weight_version={"min_version": version})
    assert (await held.ask("hi"))["weight_version_start"] == version


async def test_where_nothing_serves_a_claim_says_so(scene: Scene) -> None:
    seed_chat(scene)
    client = await scene.gateway(ready=False, buffer=BUFFER)
    await admit(scene, 1)

    async def known() -> bool:
        return (await claim(client)).json()["error"]["type"] == "EngineUnavailable"

    await until(known)
    answer = await claim(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    other = await scene.gateway(ready=False)
    one_line(await claim(other), 404, "session_groups")
    one_line(await claim(client, lane="train"), 400, "lane")


async def test_a_tenant_s_sessions_are_bounded_and_its_claims_are_its_own(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    keys = {name: name * 20 for name in ("a", "b")}
    tenants = {
        "a": TenantSettings(token=keys["a"], sessions=2, may_reward=True),  # type: ignore[arg-type]
        "b": TenantSettings(token=keys["b"]),  # type: ignore[arg-type]
    }
    client = await scene.gateway(buffer=BUFFER, tenants=tenants, sessions={"client_rewards": True})
    client.headers["Authorization"] = f"Bearer {keys['a']}"
    for group in range(3):
        await admit(scene, group)
    talk, _ = await claimed(client, scene.world.run)
    await Talk.begin(client, scene.world.run)
    for refused in (await claim(client), await client.post("/sessions", json={})):
        one_line(refused, 429, "2 sessions")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await scene.world.unacked(SESSION))[0] == 1, "a refused claim takes nothing"
    await talk.ask("hi")
    client.headers["Authorization"] = f"Bearer {keys['b']}"
    one_line(await talk.send(), 404, talk.name)
    one_line(await client.delete(f"/sessions/{talk.name}"), 404)
    theirs, _ = await claimed(client, scene.world.run)
    await theirs.ask("hi")
    one_line(await theirs.post("finish", reward=1.0), 403, "may_reward")
    client.headers["Authorization"] = f"Bearer {keys['a']}"
    one_line(await talk.post("finish", components={"x": 1.0}), 400, "components")
    done = (await talk.post("finish", reward=0.5, components={"tests": 1.0})).raise_for_status().json()
    one_line(await talk.post("finish", reward=0.6), 409, "otherwise")
    found = (await scene.world.trajectories())[done["group"], 0]
    assert found.given_reward is not None
    assert (found.given_reward.value, found.given_reward.components, found.given_reward.by) == (0.5, {"tests": 1.0}, "a")
    await claimed(client, scene.world.run)  # a finished one leaves its place


async def test_who_repeats_a_claim_under_its_key_gets_the_session_that_it_made(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    here, there = await scene.gateway(buffer=BUFFER), await scene.gateway(buffer=BUFFER)
    for group in range(3):
        await admit(scene, group)
    headers = {"Idempotency-Key": "k"}
    first = await here.post("/tasks/claim", json={}, headers=headers)
    again = await there.post("/tasks/claim", json={}, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    one_line(await here.post("/tasks/claim", json={"environment": "agent"}, headers=headers), 422)
    other = await here.post("/tasks/claim", json={}, headers={"Idempotency-Key": "l"})
    assert other.json()["id"] != first.json()["id"]
    assert (await scene.world.unacked(SESSION))[0] == 2


async def test_a_task_nobody_can_read_is_a_dead_letter_and_holds_up_nothing(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER)
    bus = scene.world.bus
    await bus.publish(bus.topology.task(SESSION), b"nonsense")
    foreign = TaskRecord(writer="w/1", task=task_of(scene, 1, lane="train"))
    await bus.publish(bus.topology.task(SESSION), encode(foreign))
    sequence = await admit(scene, 2)
    talk, told = await claimed(client, scene.world.run)
    assert told["task"]["task_sequence"] == sequence
    assert talk.name == session_name(scene.world.run, sequence)
    assert talk.name in await bus.kv(SESSIONS).items()
    await settled(scene, 1)


async def test_a_client_that_went_away_while_it_waited_gets_no_task(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER)
    async with httpx.AsyncClient(base_url=client.base_url) as leaving:
        waiting = asyncio.create_task(claim(leaving, 60))
        lane = scene._gateways[0][0]._claims._lane

        async def waits() -> bool:
            return bool(lane._waiting)

        await until(waits)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    sequence = await admit(scene, 1)
    _, told = await claimed(client, scene.world.run)
    assert told["task"]["task_sequence"] == sequence
    assert list(await scene.world.bus.kv(SESSIONS).items()) == [told["id"]]


async def test_a_claim_that_waits_at_a_gateway_that_leaves_is_told_so_at_once(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER)
    waiting = asyncio.create_task(claim(client, 60))

    async def waits() -> bool:
        return bool(scene._gateways[0][0]._claims._lane._waiting)

    await until(waits)
    scene._gateways[0][1].cancel()
    answer = await waiting
    one_line(answer, 503, "draining")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.slow
async def test_odd_claims_and_finishes_bring_no_5xx(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic", gateway={"waiting": 1000})
    client = await scene.gateway(buffer=BUFFER, max_wait_seconds=0.1, sessions={"client_rewards": True})
    for group in range(40):
        await admit(scene, group)
    talk, _ = await claimed(client, scene.world.run)
    tree = narrowed((await client.get("/openapi.json")).json(), scene.world.run)
    tree["paths"] = {path: one for path, one in tree["paths"].items() if path in ("/tasks/claim", "/sessions/{session}/finish")}
    for operations in tree["paths"].values():
        for operation in operations.values():
            for parameter in operation["parameters"]:
                if parameter["in"] == "path":
                    parameter["schema"] = {"type": "string", "enum": [talk.name]}
    found = await asyncio.to_thread(send_odd, schemathesis.openapi.from_dict(tree), str(client.base_url), 60)
    assert found[400] > 0
    assert found[201] + found[204] + found[409] > 0
    assert (await talk.view())["id"] == talk.name
