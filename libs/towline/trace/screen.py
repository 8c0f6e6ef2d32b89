"""A sample's life on one screen."""

from __future__ import annotations

import datetime
import math

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from towline.trace.life import Life, TokenSeen

FIRST_TOKENS, LAST_TOKENS = 40, 16
"""Shown of a longer response, unless all are asked for."""
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
_FATES = {"trained": "green", "evaluated": "green", "dropped": "red", "missing": "red", "skipped": "yellow"}


def print_life(console: Console, life: Life, *, all_tokens: bool = False) -> None:
    """Versions have a colour each; a logprob below ln(0.1) is bold: the policy didn't expect that token."""
    title = Text.assemble(
        (f"{life.name}", "bold"), f" of run {life.run}  ", (life.fate, f"bold {_FATES.get(life.fate, 'yellow')}")
    )
    parts: list[RenderableType] = [Text(life.explanation), _facts(life)]
    if life.trajectory is not None:
        parts.append(_tokens(life, all_tokens))
    parts.append(_timeline(life))
    console.print(Panel(Group(*parts), title=title, title_align="left"))


def _facts(life: Life) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()

    def row(name: str, text: str) -> None:
        table.add_row(name, Text(text))

    if life.prompt is not None:
        p = life.prompt
        row("prompt", f"{p['source']} row {p['index']}, pass {p['epoch']}; lane {life.lane}, group of {life.group_size}")
        if p["reference"]:
            row("reference", str(p["reference"]))
    if life.prompt_of is not None:
        row("again", f"its prompt is that of group {life.prompt_of}, which was dropped")
    for attempt in life.attempts:
        text = f"CONTROL {attempt.task_sequence}, attempt {attempt.number}, "
        wanted = attempt.exact_version
        text += f"version {wanted} exactly" if wanted is not None else f"depth {attempt.not_before_depth} or more"
        text += f"; issued again: {attempt.reissued}" if attempt.reissued is not None else ""
        text += f"; cancelled: {attempt.cancelled}" if attempt.cancelled is not None else ""
        row("task", text)
    for failure in life.failures:
        final = ", final" if failure.final else ""
        row("failure", f"{failure.stage}{final} on {failure.replica} (task {failure.task_sequence}): {failure.reason}")
    for reason in life.dead:
        row("dead letter", reason)
    if life.malformed is not None:
        row("trajectory", f"malformed: {life.malformed}")
    if life.trajectory is not None:
        t = life.trajectory
        row("trajectory", f"TRAJECTORY {t.sequence}, {t.digest}; {t.policy_tokens} of {len(t.tokens)} tokens, finish {t.finish}")
        row("worker", f"{t.replica}, engine {t.engine}, temperature {t.temperature:g}, seed {t.seed}; "
            f"{t.queue_seconds:.3f} s queued, {t.generate_seconds:.3f} s generating")  # fmt: skip
        spans = [
            f"[{s.start}, {s.end}) version {s.version}" + (f" depth {s.depth}" if s.depth is not None else " (unknown)")
            + ("" if s.on_line else " off the line") + (f" after {s.cut}" if s.cut != "start" else "")
            for s in t.spans
        ]  # fmt: skip
        row("versions", "; ".join(spans))
    if life.score is not None:
        s = life.score
        components = "".join(f", {name} {value:g}" for name, value in s.components.items())
        row("reward", f"{s.reward:g}{components}; {s.verifier}" + ("" if s.same_bytes else "; of other bytes than these"))
    if len(life.group_rewards) > 1:
        mean = math.fsum(life.group_rewards.values()) / len(life.group_rewards)
        listed = " ".join(f"{life.group_rewards[sample]:g}" for sample in sorted(life.group_rewards))
        row("group's rewards", f"{listed}  (mean {mean:.4g})")
    for batch in life.batches:
        void = "" if batch.void_by is None else f"; void: epoch {batch.void_by} forked below it"
        over = "" if batch.over_stale is None else f", {batch.over_stale_tokens} tokens over the bound ({batch.over_stale})"
        row("batch", f"CONTROL {batch.sequence}, epoch {batch.epoch}, for depth {batch.for_depth}, {batch.rows} rows, "
            f"staleness {batch.staleness}{over}{void}")  # fmt: skip
    if life.version is not None:
        row("version", f"{life.version.number}, depth {life.version.depth}")
    for ack in life.replicas:
        probe = "" if ack.probe_max_abs_diff is None else f", probe within {ack.probe_max_abs_diff:.2g}"
        row("replica", f"{ack.replica}: {ack.relation} (version {ack.version}{probe})")
    return table


def _tokens(life: Life, every: bool) -> RenderableType:
    assert life.trajectory is not None
    tokens = life.trajectory.tokens
    start = next((place for place, token in enumerate(tokens) if token.logprob is not None), len(tokens))
    prompt = life.trajectory.prompt_text
    shown: list[TokenSeen | None] = list(tokens[start:])
    if not every and len(shown) > FIRST_TOKENS + LAST_TOKENS:
        shown = [*shown[:FIRST_TOKENS], None, *shown[-LAST_TOKENS:]]
    versions = sorted({token.version for token in tokens if token.version is not None})
    colours = {version: _COLOURS[place % len(_COLOURS)] for place, version in enumerate(versions)}
    head = Text.assemble(("prompt ", "dim"), repr(prompt) if prompt is not None else f"{start} tokens")
    return Group(head, Columns([_token(token, colours) for token in shown], padding=(0, 2)))


def _token(token: TokenSeen | None, colours: dict[int, str]) -> Text:
    if token is None:
        return Text("…", style="dim")
    text = "" if token.text is None else f"{token.text!r} "
    if token.logprob is None or token.version is None:
        return Text.assemble((text, "dim"), (str(token.id), "dim"))
    surprising = "bold " if token.logprob < math.log(0.1) else ""
    return Text.assemble((text, surprising + colours[token.version]), (f"{token.id} ", "dim"), f"{token.logprob:.3f}")


def _timeline(life: Life) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    events = life.timeline()
    for place, (name, at) in enumerate(events):
        clock = datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%H:%M:%S.%f")[:-3]
        since = "" if not place else f"+{at - events[place - 1][1]:.3f} s"
        table.add_row(clock, since, Text(name))
    return table
