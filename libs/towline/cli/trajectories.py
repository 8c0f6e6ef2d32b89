"""`towline trajectories list|show|export`: what the policy sampled and what it was given for it."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli.paths import to_write
from towline.cli.source import SourceArgument, open_source
from towline.contract.groups import group_token, parse_group
from towline.errors import MissingError, UsageError
from towline.runtime.terminal import say

if TYPE_CHECKING:
    from towline.bundle.select import Filter, Selected
    from towline.contract.trajectory import Trajectory
    from towline.store.objects import ObjectStore

app = typer.Typer(help="Sampled trajectories of a run.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON: a line for each trajectory.")]
Group = Annotated[str | None, typer.Option(help="Only this group's: 12, or ext-12 for one from outside.")]
Versions = Annotated[str | None, typer.Option(metavar="FROM:TO", help="A policy token is of a version in this range.")]
Rewards = Annotated[str | None, typer.Option("--reward", metavar="FROM:TO", help="The reward is in this range.")]
Finish = Annotated[str | None, typer.Option(help="stop, length, tool_limit or deadline.")]
Replica = Annotated[str | None, typer.Option(help="Only what this replica sampled.")]
Lane = Annotated[str | None, typer.Option(help="train or eval.")]
Prompt = Annotated[str | None, typer.Option(metavar="SOURCE[:INDEX[:EPOCH]]", help="Only of this prompt.")]
Times = Annotated[
    str | None,
    typer.Option(
        "--time", metavar="FROM..TO", help="When they arrived: Unix seconds, or 2026-05-01T12:30 (UTC where no zone stands)."
    ),
]
Environment = Annotated[str | None, typer.Option(help="Only of this environment, as the tasks name it.")]
State = Annotated[
    str | None,
    typer.Option(help="What became of them: trained, skipped, missing, batched, evaluated, dropped, scored or generated."),
]


@app.command("list")
def list_trajectories(
    target: SourceArgument,
    group: Group = None,
    version: Versions = None,
    reward: Rewards = None,
    finish: Finish = None,
    replica: Replica = None,
    lane: Lane = None,
    prompt: Prompt = None,
    time: Times = None,
    environment: Environment = None,
    state: State = None,
    last: Annotated[int, typer.Option("--limit", "--last", min=1, help="At most so many, the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """The newest trajectories, the newest last, with their rewards."""
    wanted = make_filter(group, version, reward, finish, replica, lane, prompt, time, environment, state)
    found = asyncio.run(_list(target, wanted, last))
    for item in found:
        say(json.dumps(row_of(item)) if as_json else line_of(item))
    if not found and not as_json:
        print("no trajectory matches, or none is there yet")


@app.command()
def show(
    target: SourceArgument,
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
            say(f"{key:16} {value}")
    if found["text"]:
        say(f"{'prompt':16} {found['text']['prompt']!r}")
        say(f"{'response':16} {found['text']['response']!r}")
    print(f"{'position':>8}  {'token':>8}  {'logprob':>9}  version")
    for position, token, logprob, version in found["rows"]:
        print(
            f"{position:>8}  {token:>8}  {'' if logprob is None else f'{logprob:9.4f}':>9}  {'' if version is None else version}"
        )


@app.command("export")
def export_bundle(
    target: SourceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="BUNDLE", callback=to_write, help="The folder to make.")],
    checkpoint: Annotated[
        list[int] | None, typer.Option("--checkpoint", min=0, metavar="VERSION", help="Its checkpoint too, for `replay --from`.")
    ] = None,
    deltas: Annotated[bool, typer.Option(help="The versions' weights too: by how much a replay differs.")] = True,
    parquet: Annotated[bool, typer.Option("--parquet", help="Trajectories and outcomes as Parquet too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The run as one folder that can be replayed, traced and scored again anywhere. No secret of the settings goes in."""
    from towline.bundle.export import export

    async def run() -> Any:
        async with open_source(target) as source:
            return await export(source, output, checkpoints=checkpoint or (), deltas=deltas, parquet=parquet)

    done = asyncio.run(run())
    manifest = done.manifest
    nbytes = sum(file.nbytes for file in manifest.files)
    if as_json:
        streams = {key: stream.messages for key, stream in manifest.streams.items()}
        print(json.dumps({"bundle": str(done.folder), "sha256": done.digest, "files": len(manifest.files), "bytes": nbytes,
                          "streams": streams, "checkpoints": manifest.checkpoints, "left_out": manifest.left_out}))  # fmt: skip
        return
    from towline.report.progress import size

    print(f"{done.folder}: {len(manifest.files)} files, {size(nbytes)}, sha256 {done.digest}")
    print("  " + ", ".join(f"{stream.messages} {key}" for key, stream in manifest.streams.items()) + f", {manifest.head + 1} LOG")
    for line in manifest.left_out:
        say(f"  left out: {line}")


def make_filter(
    group: str | None,
    versions: str | None,
    reward: str | None,
    finish: str | None,
    replica: str | None,
    lane: str | None,
    prompt: str | None,
    time: str | None,
    environment: str | None,
    state: str | None,
) -> Filter:
    """The options as a filter; `UsageError` for a range that is none."""
    from towline.bundle.select import Filter

    numbers = _range(versions, "--version")
    number = None if group is None else parse_group(group)
    if group is not None and number is None:
        raise UsageError(f"--group {group!r}: give its number, as in 12, or ext-12 for one from outside", code="group")
    return Filter(
        group=number,
        lane=lane,
        finish=finish,
        replica=replica,
        prompt=prompt,
        versions=None if numbers is None else _whole(*numbers),
        reward=_range(reward, "--reward"),
        time=_range(time, "--time", _moment),
        environment=environment,
        state=state,
    )


def row_of(item: Selected) -> dict[str, Any]:
    """A trajectory as `list --json` prints it."""
    row = {"sequence": item.message.sequence, "subject": item.message.subject, "at": item.message.at, "problem": item.problem}
    if item.trajectory is not None:
        row |= _facts(item.trajectory) | {"reward": item.score.reward if item.score else None}
        row |= {} if item.state is None else {"state": item.state}
    return row


def line_of(item: Selected) -> str:
    """The same for people."""
    sequence, found = item.message.sequence, item.trajectory
    if found is None:
        return f"{sequence:>8}  {item.message.subject}  malformed: {item.problem}"
    reward = "-" if item.score is None else f"{item.score.reward:.3f}"
    name = f"{group_token(found.group)}.{found.sample}"
    state = "" if item.state is None else f"  {item.state}"
    return (
        f"{sequence:>8}  {name:>12}  {found.lane:5}  versions {found.version_start}-{found.version_end}  "
        f"{found.policy_tokens} of {found.tokens.size} tokens  {found.finish:8}  reward {reward}{state}"
    )


def parse_sample(sample: str) -> tuple[int, int]:
    """GROUP.SAMPLE as numbers; a group from outside is `ext-17`, and -17 below."""
    token, _, index = sample.partition(".")
    group = parse_group(token)
    if group is None or not index.isdecimal():
        raise UsageError(f"{sample!r}: use GROUP.SAMPLE, as in 12.3 (ext-12.3 for one from outside)", code="sample_name")
    return group, int(index)


async def _list(target: str, wanted: Filter, count: int) -> list[Selected]:
    from towline.bundle.select import newest

    async with open_source(target) as source:
        return await newest(source, wanted, count)


async def _show(target: str, sample: str) -> dict[str, Any]:
    from towline.bundle.select import score_of
    from towline.bus.topology import TRAJECTORY
    from towline.contract.trajectory import decode_trajectory

    group, index = parse_sample(sample)
    async with open_source(target) as source:
        message = await source.last(TRAJECTORY, source.topology.trajectory(group, index))
        if message is None:
            raise MissingError(f"no trajectory {sample} in {source.where}; see `towline trajectories list`, `towline trace`")
        trajectory = decode_trajectory(message.data)
        score = await score_of(source, group, index)
        text = await asyncio.to_thread(_text, source.objects, source.settings.run.name, trajectory)
    versions = {position: span.version for span in trajectory.version_spans for position in range(span.start, span.end)}
    rows = [
        (position, int(token), float(trajectory.logprobs[position]) if position in versions else None, versions.get(position))
        for position, token in enumerate(trajectory.tokens)
    ]
    return {
        "sequence": message.sequence, **_facts(trajectory), "reward": score.reward if score else None,
        "components": score.components if score else {}, "seed": trajectory.seed, "engine": trajectory.engine,
        "reference": trajectory.reference, "text": text, "rows": rows,
    }  # fmt: skip


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "group": trajectory.group, "sample": trajectory.sample, "lane": trajectory.lane,
        "version_start": trajectory.version_start, "version_end": trajectory.version_end,
        "policy_tokens": trajectory.policy_tokens, "tokens": int(trajectory.tokens.size), "finish": trajectory.finish,
        "replica": trajectory.replica,
        "prompt": f"{trajectory.prompt_ref.source}:{trajectory.prompt_ref.index}:{trajectory.prompt_ref.epoch}",
    }  # fmt: skip


def _text(objects: ObjectStore, run: str, trajectory: Trajectory) -> dict[str, str] | None:
    """Prompt and response as text; None where nothing that reads the model's tokenizer is installed."""
    from towline.verifiers.base import sample_of
    from towline.verifiers.tokenizer import stored_tokenizer

    try:
        sample = sample_of(trajectory, stored_tokenizer(objects, run))
        return {"prompt": sample.prompt, "response": sample.text}
    except (UsageError, MissingError):
        return None


def _whole(low: float, high: float) -> tuple[int, int]:
    """The whole numbers from `low` to `high`, either of which may be infinite."""
    return math.ceil(min(max(low, 0.0), 2.0**53)), math.floor(max(min(high, 2.0**53), -1.0))


def _moment(text: str) -> float:
    """Unix seconds, from a number or a date and time."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _range(text: str | None, option: str, read: Callable[[str], float] = float) -> tuple[float, float] | None:
    """FROM..TO, of numbers also FROM:TO; either may be left out, and one value is a range of its own."""
    if text is None:
        return None
    numbers = not set(text) - set("0123456789.:-+einf")  # a time has colons of its own
    low, mark, high = text.partition(".." if ".." in text or not numbers else ":")
    try:
        first = read(low) if low else -math.inf
        last = (read(high) if high else math.inf) if mark else first
    except ValueError:
        what = "numbers" if read is float else "Unix seconds, or times as in 2026-05-01T12:30"
        raise UsageError(f"{option} {text!r}: use FROM..TO with {what}, either may be left out", code="range") from None
    if not first <= last:
        raise UsageError(f"{option} {text!r}: it ends before it begins", code="range")
    return first, last
