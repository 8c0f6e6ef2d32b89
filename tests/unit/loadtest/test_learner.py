"""The synthetic learner keeps a learner's promises: its weights follow from seed and step, also after a restore."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from towline.delta.files import save_folder
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.learner.base import TrainBatch, pack_rows
from towline.loadtest.learner import SyntheticLearner
from towline.loadtest.model import change, weights
from towline.loadtest.plan import write_plan
from towline.loadtest.scenario import at_addresses, load_scenario


def digest(state: ModelState) -> str:
    return model_digest(tensor_digests(state))


def learner(tmp_path: Path) -> SyntheticLearner:
    path = tmp_path / "s.toml"
    path.write_text("[load.trainer]\nstep_seconds = 0\nchanged_share = 0.05\n")
    scenario = load_scenario(path)
    settings = at_addresses(scenario, scenario.settings.bus, scenario.settings.store, tmp_path, "r")
    write_plan(settings, scenario.load)
    folder = tmp_path / "model"
    if not folder.exists():
        save_folder(weights(4096, seed=3), folder)
    return SyntheticLearner(folder, settings, seed=1)


def batch() -> TrainBatch:
    return pack_rows(0, [])


def test_after_a_restore_the_same_steps_give_the_same_weights(tmp_path: Path) -> None:
    one = learner(tmp_path)
    one.train(batch())
    saved, before = one.checkpoint(), digest(one.state())
    one.train(batch())
    again = learner(tmp_path)
    again.restore(saved)
    assert digest(again.state()) == before
    again.train(batch())
    assert (again.step, digest(again.state())) == (one.step, digest(one.state()))


def test_a_state_that_was_given_out_stays_as_it_is(tmp_path: Path) -> None:
    one = learner(tmp_path)
    state = one.state()
    before = digest(state)
    assert one.train(batch()).trained
    assert digest(state) == before != digest(one.state())


def test_a_step_moves_about_the_share_by_one_ulp_and_stays_finite() -> None:
    tensor = next(iter(weights(1 << 16, seed=0).values())).data
    moved = change(tensor, 0.1, np.random.default_rng(0))
    before, after = (data.view("<u2").astype(np.int32) for data in (tensor, moved))
    differs = before != after
    assert 0.07 < differs.mean() <= 0.1
    assert set(np.abs(before - after)[differs]) == {1}
    assert np.isfinite((after.astype(np.uint32) << 16).view(np.float32)).all()
