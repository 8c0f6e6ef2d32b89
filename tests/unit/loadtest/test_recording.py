"""What is drawn from a recorded run is distributed as the run was: by scipy's two-sample Kolmogorov-Smirnov test, and within
groups by the correlation of their lengths; the engine and its environment repeat a recorded sample to the token."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp

from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.engine.base import GenerateRequest
from towline.engine.recording import Recorded, Recording, Turn, marked, read_recording
from towline.engine.synthetic import SyntheticEngine
from towline.errors import EngineError, UsageError
from towline.loadtest.record import record_lines, write_recording
from towline.loadtest.scenario import load_scenario
from towline.loadtest.task import RecordedAgent, recorded_prompts
from towline.simulate.lengths import Drawn, lengths_of
from towline.simulate.pipeline import Pipeline

SIZE = 4


def a_recording(*, groups: int = 400, seed: int = 1, speed: float = 50.0, failures: dict[str, int] | None = None) -> Recording:
    """Groups of 2 to 4 samples whose lengths share a factor: what one prompt makes long is long in all of them."""
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        factor, prompt = chance.lognormal(0, 0.8), int(chance.integers(10, 90))
        samples = []
        for _ in range(int(chance.integers(2, SIZE + 1))):
            turns = [max(1, round(factor * chance.lognormal(3, 0.4))) for _ in range(int(chance.geometric(0.5)))]
            tail = [Turn(tokens, 5) for tokens in turns[:-1]] + [Turn(turns[-1])]
            tools = float(chance.exponential(0.3)) if len(turns) > 1 else 0.0
            own = speed and float(speed * chance.uniform(0.5, 1.5))
            finish = chance.choice(["stop", "length", "tool_limit"], p=[0.7, 0.2, 0.1])
            samples.append(Recorded(prompt, tuple(tail), tools, own, str(finish)))  # type: ignore[arg-type]
        made.append(samples)
    count = sum(map(len, made))
    return Recording(source="test", samples=count, failures=failures or {}, group_size=SIZE, groups=made)


def written(tmp_path: Path, recording: Recording) -> str:
    path = tmp_path / "recorded.json"
    write_recording(recording, path)
    return str(path)


def a_scenario(tmp_path: Path, recording: Recording, **overrides: Any) -> Any:
    written(tmp_path, recording)
    path = tmp_path / "s.toml"
    path.write_text('[load]\nlengths_from = "recorded.json"\n')
    return load_scenario(path, overrides)


def intraclass(groups: list[list[float]]) -> float:
    """The one-way ANOVA estimate of the correlation within groups of logs, for groups of several sizes."""
    groups = [list(np.log(group)) for group in groups]
    everything = np.concatenate(groups)
    sizes = np.array([len(group) for group in groups])
    between = sum(len(group) * (np.mean(group) - everything.mean()) ** 2 for group in groups) / (len(groups) - 1)
    within = sum(((np.array(group) - np.mean(group)) ** 2).sum() for group in groups) / (sizes.sum() - len(groups))
    typical = (sizes.sum() - (sizes**2).sum() / sizes.sum()) / (len(groups) - 1)
    return float((between - within) / (between + (typical - 1) * within))


FACTS = {
    "tokens": (lambda one: one.policy_tokens, lambda one: one.tokens),
    "tools": (lambda one: one.tool_seconds, lambda one: one.tool_seconds),
    "speed": (lambda one: one.tokens_per_second, lambda one: one.tokens_per_second),
}


def drawn_groups(tmp_path: Path, recording: Recording, count: int = 500) -> list[list[Drawn]]:
    lengths = lengths_of(a_scenario(tmp_path, recording))
    return [lengths.group(number, SIZE, seed=3) for number in range(count)]


def test_what_is_drawn_is_distributed_as_what_was_recorded(tmp_path: Path) -> None:
    recording = a_recording()
    drawn = [one for group in drawn_groups(tmp_path, recording) for one in group]
    for recorded_fact, drawn_fact in FACTS.values():
        recorded = [recorded_fact(one) for group in recording.groups for one in group]
        # Groups are drawn whole, so that draws aren't independent: the test is stricter than its level says.
        assert ks_2samp(recorded, [drawn_fact(one) for one in drawn]).statistic < 0.07
    # That the test would notice: the same lengths, a third longer.
    tokens = [one.policy_tokens for group in recording.groups for one in group]
    assert ks_2samp(tokens, [1.33 * one.tokens for one in drawn]).statistic > 0.1


def test_lengths_within_a_group_go_together_as_they_did(tmp_path: Path) -> None:
    recording = a_recording()
    recorded = intraclass([[one.policy_tokens for one in group] for group in recording.groups])
    drawn = drawn_groups(tmp_path, recording)
    again = intraclass([[one.tokens for one in group[: len(set(group))]] for group in drawn])
    assert recorded > 0.4
    assert again == pytest.approx(recorded, abs=0.12)
    # Whereas samples that are drawn each for itself have nothing in common.
    loose = [one.tokens for group in drawn for one in group]
    random.Random(0).shuffle(loose)
    assert intraclass([loose[at : at + SIZE] for at in range(0, len(loose), SIZE)]) < 0.1


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    lengths = lengths_of(a_scenario(tmp_path, a_recording()))
    one, again, other = (lengths.group(0, SIZE, seed) for seed in (1, 1, 2))
    assert one == again != other


async def one_sample(engine: SyntheticEngine, agent: RecordedAgent, task: Task) -> tuple[list[tuple[int, int]], str, list[int]]:
    """(policy tokens, environment's tokens) by turn, the finish, the prompt; as a worker's episode runs it."""
    tokens = prompt = agent.reset(task)
    turns, policy = [], 0
    while True:
        done = await engine.generate(
            GenerateRequest(request_id=f"{policy}", tokens=tokens, sampling=task.sampling, seed=task.seed, position0=policy)
        )
        policy += len(done.tokens)
        step = await agent.step(done.tokens, done.finish)  # type: ignore[arg-type]
        turns.append((len(done.tokens), len(step.tokens)))
        if step.done:
            return turns, "tool_limit" if step.limit_reached else done.finish, prompt
        tokens = [*tokens, *done.tokens, *step.tokens]


async def test_engine_and_environment_repeat_a_groups_samples_to_the_token(tmp_path: Path) -> None:
    recording = a_recording(groups=40, speed=0.0)
    for at, group in enumerate(recording.groups):  # nobody waits for a tool here
        recording.groups[at] = [Recorded(one.prompt, one.turns, 0.0, 0.0, one.finish) for one in group]
    path = written(tmp_path, recording)
    source = recorded_prompts(None, 5, path, rows=30)
    engine = SyntheticEngine(slots=4, max_context_tokens=100_000, recorded=path)
    await engine.start(Path(), 0)
    for position in range(30):
        prompt = source.get(0, position)
        group = recording.groups[prompt.reference["recorded"]]
        found = []
        for sample in range(len(group)):
            task = Task(
                run="r", lane="train", group=position, sample=sample, group_size=len(group), prompt=pack_tokens(prompt.tokens),
                prompt_ref=PromptRef("p", 0, position), cursor=Cursor(0, position), reference=prompt.reference,
                sampling=SamplingParams(max_tokens=50_000, stop_token_ids=(0,)), seed=sample, not_before_depth=0,
                admitted_at=0.0, deadline=1e12,
            )  # fmt: skip
            turns, finish, tokens = await one_sample(engine, RecordedAgent(recorded=path), task)
            assert len(tokens) == max(group[0].prompt, 6)
            found.append((tuple(turns), finish))
        expected = [(tuple((turn.policy, turn.environment) for turn in one.turns), one.finish) for one in group]
        assert Counter(found) == Counter(expected), "each of the group's samples once"
    await engine.stop()


async def test_a_request_of_which_nothing_is_known_is_a_turn_by_its_seed_at_its_recorded_speed(tmp_path: Path) -> None:
    recording = a_recording(speed=0.0)
    engine = SyntheticEngine(slots=4, max_context_tokens=100_000, recorded=written(tmp_path, recording))
    await engine.start(Path(), 0)

    async def length(seed: int) -> int:
        sampling = SamplingParams(max_tokens=50_000, stop_token_ids=(0,))
        return len((await engine.generate(GenerateRequest(request_id="r", tokens=[1, 2], sampling=sampling, seed=seed))).tokens)

    found = [await length(seed) for seed in range(600)]
    assert found[:20] == [await length(seed) for seed in range(20)]
    # A sample is taken, and then one of its turns: weights of a turn are one over its sample's turns.
    samples = [one for group in recording.groups for one in group]
    chance = np.random.default_rng(0)
    expected = [int(chance.choice([turn.policy for turn in samples[i].turns])) for i in chance.integers(0, len(samples), 3000)]
    assert ks_2samp(found, expected).statistic < 0.07
    await engine.stop()


async def test_attempts_fail_as_often_as_they_did(tmp_path: Path) -> None:
    recording = a_recording(groups=200, speed=0.0, failures={"generate": 300})
    share = 300 / (recording.samples + 300)
    engine = SyntheticEngine(slots=4, max_context_tokens=100_000, recorded=written(tmp_path, recording))
    await engine.start(Path(), 0)
    failed = total = 0
    for group, samples in enumerate(recording.groups):
        for place, one in enumerate(samples):
            total, policy = total + 1, 0
            try:
                for turn in one.turns:
                    await engine.generate(
                        GenerateRequest(
                            request_id="r", tokens=marked([1] * 10, group, place), seed=total, position0=policy,
                            sampling=SamplingParams(max_tokens=50_000, stop_token_ids=(0,)),
                        )
                    )  # fmt: skip
                    policy += turn.policy
            except EngineError:
                failed += 1
    assert failed / total == pytest.approx(share, abs=4 * (share * (1 - share) / total) ** 0.5)
    await engine.stop()


def test_the_simulator_keeps_the_slots_busy_with_the_recorded_samples_time(tmp_path: Path) -> None:
    """A fleet-bound run trains slots / E[seconds of a sample] samples a second: renewal theory, from the recording alone."""
    recording = a_recording()
    zero = dict.fromkeys(("task_seconds", "score_seconds", "batch_seconds", "publish_seconds", "prepare_seconds"), 0.0)
    one = a_scenario(
        tmp_path, recording,
        **{
            "run.steps": 150, "buffer.group_size": SIZE, "buffer.groups_per_batch": 8, "buffer.max_staleness": 8,
            "load.workers": 8, "rollout.slots": 4, "load.trainer.step_seconds": 0.01,
            **{f"simulate.{name}": value for name, value in zero.items()},
        },
    )  # fmt: skip
    seen = Pipeline(one, seed=2).run()
    samples = [one for group in recording.groups for one in group]
    seconds = np.mean([one.policy_tokens / one.tokens_per_second + one.tool_seconds for one in samples])
    ends = [at for at, _ in seen.samples]
    low, high = len(ends) // 5, len(ends) - len(ends) // 5
    assert (high - low) / (ends[high] - ends[low]) == pytest.approx(32 / seconds, rel=0.1)


def test_what_replay_wrote_is_read(tmp_path: Path) -> None:
    row = {
        "lane": "train", "group": 7, "sample": 1, "problem": None, "finish": "tool_limit", "pulled_at": 100.0,
        "segments": [[0, 4, "prompt"], [4, 14, "policy"], [14, 17, "tool"], [17, 19, "environment"], [19, 29, "policy"]],
        "finished_at": 106.0, "queue_seconds": 0.5, "generate_seconds": 4.0,
    }  # fmt: skip
    lines = [json.dumps(one) for one in (row, row | {"sample": 0, "segments": row["segments"][:2]}, row | {"lane": "eval"})]
    found = record_lines(lines, "t.jsonl")
    assert (found.samples, found.group_size, found.failures) == (2, 2, {})
    alone, whole = found.groups[0]
    assert whole == Recorded(4, (Turn(10, 5), Turn(10)), 1.5, 5.0, "tool_limit")
    assert (alone.turns, alone.tool_seconds, alone.tokens_per_second) == ((Turn(10),), 0.0, 2.5)
    path = tmp_path / "r.json"
    write_recording(found, path)
    assert read_recording(str(path)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: no trajectory"),
        ('{"lane": "eval", "group": 1}', "no sample of lane train"),
        ('{"lane": "train"}', "line 1"),
    ],
    ids=["not JSON", "nothing of train", "no trajectory"],
)
def test_what_is_no_trajectory_is_refused_by_its_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        record_lines([text], "t.jsonl")


def test_a_scenario_takes_its_limits_from_the_recording_and_refuses_what_is_none(tmp_path: Path) -> None:
    recording = a_recording(groups=20)
    scenario = a_scenario(tmp_path, recording)
    longest = max(one.policy_tokens for group in recording.groups for one in group)
    assert scenario.settings.sampling.max_tokens == longest + 1
    assert scenario.settings.rollout.max_context_tokens > longest
    assert scenario.settings.prompts.environment.endswith(":RecordedAgent")
    with pytest.raises(UsageError, match="no recording"):
        load_scenario(tmp_path / "s.toml", {"load.lengths_from": "s.toml"})
    with pytest.raises(UsageError, match="synthetic"):
        load_scenario(tmp_path / "s.toml", {"rollout.engine": "torch"})
