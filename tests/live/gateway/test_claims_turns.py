"""What a task means for its session's turns, and which of their branches becomes its sample."""

from __future__ import annotations

from live.gateway.conftest import EOS, Scene
from live.gateway.test_claims import BUFFER, admit, claimed, only_trajectory
from live.gateway.test_sessions import Spy, one_line, seed_chat
from towline.contract.task import SamplingParams


async def test_the_task_s_sampling_tokens_and_seed_are_its_session_s(scene: Scene) -> None:
    seed_chat(scene)
    spy = Spy((await scene.worker(engine="synthetic")).worker._engine)
    client = await scene.gateway(buffer=BUFFER)
    for sample in range(2):
        await admit(scene, 1, sample, seed=7, sampling=SamplingParams(max_tokens=20, temperature=0.5, stop_token_ids=(EOS,)))
    talk, told = await claimed(client, scene.world.run)
    assert (told["sampling"]["max_tokens"], told["sampling"]["temperature"]) == (20, 0.5)
    talk.messages = [{"role": "user", "content": "hi"}]
    one_line(await talk.send(temperature=1.0), 400, "temperature", "0.5")
    one_line(await talk.send(top_p=0.5), 400, "top_p")
    talk.messages.clear()
    first = await talk.ask("hi")
    assert len(spy.calls[0][1].tokens) == 8
    talk.messages[1:] = []
    repeat = await talk.send()
    assert repeat.json()["session"]["node"] == first["session"]["node"], "a repeated turn has the seed that it had"
    assert spy.calls[1][1].tokens == spy.calls[0][1].tokens
    (await talk.post("rollback")).raise_for_status()
    again = (await talk.send()).raise_for_status().json()
    assert again["session"]["node"] != first["session"]["node"], "after a rollback the next try is another one"
    assert spy.calls[2][1].tokens != spy.calls[0][1].tokens
    talk.messages.append(again["choices"][0]["message"])
    long = await talk.ask("more", max_tokens=100)
    assert long["usage"]["completion_tokens"] == 12, "of its 20"
    talk.messages.append({"role": "user", "content": "and more"})
    one_line(await talk.send(), 409, "20 tokens", "finish it")
    other, _ = await claimed(client, scene.world.run)
    one_line(await other.post("finish", group="g"), 400, "group")
    one_line(await other.post("finish"), 409, "nothing to finish")
    one_line(await talk.post("finish", node=99), 400, "node")
    (await talk.post("finish")).raise_for_status()
    found = await only_trajectory(scene)
    assert (found.sampling.temperature, found.sampling.max_tokens, found.policy_tokens, found.seed) == (0.5, 20, 20, 7)


async def test_of_a_tree_with_branches_one_is_published_the_one_that_is_named_or_the_head_s(scene: Scene) -> None:
    seed_chat(scene)
    spy = Spy((await scene.worker(engine="synthetic")).worker._engine)
    client = await scene.gateway(buffer=BUFFER)
    for group in (1, 2):
        await admit(scene, group)
        talk, _ = await claimed(client, scene.world.run)
        first = await talk.ask("hi", max_tokens=4)
        (await talk.post("rollback")).raise_for_status()
        talk.messages.pop()
        await talk.send(max_tokens=4)
        node = {"node": first["session"]["node"]} if group == 2 else {}
        (await talk.post("finish", **node)).raise_for_status()
        one_line(await talk.post("finish", node=0), 409, "otherwise")
    found = await scene.world.trajectories()
    assert found[1, 0].tokens.tolist() == spy.calls[1][0] + spy.calls[1][1].tokens
    assert found[2, 0].tokens.tolist() == spy.calls[2][0] + spy.calls[2][1].tokens


async def test_a_session_that_is_too_long_says_so_and_can_be_finished(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER, sessions={"max_tokens": 120, "max_turns": 50})
    await admit(scene, 1, sampling=SamplingParams(max_tokens=400, stop_token_ids=(EOS,)))
    talk, _ = await claimed(client, scene.world.run)
    await talk.ask("a" * 60, max_tokens=4)
    talk.messages.append({"role": "user", "content": "b" * 60})
    one_line(await talk.send(), 400, "full", "finish it")
    (await talk.post("finish")).raise_for_status()
    other = await scene.gateway(buffer=BUFFER, rollout={"max_context_tokens": 100})
    await admit(scene, 2, sampling=SamplingParams(max_tokens=400, stop_token_ids=(EOS,)))
    talk, _ = await claimed(other, scene.world.run)
    answer = await talk.ask("a" * 60)
    assert answer["choices"][0]["finish_reason"] == "length", "what is left of the context"
    talk.messages.append({"role": "user", "content": "more"})
    one_line(await talk.send(), 409, "context", "finish it")
    (await talk.post("finish")).raise_for_status()
