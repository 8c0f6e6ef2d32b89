"""From a batch record to what a learner is given: masked and kept tokens exactly as the record says, or no step at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from towline.contract.codec import digest
from towline.contract.control import BatchRecord, BatchRow, OverStale, OverStaleRow
from towline.contract.entries import BaseEntry, OpenEntry, VersionEntry
from towline.contract.task import PromptRef, SamplingParams, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory
from towline.errors import InvariantError
from towline.learner.advantages.group_normalised import group_normalised
from towline.learner.rows import Bound, Gathered, assemble, open_row
from towline.store.lineage import Lineage

PROMPT = 3


def line(depths: int) -> Lineage:
    """Entry 0, an epoch, and version 1 + d at depth d."""
    lineage = Lineage()
    plain: dict[str, Any] = dict(prev="p", at=0.0)
    lineage.extend(BaseEntry(number=0, source="m", revision=None, anchor="a", layout_digest="l", model_digest="m", write_id="w",
                             **(plain | {"prev": None})))  # fmt: skip
    lineage.extend(OpenEntry(number=1, base=0, base_digest="d", depth=0, batch_cursor=0, checkpoint=None, write_id="o", **plain))
    for depth in range(1, depths + 1):
        lineage.extend(VersionEntry(
            number=depth + 1, write_id=f"w{depth}", epoch=1, base=lineage.latest, base_digest="d", depth=depth, skipped=(),
            representation="delta", codec="c", folder="f", manifest_digest="m", layout_digest="l", model_digest="m", density=0.1,
            wire_bytes=1, model_bytes=1, step=1, batch_cursor=0, checkpoint=None, probe=None, encode_seconds=0, upload_seconds=0,
            verify_seconds=0, **plain))  # fmt: skip
    return lineage


def sampled(group: int, sample: int, *pieces: tuple[int, int]) -> bytes:
    """(version, tokens) after the prompt."""
    spans, at = [], PROMPT
    for version, tokens in pieces:
        spans.append(VersionSpan(at, at + tokens, version, "retract" if spans else "start"))
        at += tokens
    mask = np.r_[np.zeros(PROMPT, np.uint8), np.ones(at - PROMPT, np.uint8)]
    return encode_trajectory(Trajectory(
        run="r", lane="train", group=group, sample=sample, group_size=2, task_sequence=1, attempt=0,
        prompt_ref=PromptRef("s", 0, 0), reference={}, tokens=np.arange(at, dtype=np.int32), loss_mask=mask,
        logprobs=np.where(mask == 1, -0.5, np.nan).astype(np.float32), version_spans=tuple(spans),
        segments=(Segment(0, PROMPT, "prompt"), Segment(PROMPT, at, "policy")), finish="stop",
        sampling=SamplingParams(max_tokens=9), seed=0, engine="e", replica="w", timings=Timings(pulled_at=0.0, finished_at=0.0),
    ))  # fmt: skip


def gather(
    *rows: tuple[tuple[int, int], ...], over: OverStale | None, mode: Any, most: int = 1, keep_off_line: bool = False,
    lineage: Lineage | None = None, for_depth: int = 3,
) -> Gathered:  # fmt: skip
    """Groups of two, rewards 0 and 1; each row's (version, tokens)."""
    data = [sampled(place // 2, place % 2, *pieces) for place, pieces in enumerate(rows)]
    record = BatchRecord(
        writer="b/1", epoch=1, for_depth=for_depth, at=0.0,
        rows=tuple(BatchRow(place // 2, place % 2, place + 1, digest(item), float(place % 2), 0, 1)
                   for place, item in enumerate(data)),
        **({"over_stale": over} if over is not None else {}),
    )  # fmt: skip
    opened = [open_row(row, item) for row, item in zip(record.rows, data, strict=True)]
    return assemble(record, opened, advantage=group_normalised, vocabulary=100, lineage=lineage or line(3),
                    bound=Bound(most, keep_off_line, mode))  # fmt: skip


def mask(*rows: tuple[int, int], most: int = 1) -> OverStale:
    return OverStale(mode="mask", max_staleness=most, rows=tuple(OverStaleRow(*row) for row in rows))


V0, V1, V2, V3 = 0, 2, 3, 4
"""At depths 0 to 3; for depth 3 and a bound of 1, those below depth 2 are over it."""


def test_masked_tokens_have_no_gradient_and_all_else_is_as_it_was() -> None:
    whole = gather(((V2, 4),), ((V0, 2), (V2, 3)), over=None, mode="mask", most=3)
    found = gather(((V2, 4),), ((V0, 2), (V2, 3)), over=mask((1, 2)), mode="mask")
    assert found.gaps == []
    row, before = found.rows[1], whole.rows[1]
    assert row.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert row.versions.tolist() == [-1, -1, -1, -1, -1, V2, V2, V2]
    assert (row.staleness, before.staleness) == (1, 3)
    assert row.advantage == before.advantage
    assert row.tokens.tobytes() == before.tokens.tobytes(), "they're still read as context"
    assert before.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (found.masked_tokens, found.masked_rows, found.kept_tokens) == (2, 0, 0)


def test_a_row_that_is_masked_whole_is_no_gap_and_its_reward_counts_for_its_group() -> None:
    found = gather(((V0, 4),), ((V2, 3),), over=mask((0, 4)), mode="mask")
    assert [(row.group, row.sample) for row in found.rows] == [(0, 1)]
    assert (found.gaps, found.missing_rows, found.masked_rows, found.masked_tokens) == ([], 0, 1, 4)
    assert found.rows[0].advantage == pytest.approx(gather(((V2, 4),), ((V2, 3),), over=None, mode="mask").rows[1].advantage)
    assert found.reward_mean == 0.5


def test_kept_rows_are_trained_whole() -> None:
    over = OverStale(mode="keep", max_staleness=1, rows=(OverStaleRow(0, 4), OverStaleRow(1, 2)))
    found = gather(((V0, 4),), ((V1, 2), (V3, 1)), over=over, mode="keep")
    assert [row.loss_mask.sum() for row in found.rows] == [4, 3]
    assert [row.staleness for row in found.rows] == [3, 2]
    assert (found.kept_tokens, found.masked_tokens) == (6, 0)


@pytest.mark.parametrize(
    ("over", "mode", "code"),
    [
        (None, "mask", "staleness"),  # the record says nothing of a row over the bound
        (None, None, "staleness"),
        (mask((0, 3)), "mask", "staleness"),  # three tokens where there are two
        (mask((1, 2)), "mask", "staleness"),  # another row
        (mask((0, 2), (1, 1)), "mask", "staleness"),  # one row too many
        (mask((0, 2)), None, "over_stale"),  # the run allows none
        (mask((0, 2)), "keep", "over_stale"),  # the run keeps, the record masks
        (OverStale(mode="keep", max_staleness=1, rows=(OverStaleRow(0, 2),)), "mask", "over_stale"),
        (mask((0, 2), most=2), "mask", "over_stale"),  # judged by a looser bound than the run has
    ],
)
def test_a_record_that_isnt_what_the_rows_hold_or_the_run_allows_stops_the_run(over: Any, mode: Any, code: str) -> None:
    with pytest.raises(InvariantError) as caught:
        gather(((V0, 2), (V3, 1)), ((V2, 3),), over=over, mode=mode)
    assert caught.value.code == code


def test_a_batch_that_was_judged_by_a_tighter_bound_is_trained_as_its_record_says() -> None:
    found = gather(((V0, 2), (V3, 1)), ((V2, 3),), over=mask((0, 2), most=1), mode="mask", most=5)
    assert found.masked_tokens == 2


def test_a_version_off_the_line_counts_from_the_common_ancestor_for_the_mask_too() -> None:
    lineage = line(2)
    plain: dict[str, Any] = dict(prev="p", at=0.0, write_id="o2")
    lineage.extend(OpenEntry(number=4, base=V1, base_digest="d", depth=1, batch_cursor=0, checkpoint=None, **plain))
    # version V2 (depth 2) is off the line now: it counts as depth 1
    found = gather(((V2, 2),), ((V1, 3),), over=None, mode="mask", most=1, keep_off_line=True, lineage=lineage, for_depth=2)
    assert [row.staleness for row in found.rows] == [1, 1]
    with pytest.raises(InvariantError):
        gather(((V2, 2),), ((V1, 3),), over=None, mode="mask", most=0, keep_off_line=True, lineage=lineage, for_depth=2)
    found = gather(((V2, 2),), ((V1, 3),), over=mask((0, 2), (1, 3), most=0), mode="mask", most=0, keep_off_line=True,
                   lineage=lineage, for_depth=2)  # fmt: skip
    assert (found.rows, found.masked_rows) == ([], 2)
