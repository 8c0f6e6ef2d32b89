"""examples/external_trainer: weights by the store, rollouts by the gateway, each within the staleness that it asked for."""

from __future__ import annotations

from examples.external_trainer import trainer

from live.gateway.conftest import Scene
from towline.client.gateway import AsyncGateway
from towline.contract.entries import VersionEntry


async def test_a_trainer_outside_pushes_versions_that_the_fleet_serves_and_learns_from_their_samples(scene: Scene) -> None:
    policy = trainer.Policy(scene.world.objects, scene.world.run)
    await scene.worker(engine="torch", max_context_tokens=64, slots=64)
    http = await scene.gateway(max_choices=64)
    async with AsyncGateway(str(http.base_url)) as gateway:
        fresh = await trainer.train(policy, gateway, 2, staleness=0)
        assert [oldest for oldest, *_ in fresh] == [0, fresh[0][1]], "each of the newest version alone"
        assert all(difference < 0.02 for *_, difference in fresh), "the logprobs are the trainer's own, but for the rounding"
        stale = await trainer.train(policy, gateway, 6, staleness=1)
        pushed = [version for _, version, _, _ in fresh + stale]
        assert [oldest for oldest, *_ in stale] == pushed[: len(stale)], "the one before the newest is accepted"
        assert stale[-1][2] > fresh[0][2] + 0.1, "it learns"
        served = await gateway.wait_for_version(exact_version=pushed[-1], seconds=30)
        assert served.latest == pushed[-1]
    entries = [scene.world.log.entry(number) for number in pushed if scene.world.log.refresh() is not None]
    assert all(isinstance(entry, VersionEntry) for entry in entries)
    again = trainer.Policy(scene.world.objects, scene.world.run)
    assert (again.version, again.depth) == (pushed[-1], 8), "a restarted trainer goes on from the newest version"
    weights, before = again.model.state_dict(), policy.model.state_dict()
    assert all(weights[name].equal(before[name].bfloat16().float()) for name in policy._state)
