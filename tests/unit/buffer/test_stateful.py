"""Random runs against the specification: outcomes in any order, twice and late, failures, forks, quarantines, and kill -9
between any two appends. A rebuilt buffer holds an equal state, at every moment."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towline.buffer.decide import decide
from towline.buffer.dump import dump, encode_state, load
from towline.buffer.policies.fifo import fifo
from towline.buffer.policies.freshest_first import freshest_first
from towline.buffer.policies.stalest_first import stalest_first
from towline.contract import control
from towline.contract.codec import encode
from towline.contract.groups import EXTERNAL
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.contract.task import VersionSpan
from unit.buffer.specification import Specification
from unit.buffer.world import World, rules

EXTERNALS = (-1, -2, -3)
INDEXES = ("complete", "open_train", "failing", "doomed", "stranded", "surplus", "by_version", "eval_scores",
           "flat", "requeue", "whole_offers", "offered_by", "totals")  # fmt: skip


class BufferMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        staleness=st.integers(0, 2), keep=st.booleans(), size=st.integers(1, 2), per_batch=st.integers(1, 2),
        every=st.integers(0, 2), flat=st.booleans(), over=st.sampled_from(["drop", "requeue", "mask_stale_tokens", "keep"]),
        rounds=st.sampled_from([0, 0, 2]), outside=st.integers(0, 1), admit=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from([stalest_first, fifo, freshest_first]), tail=st.sampled_from([0.0, 40.0]),
    )  # fmt: skip
    def start(self, staleness: int, keep: bool, size: int, per_batch: int, every: int, flat: bool, over: str, rounds: int,
              policy: Any, tail: float, outside: int, admit: bool) -> None:  # fmt: skip
        self.world = World(
            rules(max_staleness=staleness, keep_off_line=keep and staleness > 0, group_size=size, groups_per_batch=per_batch,
                  steps=5, eval_every=every, eval_prompts=2, filter_equal_rewards=flat, over_stale=over,
                  max_resample_rounds=rounds, policy=policy, tail_wait_seconds=tail, external_groups=outside,
                  admit_external=admit)
        )  # fmt: skip
        self.world.append(control.WriterRecord(writer="", at=0.0))
        self.world.base()
        self.world.open()
        self.at_rest = False

    def _append(self, record: control.ControlRecord) -> None:
        self.world.append(record)
        if isinstance(record, control.BatchRecord):
            Specification(self.world).check_batch(record)

    @rule()
    def settle(self) -> None:
        for _ in range(200):
            units = decide(self.world.view)
            assert units == decide(self.world.view), "deciding changes nothing"
            for unit in units:
                for record in unit:
                    self._append(record)
            if any(isinstance(r, control.AdmitRecord) or (isinstance(r, control.TaskRecord) and r.task.lane == "train")
                   for unit in units for r in unit):  # fmt: skip
                Specification(self.world).check_pacing()
            if not units:
                Specification(self.world).check_rest(self.world.now)
                return
        raise AssertionError("the decider never comes to rest")

    @rule(data=st.data())
    def die_while_appending(self, data: Any) -> None:
        """An atomic unit stands whole or not at all; anything else may stop anywhere."""
        units = decide(self.world.view)
        for unit in units[: data.draw(st.integers(0, len(units)), label="units appended")]:
            for record in unit:
                self._append(record)
        self.world.restart()

    @rule()
    def die(self) -> None:
        self.world.restart()

    @rule(omit=st.sampled_from([0, 0, 1, 2]), old=st.booleans(), commit=st.booleans())
    def rounds(self, omit: int, old: bool, commit: bool) -> None:
        self.a_round(omit=omit, old=old, commit=commit)

    def a_round(self, *, omit: int, old: bool, commit: bool) -> None:
        """Ordinary progress, so that runs get somewhere: most of what is open is scored, batched, trained and committed."""
        self.settle()
        awaited = [key for key in self._samples() if (key[0], key[1]) not in self._scored()]
        for group, sample, sequences, lane, exact in awaited[omit:]:
            line = self.world.lineage
            version = exact if exact is not None else (line.parent(line.latest) or 0) if old else line.latest
            score = self.world.score(group, sample, version, lane=lane, task_sequence=sequences[-1])
            self.world.outcomes.append(encode(score))
        self.world.read_outcomes()
        self.settle()
        if commit:
            self.a_version_is_committed(batches=1)

    @rule(rounds=st.integers(1, 3))
    def plain_rounds(self, rounds: int) -> None:
        for _ in range(rounds):
            self.a_round(omit=0, old=False, commit=True)

    def _scored(self) -> set[tuple[int, int]]:
        return {(o.group, o.sample) for o in map(decode_outcome, self.world.outcomes) if isinstance(o, Score)}

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    def _samples(self) -> list[tuple[int, int, list[int], str, int | None]]:
        """(group, sample, its task sequences, lane, exact version) of every sample that was ever admitted."""
        found: dict[tuple[int, int], tuple[int, int, list[int], str, int | None]] = {}
        for sequence, record in enumerate(self.world.records(), start=1):
            if isinstance(record, control.TaskRecord | control.ReissueRecord):
                task = record.task
                key = (task.group, task.sample)
                found.setdefault(key, (*key, [], task.lane, task.exact_version))[2].append(sequence)
        scored = self._scored()
        # Mostly samples that are still awaited: the newest ones, and those without a score.
        return [found[key] for key in sorted(found, key=lambda key: (key in scored, -key[0], key[1]))]

    @precondition(lambda self: self._samples())
    @rule(data=st.data(), read=st.booleans(), count=st.integers(1, 6))
    def scores_arrive(self, data: Any, read: bool, count: int) -> None:
        for _ in range(count):
            samples = self._samples()
            group, sample, sequences, lane, exact = samples[data.draw(st.integers(0, min(5, len(samples) - 1)), label="sample")]
            line = self.world.lineage
            versions = [exact] if exact is not None else sorted({line.latest, *line.versions()[-2:]})
            first = data.draw(st.sampled_from(versions), label="first version")
            last = data.draw(st.sampled_from([v for v in versions if v >= first]), label="last version")
            spans: tuple[VersionSpan, ...] = (VersionSpan(2, 4, first, "start"),)
            if last != first:
                spans = (VersionSpan(2, 3, first, "start"), VersionSpan(3, 4, last, "retract"))
            known = {(o.group, o.sample): o for o in map(decode_outcome, self.world.outcomes) if isinstance(o, Score)}
            score = known.get((group, sample)) or self.world.score(
                group, sample, spans=spans, lane=lane, task_sequence=data.draw(st.sampled_from(sequences), label="task"),
                reward=data.draw(st.sampled_from([0.0, 0.5, 1.0]), label="reward"),
            )  # fmt: skip
            self.world.outcomes.append(encode(score))
        if read:
            self.world.read_outcomes()

    @rule(
        group=st.sampled_from(EXTERNALS), sample=st.integers(0, 2), size=st.sampled_from([2, 2, 2, 1, 3]), whole=st.booleans(),
        old=st.booleans(), reward=st.sampled_from([0.0, 1.0, 1.0, float("inf")]), fails=st.sampled_from([False] * 7 + [True]),
    )  # fmt: skip
    def somebody_offers(
        self, group: int, sample: int, size: int, whole: bool, old: bool, reward: float, fails: bool
    ) -> None:  # fmt: skip
        """Twice, in any order, by any version, of any size that the sender says; sometimes it can't be verified."""
        line = self.world.lineage
        version = line.versions()[-1] if not old else line.path()[-2:][0]
        if fails:
            self.world.failed(group, sample, "verify", final=True, lane=EXTERNAL, task_sequence=0)
            return
        for index in range(size) if whole else (sample,):
            score = self.world.score(group, index, version, lane=EXTERNAL, group_size=size, task_sequence=0, reward=reward)
            self.world.outcome(score)

    @precondition(lambda self: self._samples())
    @rule(
        data=st.data(), read=st.booleans(), delivery=st.integers(1, 2), final=st.booleans(),
        stage=st.sampled_from(["generate", "not_ready", "stale", "malformed", "verify", "version_moved"]),
    )  # fmt: skip
    def a_failure_arrives(self, data: Any, read: bool, delivery: int, final: bool, stage: Any) -> None:
        group, sample, sequences, lane, _ = data.draw(st.sampled_from(self._samples()), label="sample")
        failure = Failure(
            run="world", lane=lane, group=group, sample=sample, delivery=delivery, stage=stage, reason="r", replica="w",
            task_sequence=data.draw(st.sampled_from(sequences), label="task"), final=final and stage in ("malformed", "verify"),
        )  # fmt: skip
        self.world.outcomes.append(encode(failure))
        if read:
            self.world.read_outcomes()

    @precondition(lambda self: self.world.view.goal is None and self._dropped())
    @rule(data=st.data())
    def somebody_asks_for_a_prompt_again(self, data: Any) -> None:
        """As requests.py grants it: of a train group that was dropped and not requeued."""
        number, task = data.draw(st.sampled_from(self._dropped()), label="group")
        self._append(control.RequeueRecord(writer="", dead=number + 1, group=number, task=task))

    def _dropped(self) -> list[tuple[int, Any]]:
        tasks = {task.group: task for task in self.world.tasks() if task.lane == "train"}
        state = self.world.state
        return [
            (record.group, tasks[record.group])
            for record in self.world.records()
            if isinstance(record, control.DropRecord) and record.group in tasks and record.requeue is not True
            and record.group not in state.requeued
        ]  # fmt: skip

    @rule()
    def outcomes_are_read(self) -> None:
        self.world.read_outcomes()

    @rule(batches=st.integers(1, 2))
    def versions_are_committed(self, batches: int) -> None:
        self.a_version_is_committed(batches)

    def a_version_is_committed(self, batches: int) -> None:
        line, state = self.world.lineage, self.world.state
        head = line.epoch_head(line.newest_epoch or 0)
        ready = [d for d in range(line.depth(head), state.next_depth) if state.batches[d].epoch == line.newest_epoch]
        if len(ready) >= batches and not line.quarantined(head):
            self.world.version(batches=batches)

    @precondition(lambda self: self.world.view.depth > 0)
    @rule(back=st.sampled_from([1, 1, 1, 2, 3]))
    def a_trainer_opens(self, back: int) -> None:
        base = self.world.lineage.path()[-back:][0]
        if self.world.lineage.depth(base) >= self.world.state.floor_depth:
            self.world.open(base=base)

    @precondition(lambda self: self.world.view.depth > 2)
    @rule()
    def the_head_is_quarantined(self) -> None:
        line = self.world.lineage
        if line.depth(line.path()[-2]) >= self.world.state.floor_depth:
            self.world.quarantine(line.latest)
            self.world.open()

    @precondition(lambda self: self.world.view.depth > 1)
    @rule(kept=st.integers(1, 3))
    def a_snapshot_makes_batches_final(self, kept: int) -> None:
        depth = max(self.world.view.depth - kept, self.world.state.floor_depth)
        self.world.append(control.SnapshotRecord(writer="", blob=b"b" * 16, covers=0, outcome_cursor=0, floor_depth=depth))

    @invariant()
    def sums_are_of_what_stands(self) -> None:
        if hasattr(self, "world"):
            assert self.world.state.totals == self.world.state.counted()

    @invariant()
    def a_rebuilt_buffer_is_equal(self) -> None:
        if not hasattr(self, "world"):
            return
        facts = dump(self.world.state)
        rebuilt = self.world.rebuilt(outcomes=self.world.applied_outcomes)
        assert dump(rebuilt) == facts
        again = load(dump(rebuilt))
        for name in INDEXES:
            index = getattr(self.world.state, name)
            assert getattr(rebuilt, name) == index, name
            assert getattr(again, name) == index, name
        assert encode_state(again)

    @invariant()
    def the_records_hold_together(self) -> None:
        if hasattr(self, "world"):
            Specification(self.world).check_records()


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
