"""`towline trajectories list|show`: what the policy sampled and what it was given for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any

import typer

from towline.errors import MalformedError, MissingError, UsageError

app = typer.Typer(help="Sampled trajectories of a run.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: a line for each trajectory.")]


@app.command("list")
def list_trajectories(
    target: Target,
    group: Annotated[int | None, typer.Option(help="Only this group's.")] = None,
    last: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """The newest trajectories, the newest last, with their rewards."""
    for row in asyncio.run(_list(target, group, last)):
        if as_json:
            print(json.dumps(row))
        elif row["problem"]:
            print(f"{row['sequence']:>8}  {row['subject']}  malformed: {row['problem']}")
        else:
            reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
            name = f"{row['group']}.{row['sample']}"
            print(f"{row['sequence']:>8}  {name:>12}  {row['lane']:5}  versions {row['version_start']}-{row['version_end']}  "
                  f"{row['policy_tokens']} of {row['tokens']} tokens  {row['finish']:8}  reward {reward}")  # fmt: skip


@app.command()
def show(
    target: Target,
    sample: Annotated[str, typer.Argument(metavar="GROUP.SAMPLE", help="As `list` prints it.")],
    as_json: Json = False,
) -> None:
    """One trajectory, token by token."""
    found = asyncio.run(_show(target, sample))
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        if key not in ("rows", "text"):
            print(f"{key:16} {value}")
    if found["text"]:
        print(f"{'prompt':16} {found['text']['prompt']!r}\n{'response':16} {found['text']['response']!r}")
    print(f"{'position':>8}  {'token':>8}  {'logprob':>9}  version")
    for position, token, logprob, version in found["rows"]:
        print(
            f"{position:>8}  {token:>8}  {'' if logprob is None else f'{logprob:9.4f}':>9}  {'' if version is None else version}"
        )


async def _list(target: str, group: int | None, last: int) -> list[dict[str, Any]]:
    from towline.bus.topology import TRAJECTORY
    from towline.contract.trajectory import decode_trajectory
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    rows: list[dict[str, Any]] = []
    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        bus = access.bus
        subjects, start = None, 1
        if group is not None:
            subjects = [bus.topology.subject(f"trajectory.{group}.*")]
        else:
            start = max((await bus.stream_state(TRAJECTORY)).last_sequence - last + 1, 1)
        async with contextlib.aclosing(bus.read(TRAJECTORY, start=start, subjects=subjects, follow=False)) as messages:
            async for message in messages:
                row: dict[str, Any] = {"sequence": message.sequence, "subject": bus.topology.relative(message.subject)}
                try:
                    trajectory = decode_trajectory(message.data)
                except MalformedError as error:
                    rows.append(row | {"problem": error.message})
                    continue
                rows.append(row | _facts(trajectory) | {"problem": None})
        rows = rows[-last:]
        for row in rows:
            if not row["problem"]:
                row["reward"] = await _reward(bus, row["group"], row["sample"])
    return rows


async def _show(target: str, sample: str) -> dict[str, Any]:
    from towline.bus.topology import TRAJECTORY
    from towline.contract.trajectory import decode_trajectory
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    group, _, index = sample.partition(".")
    if not (group.isdecimal() and index.isdecimal()):
        raise UsageError(f"{sample!r}: use GROUP.SAMPLE, as in 12.3", code="sample_name")
    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        message = await access.bus.last(TRAJECTORY, access.bus.topology.trajectory(int(group), int(index)))
        if message is None:
            raise MissingError(f"no trajectory {sample} in run {settings.run.name}; see `towline trajectories list`")
        trajectory = decode_trajectory(message.data)
        reward = await _reward(access.bus, int(group), int(index))
        text = await asyncio.to_thread(_text, access.objects, settings.run.name, trajectory)
    versions = {position: span.version for span in trajectory.version_spans for position in range(span.start, span.end)}
    rows = [
        (position, int(token), float(trajectory.logprobs[position]) if position in versions else None, versions.get(position))
        for position, token in enumerate(trajectory.tokens)
    ]
    return {
        "sequence": message.sequence, **_facts(trajectory), "reward": reward, "seed": trajectory.seed,
        "engine": trajectory.engine, "replica": trajectory.replica, "reference": trajectory.reference, "text": text, "rows": rows,
    }  # fmt: skip


def _facts(trajectory: Any) -> dict[str, Any]:
    return {
        "group": trajectory.group, "sample": trajectory.sample, "lane": trajectory.lane,
        "version_start": trajectory.version_start, "version_end": trajectory.version_end,
        "policy_tokens": trajectory.policy_tokens, "tokens": int(trajectory.tokens.size), "finish": trajectory.finish,
    }  # fmt: skip


async def _reward(bus: Any, group: int, sample: int) -> float | None:
    from towline.bus.topology import OUTCOME
    from towline.contract.outcome import Score, decode_outcome

    message = await bus.last(OUTCOME, bus.topology.score(group, sample))
    outcome = None if message is None else decode_outcome(message.data)
    return outcome.reward if isinstance(outcome, Score) else None


def _text(objects: Any, run: str, trajectory: Any) -> dict[str, str] | None:
    """Prompt and response as text; None where nothing that reads the model's tokenizer is installed."""
    from towline.verifiers.base import sample_of
    from towline.verifiers.tokenizer import stored_tokenizer

    try:
        sample = sample_of(trajectory, stored_tokenizer(objects, run))
        return {"prompt": sample.prompt, "response": sample.text}
    except (UsageError, MissingError):
        return None
