"""Every end that a sample can come to is told apart, in words that say why."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from towline.config import Settings
from towline.trace.explain import DROPPED, explain
from towline.trace.life import (
    Attempt,
    BatchSeen,
    FailureSeen,
    Generated,
    Life,
    Scored,
    SpanSeen,
    TokenSeen,
    VersionSeen,
)
from towline.trace.screen import print_life

SETTINGS = Settings.model_validate(
    {
        "run": {"name": "small"}, "model": {"source": "m"}, "prompts": {"source": "m:p"}, "sampling": {"max_tokens": 4},
        "reward": {"function": "m:r"}, "buffer": {"groups_per_batch": 3},
    }
)  # fmt: skip
ATTEMPT = Attempt(task_sequence=5, number=0, at=1.0, reissued=None, not_before_depth=2, exact_version=None, deadline=9.0)
FAILURE = FailureSeen(at=2.0, task_sequence=5, delivery=1, stage="verify", final=True, reason="no sheet", replica="r0")
SCORED = Scored(at=4.0, reward=0.5, components={"exact": 0.0}, verifier="m:r", same_bytes=True)


def batch(**fields):
    values = {"sequence": 20, "epoch": 1, "for_depth": 3, "at": 5.0, "reward": 0.5, "least_depth": 2, "rows": 4}
    return BatchSeen(**{**values, "void_by": None, "same_bytes": True, **fields})


def into(**fields):
    return VersionSeen(**{"number": 8, "depth": 5, "at": 6.0, "skipped": False, "missing_rows": 0, "on_line": True, **fields})


def generated(tokens=6):
    made = tuple(
        TokenSeen(id=i, text=f"t{i}", logprob=None if i == 0 else -3.0, version=None if i == 0 else 7) for i in range(tokens)
    )
    span = SpanSeen(start=1, end=tokens, version=7, cut="start", depth=2, on_line=True)
    return Generated(
        sequence=3, digest="d", at=3.0, pulled_at=1.5, finished_at=2.5, queue_seconds=0.1, generate_seconds=0.2, replica="r0",
        engine="torch", attempt=0, task_sequence=5, finish="stop", seed=1, temperature=1.0, policy_tokens=tokens - 1,
        spans=(span,), tokens=made, prompt_text="t0", response_text="",
    )  # fmt: skip


def life(**fields):
    return Life(run="small", group=4, sample=1, group_size=2, lane="train", attempts=[ATTEMPT], **fields)


@pytest.mark.parametrize(
    ("told", "fate", "says"),
    [
        (life(), "open", "waits for a worker of depth 2 or more"),
        (life(failures=[FAILURE]), "open", "failed for good (verify: no sheet)"),
        (life(trajectory=generated()), "generated", "waits for the reward service"),
        (life(malformed="cut off"), "generated", "waits for the reward service"),
        (life(score=SCORED, group_rewards={1: 0.5}), "scored", "waits for its group: 1 of 2"),
        (life(score=SCORED, group_rewards={0: 1.0, 1: 0.5}), "scored", "waits for a batch of 3 groups"),
        (life(dropped="stale"), "dropped", "more than buffer.max_staleness depths behind the next batch); no trajectory"),
        (life(dropped="attempts", failures=[FAILURE]), "dropped", "its own last failure was verify: no sheet"),
        (life(dropped="deadline", score=SCORED, group_rewards={1: 0.5}), "dropped", "scored itself, 1 of its group weren't"),
        (
            life(dropped="a_new_reason", trajectory=generated()),
            "dropped",
            "a_new_reason; it was generated, never scored",
        ),
        (life(evaluated_version=6, evaluated_mean=0.25), "evaluated", "evaluation of version 6, whose mean reward is 0.2500"),
        (life(batches=[batch()]), "batched", "no version of it is committed yet"),
        (life(batches=[batch()], version=into()), "trained", "1 steps old, trained into version 8 (depth 5)"),
        (life(batches=[batch()], version=into(skipped=True)), "skipped", "changed nothing"),
        (life(batches=[batch(same_bytes=False)], version=into()), "missing", "was trained without it"),
        (
            life(batches=[batch()], version=into(), group_rewards={0: 1.0, 1: 1.0}),
            "trained",
            "the same reward, so its advantage is 0",
        ),
        (
            life(batches=[batch(void_by=9), batch(epoch=9, sequence=30)], version=into()),
            "trained",
            "in batch 9/3 (step 3), 1 steps old, trained into version 8 (depth 5); 1 earlier batches with it were voided",
        ),
        (life(batches=[batch(void_by=9)], score=SCORED, group_rewards={0: 1.0, 1: 0.5}), "scored", "waits for a batch"),
    ],
)
def test_a_fate_is_told_and_explained(told, fate, says):
    found, text = explain(told, SETTINGS)
    assert found == fate
    assert says in text


def test_every_reason_that_the_buffer_drops_for_has_its_meaning():
    """The buffer's README lists them in the row of `control.drop`."""
    readme = (Path(__file__).parents[3] / "services" / "towline" / "buffer" / "README.md").read_text()
    row = next(line for line in readme.splitlines() if line.startswith("| control.cancel, control.drop"))
    named = set(re.findall(r"`([a-z_]+)`", row))
    assert len(named) > 10
    assert set(DROPPED) == named
    for reason in named:
        fate, text = explain(life(dropped=reason), SETTINGS)
        assert fate == "dropped"
        assert f"{reason} ({DROPPED[reason]})" in text


def test_it_is_said_where_a_dropped_prompt_went_and_what_masking_took():
    assert explain(life(dropped="stale", requeued=True), SETTINGS)[1].endswith("admitted again, as a new group")
    assert explain(life(dropped="stale", prompt_again_in=9), SETTINGS)[1].endswith("its prompt is in group 9 again")
    assert "turned away: unpaced" in explain(life(dropped="unpaced", admitted=False), SETTINGS)[1]
    masked = life(batches=[batch(over_stale="mask", over_stale_tokens=2)], version=into())
    assert "2 of its tokens were over the staleness bound and had no gradient" in explain(masked, SETTINGS)[1]


def test_a_sample_whose_admission_was_purged_may_have_had_its_end():
    told = life(trajectory=generated(), control_begins=900)
    told.attempts = []
    assert explain(told, SETTINGS)[1].endswith("or its end was decided before CONTROL 900, where what is left of CONTROL begins")
    assert "900" not in explain(life(trajectory=generated(), control_begins=900), SETTINGS)[1]


def shown(told, **options):
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    print_life(console, told, **options)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_screen_tells_it_in_the_order_of_the_times():
    told = life(trajectory=generated(), score=SCORED, batches=[batch()], version=into(), failures=[FAILURE])
    text = shown(told)
    order = ["admitted", "pulled by a worker", "failed: verify", "finished", "in the stream", "scored", "batched", "committed"]
    body = text[text.rindex("00:00:01.000") :]
    assert [body.index(name) for name in order] == sorted(body.index(name) for name in order)
    assert "'t3' 3 -3.000" in text
    assert "[1, 6) version 7 depth 2" in text


def test_a_long_response_is_cut_on_the_screen_unless_all_of_it_is_asked_for():
    told = life(trajectory=generated(200))
    assert "'t100' 100" not in shown(told)
    assert "'t199' 199" in shown(told)
    assert "'t100' 100" in shown(told, all_tokens=True)
