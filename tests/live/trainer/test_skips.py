"""An optimiser step that isn't finite on its way to the LOG: counted, named in the version's entry, and the depth goes on."""

from __future__ import annotations

from collections.abc import Callable

from live.trainer.harness import on_stage
from towline.config import Settings

Make = Callable[..., Settings]


async def test_a_skipped_step_is_named_in_the_entry_and_the_next_batch_trains(make_settings: Make) -> None:
    broken_second_batch = {"kind": "loss", "first": 2, "last": 2}  # two minibatches a batch
    settings = make_settings(trainer={"loss": "unit.learner.custom_losses:Broken", "loss_arguments": broken_second_batch})
    async with on_stage(settings) as stage:
        await stage.train()
        versions = stage.versions()
        assert [entry.depth for entry in versions] == [1, 2, 3, 4]
        assert [entry.skipped for entry in versions] == [(), (1,), (), ()]
        assert [entry.skip_reasons or {} for entry in versions] == [{}, {"non_finite_loss": 2}, {}, {}]
        assert [entry.step for entry in versions] == [2, 2, 4, 6]
        assert (versions[1].density, versions[1].model_digest) == (0.0, versions[0].model_digest)
        assert versions[2].model_digest != versions[1].model_digest
        figures = stage.figures.plain()
        assert (figures["skipped_steps"], figures["skipped_batches"]) == (2, 1)
        assert figures["skip_reasons"] == {"non_finite_loss": 2}


async def test_a_batch_of_which_one_step_was_left_out_is_trained_and_still_named(make_settings: Make) -> None:
    settings = make_settings(
        run={"steps": 1},
        trainer={
            "loss": "unit.learner.custom_losses:Broken",
            "loss_arguments": {"kind": "overflow", "first": 1},
        },
    )
    async with on_stage(settings) as stage:
        await stage.train()
        entry = stage.versions()[0]
        assert (entry.skipped, entry.skip_reasons, entry.step) == ((), {"non_finite_gradient": 1}, 1)
        assert entry.density > 0
