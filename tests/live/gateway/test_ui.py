"""What the web view is told is what the run's records say, as other readers of them find it; who may ask; what it costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live.gateway.conftest import Scene
from live.worker.world import World
from support.planted_view import ENVIRONMENT, OUTSIDE, WORDS, PlantedRun
from support.waiting import until
from towline.bundle.source import BusSource
from towline.bundle.states import STATES, read_states
from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import BusSettings, TenantSettings
from towline.contract.groups import group_token
from towline.contract.trajectory import decode_trajectory
from towline.gateway.ui_routes import Ui, standing_alone
from towline.report.history import read_history
from towline.trace.gather import trace
from towline.view.feed import BusFeed


class Shown:
    """A planted run, the view over it without a server, and a source of all of its records."""

    def __init__(self, planted: PlantedRun, source: BusSource, ui: Ui, client: httpx.AsyncClient) -> None:
        self.planted, self.source, self.ui, self._client = planted, source, ui, client

    async def get(self, path: str, status: int = 200, **query: object):
        response = await self._client.get(f"/ui/api/{path}", params={name: str(v) for name, v in query.items()} or None)
        assert response.status_code == status, response.text
        return response.json()


def same(left: Any, right: Any) -> bool:
    """Equal, times to 10 microseconds: a message's is read in two ways."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return abs(left - right) < 1e-5 if isinstance(left, float) and isinstance(right, float) else left == right


@pytest.fixture
async def shown(bus_settings: BusSettings, tmp_path: Path, run_name: str) -> AsyncIterator[Shown]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    planted = PlantedRun(World(bus, tmp_path, run_name))
    await planted.plant()
    source = await BusSource.open(bus, planted.world.objects, planted.world.settings())
    app, ui = standing_alone(BusFeed(bus, source))
    running = asyncio.create_task(ui.run())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        found = Shown(planted, source, ui, client)

        async def whole() -> bool:
            return (await found.get("overview"))["reading"] is None

        await until(whole)
        yield found
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bus.close()


async def test_states_rewards_and_environments_are_those_of_the_whole_run_read_at_once(shown: Shown):
    listed = {row["id"]: row for row in (await shown.get("trajectories", limit=100))["rows"]}
    states = await read_states(shown.source)
    expected = {}
    async for message in shown.source.read(TRAJECTORY):
        t = decode_trajectory(message.data)
        name = f"{group_token(t.group)}.{t.sample}"
        expected[name] = states.state(shown.source, t.group, t.sample, message.data, scored=t.group != 5)
        if name in listed:
            environment = "external" if t.group == OUTSIDE else states.environment(t.group)
            assert listed[name]["environment"] == environment
            assert listed[name]["sequence"] == message.sequence
            assert (listed[name]["policy_tokens"], listed[name]["total_tokens"]) == (t.policy_tokens, t.tokens.size)
    assert {name: row["state"] for name, row in listed.items()} == {
        name: state for name, state in expected.items() if state != "generated"
    }
    assert {"trained", "dropped", "scored", "evaluated"} <= set(expected.values()) <= set(STATES)
    waiting = (await shown.get("trajectories", state="generated"))["rows"]
    assert [row["id"] for row in waiting] == ["5.0"]
    assert (await shown.get("overview"))["states"] == {"trained": 8, "dropped": 2, "scored": 3, "evaluated": 1}


async def test_a_life_is_the_one_that_trace_finds_in_all_records(shown: Shown):
    for group, sample in ((1, 2), (2, 3), (3, 0), (4, 1), (5, 0), (5, 1), (6, 0), (OUTSIDE, 0)):
        expected = await trace(shown.source, group, sample)
        answer = await shown.get(f"trajectories/{group_token(group)}.{sample}")
        life = answer["life"]
        plain = json.loads(json.dumps(expected.plain()))
        assert (life["fate"], life["explanation"]) == (plain["fate"], plain["explanation"])
        for name in (
            "batches",
            "batch",
            "score",
            "group_rewards",
            "version",
            "replicas",
            "dropped",
            "timeline",
            "attempts",
            "failures",
            "dead",
        ):
            assert same(life[name], plain[name]), name
        if plain["trajectory"] is None:
            assert [failure["reason"] for failure in life["failures"]] == ["no answer sheet"]
            assert answer["tokens"] is None
            continue
        tokens = plain["trajectory"]["tokens"]
        assert answer["tokens"]["ids"] == [token["id"] for token in tokens]
        assert answer["tokens"]["logprobs"] == pytest.approx([token["logprob"] for token in tokens])
        assert answer["tokens"]["texts"] == [WORDS.get(token["id"], f"w{token['id']}") for token in tokens]
        assert [one["kind"] for one in life["trajectory"]["segments"]] == ["prompt", "policy", "tool", "policy"]
        assert life["trajectory"]["seed"] == str(2**62 + sample), "a seed is more than JavaScript's numbers hold"


async def test_curves_and_versions_are_those_of_the_history_and_the_log(shown: Shown):
    history, curves = await read_history(shown.source), await shown.get("curves")
    assert curves["depth"] == [point.depth for point in history.batches]
    assert curves["reward"] == [point.reward_mean for point in history.batches]
    assert list(zip(curves["eval_depth"], curves["eval_mean"], strict=True)) == history.evals
    assert curves["wire_bytes"] == [entry.wire_bytes for entry in history.versions]
    rows = (await shown.get("versions"))["rows"]
    assert [row["number"] for row in rows] == sorted(shown.planted.versions, reverse=True)
    first, second, last = shown.planted.versions
    by_number = {row["number"]: row for row in rows}
    assert {ack["replica"] for ack in by_number[second]["acks"]} == {"near", "far"}
    assert [(ack["replica"], ack["now"]) for ack in by_number[last]["acks"]] == [("near", True)]
    assert by_number[second]["acks"][0]["after_seconds"] == pytest.approx(1.0, abs=1e-3)
    assert by_number[second]["eval_mean"] == 0.75
    assert (await shown.get("versions", before=last, limit=1))["rows"][0]["number"] == second
    replicas = {row["replica"]: row for row in (await shown.get("replicas"))["rows"]}
    assert (replicas["near"]["version"], replicas["far"]["version"]) == (last, second)
    assert replicas["far"]["behind_seconds"] > 0
    assert first == 0


async def test_filters_and_pages(shown: Shown):
    async def ids(**query: object) -> list[str]:
        return [row["id"] for row in (await shown.get("trajectories", **query))["rows"]]

    assert set(await ids(step=1)) == {f"2.{sample}" for sample in range(4)}
    assert set(await ids(id="3")) == {"3.0", "3.1"}
    assert await ids(id="2.3") == ["2.3"]
    assert set(await ids(reward="0.5:0.75", lane="train")) == {"1.2", "1.3", "2.2", "2.3"}
    assert set(await ids(version=shown.planted.versions[1])) == {*(f"2.{s}" for s in range(4)), "6.0"}
    assert set(await ids(environment="external")) == {f"{group_token(OUTSIDE)}.0"}
    assert set(await ids(environment=ENVIRONMENT, state="scored")) == {"4.0", "4.1"}
    assert await ids(environment="nothing:Such") == []
    everything = await ids(limit=100)
    paged, before = [], ""
    while True:
        page = await shown.get("trajectories", limit=4, before=before)
        paged += [row["id"] for row in page["rows"]]
        if page["next"] is None:
            break
        before = page["next"]
    assert paged == everything
    assert len(everything) == 14


ODD = {
    "trajectories?state=lost": "state=lost: use one of",
    "trajectories?reward=much": "use a number or FROM:TO",
    "trajectories?step=nan": "use a number or FROM:TO",
    "trajectories?id=x.y": "use GROUP or GROUP.SAMPLE",
    "trajectories?before=-1": "use a whole number",
    "trajectories?limit=99999999999999999999": "use a whole number",
    "trajectories/12": "use GROUP.SAMPLE",
    "dead/x": "use a whole number",
}


async def test_an_odd_question_gets_one_line_that_says_how(shown: Shown):
    for path, said in ODD.items():
        assert said in (await shown.get(path, 400))["error"]["message"], path


async def test_what_is_not_there_is_not_found(shown: Shown):
    await shown.get("trajectories/999.0", 404)
    await shown.get("dead/999", 404)
    await shown.get("nothing", 404)


async def test_dead_letters_are_told_and_opened(shown: Shown):
    (row,) = (await shown.get("dead"))["rows"]
    assert (row["stage"], row["sample"], row["nbytes"]) == ("reward", "5.1", 6)
    opened = await shown.get(f"dead/{row['sequence']}")
    assert opened["content"] == {"unreadable": b"\xff\x00what".hex()}
    assert (await shown.get("dead", stage="publisher"))["rows"] == []


async def test_what_comes_later_shows_and_the_same_answer_is_not_sent_again(shown: Shown):
    before = await shown.get("overview")
    assert before["ended"] is None
    response = await shown._client.get("/ui/api/curves")
    again = await shown._client.get("/ui/api/curves", headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304
    await shown.planted.generated(7, 0, 1)
    await shown.planted.scored(7, 0, 1, reward=0.1)
    await shown.planted.batch(2, [(7, 0)])
    await shown.planted.end()

    async def ended() -> bool:
        return (await shown.get("overview"))["ended"] == "steps"

    await until(ended)
    assert (await shown.get("trajectories", id="7"))["rows"][0]["state"] == "batched"
    changed = await shown._client.get("/ui/api/curves", headers={"If-None-Match": response.headers["etag"]})
    assert changed.status_code == 200
    assert changed.json()["depth"] == [0, 1, 2]


async def test_a_view_of_localhost_answers_no_other_name(shown: Shown):
    for name, status in (("localhost", 200), ("127.0.0.1:80", 200), ("[::1]", 200), ("evil.example", 403), ("", 403)):
        response = await shown._client.get("/ui/api/overview", headers={"Host": name})
        assert response.status_code == status, name
        assert response.headers["content-security-policy"].startswith("default-src 'none'")


async def test_nothing_is_read_while_nobody_looks(shown: Shown, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("towline.view.reading.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("towline.view.reading.EVERY_SECONDS", 0.01)
    await shown.get("overview")
    await asyncio.sleep(0.5)
    revision = shown.ui.reading.revision
    await shown.planted.generated(8, 0, 1)
    await asyncio.sleep(0.5)
    assert shown.ui.reading.revision == revision

    async def seen() -> bool:
        return (await shown.get("overview"))["trajectories"] == shown.planted.sequences[8, 0]

    await until(seen)


async def test_the_gateway_serves_it_to_its_tenants_alone_and_not_at_all_where_it_is_off(scene: Scene):
    scene.seed()
    await scene.worker(engine="synthetic")
    tenants = {"me": TenantSettings(token="s3cret-token-of-mine")}
    client = await scene.gateway(tenants=tenants)
    page = await client.get("/", follow_redirects=True)
    assert (page.status_code, page.url.path) == (200, "/ui/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert (await client.get("/ui/js/main.js")).status_code == 200
    for path in ("overview", "curves", "versions", "replicas", "trajectories", "trajectories/1.0", "dead", "dead/1"):
        for headers in ({}, {"Authorization": "Bearer s3cret"}, {"Authorization": "Basic s3cret-token-of-mine"}):
            refused = await client.get(f"/ui/api/{path}", headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error"), path
    mine = await client.get("/ui/api/overview", headers={"Authorization": "Bearer s3cret-token-of-mine", "Host": "gw.example"})
    assert (mine.status_code, mine.json()["run"]) == (200, scene.world.run)
    posted = await client.post("/ui/api/overview", headers={"Authorization": "Bearer s3cret-token-of-mine"})
    assert posted.status_code == 405
    off = await scene.gateway(ui=False)
    for path in ("/ui", "/ui/", "/ui/api/overview", "/ui/js/main.js"):
        assert (await off.get(path)).status_code == 404, path
    assert (await off.get("/v1/models")).status_code == 200
