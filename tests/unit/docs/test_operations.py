"""docs/operations.md names what there is: commands with their options, settings, metrics, states, files. Its figures are true."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from contract import samples
from support.exported import names
from towline.bus.topology import BUCKET_BYTES, BUCKETS, CONTROL, OUTCOME, TRAJECTORY
from towline.cli.main import app
from towline.config import Settings
from towline.contract.codec import encode
from towline.contract.control import BatchRecord, BatchRow, TaskRecord
from towline.contract.outcome import Score
from towline.contract.task import VersionSpan, pack_tokens
from towline.contract.trajectory import Segment, encode_trajectory

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
PROSE = re.sub(r"\n(?![\n|#-])", " ", re.sub(r"^    .*$", "", PAGE, flags=re.M))
"""The page without its code, a paragraph a line: quotations go over line breaks."""
QUOTED = re.findall(r"`([^`\n]+)`", PROSE)
COMMANDS = sorted(
    {line.strip().split("  #")[0].strip() for line in PAGE.splitlines() if line.startswith("    towline ")}
    | {text for text in QUOTED if re.match(r"towline [a-z]", text)}
)
ALERTS = re.findall(r"^### (Towline\w+)\n(.*?)(?=^#)", PAGE, re.M | re.S)
CLI: Any = typer.main.get_command(app)
METRICS = {name.removesuffix("_bucket") for name in names()}
OF_NATS_SERVER = {"store_dir", "max_file_store", "max_payload", "sync_interval"}
CONTROL_FRAME_BYTES, FRAME_BYTES = 141, 113
"""The server's own bytes a message, as the page says; tests/live/docs measures them."""


def faults(command: str) -> str:
    """What of the command line the CLI doesn't have; "" where all is right. A line without arguments only names a command."""
    at: Any = CLI
    words = shlex.split(command)[1:]
    while words and hasattr(at, "commands") and not words[0].startswith("-"):
        if words[0] not in at.commands:
            return f"no command {words[0]}"
        at = at.commands[words.pop(0)]
    bare = not words
    options = {name: one for one in at.params if one.param_type_name == "option" for name in (*one.opts, *one.secondary_opts)}
    arguments = [one for one in at.params if one.param_type_name == "argument"]
    needed = {one.name for one in at.params if one.required}
    given = 0
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if given == len(arguments):
                return f"no place for {word}"
            needed.discard(arguments[given].name)
            given += arguments[given].nargs == 1
            continue
        if word not in options:
            return f"no option {word}"
        needed.discard(options[word].name)
        if not options[word].is_flag:
            if not words:
                return f"{word} has no value"
            words.pop(0)
    return "" if bare or not needed else f"lacks {', '.join(sorted(needed))}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_exists_with_its_options_and_arguments(command: str) -> None:
    assert faults(command) == ""


def test_a_command_that_does_not_exist_would_be_found() -> None:
    assert faults("towline versions collect RUN") == "no command collect"
    assert faults("towline versions gc RUN --soon") == "no option --soon"
    assert faults("towline versions gc RUN 7") == "no place for 7"
    assert faults("towline versions quarantine RUN 7") == "lacks reason"
    assert len(COMMANDS) > 25


def _field(dotted: str) -> FieldInfo | None:
    model: Any = Settings
    field = None
    for part in dotted.split("."):
        field = getattr(model, "model_fields", {}).get(part)
        model = None if field is None else field.annotation
    return field


def test_every_setting_of_the_page_exists_and_takes_the_value_that_it_says() -> None:
    section = "|".join(Settings.model_fields)
    found = {match.group(1, 2) for text in QUOTED if (match := re.fullmatch(rf"((?:{section})\.[a-z_.]+)(?: = (.+))?", text))}
    assert len(found) > 30
    assert {name for name, _ in found if _field(name) is None} == set()
    for name, value in found:
        if value is not None:
            field = _field(name)
            assert field is not None
            TypeAdapter(field.annotation).validate_python(tomllib.loads(f"value = {value}")["value"])
    assert sum(value is not None for _, value in found) > 4
    assert _field("buffer.max_stalenes") is None


def test_every_metric_of_the_page_is_exported() -> None:
    found = {text for text in QUOTED if re.fullmatch(r"towline_[a-z_]+", text)}
    assert len(found) > 8
    assert found - METRICS == set()


def test_every_other_name_with_an_underscore_stands_in_the_code() -> None:
    """Named states, reasons, error codes."""
    words = {text for text in QUOTED if re.fullmatch(r"[a-z]+(_[a-z]+)+", text)} - METRICS - OF_NATS_SERVER
    assert len(words) > 20
    code = "\n".join(path.read_text() for top in ("libs", "services") for path in (ROOT / top).rglob("*.py"))
    assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set()


def test_every_file_and_section_that_the_page_points_to_is_there() -> None:
    files = set(re.findall(r"\b(?:docs|libs|tests|k8s|compose)/[\w/.-]*\w|\bcompose/|\b[A-Z]+\.md", PAGE))
    assert {name for name in files if not (ROOT / name).exists()} == set()
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in PAGE.splitlines() if line[:1] == "#"
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) - headings == set()


def test_every_alert_has_one_short_paragraph_that_says_what_it_means_and_what_to_do() -> None:
    anchors = (ROOT / "observe" / "prometheus" / "runbook-anchors.txt").read_text().split()
    assert [name.lower() for name, _ in ALERTS] == anchors, "in the order of the alert rules"
    for name, text in ALERTS:
        assert text.startswith("**Means** "), name
        assert "**Do**" in text, name
        assert "\n\n" not in text.strip(), f"{name}: one paragraph"
        assert len(text) < 1000, name


def _bytes(prompt: int, policy: int) -> tuple[int, int, int]:
    """A sample's bytes in TRAJECTORY, CONTROL (its task and its row in a batch) and OUTCOME, with an empty reference."""
    random = np.random.default_rng(0)
    size = prompt + policy
    logprobs = np.full(size, np.nan, np.float32)
    logprobs[prompt:] = -random.exponential(0.5, policy)
    mask = np.r_[np.zeros(prompt, np.uint8), np.ones(policy, np.uint8)]
    trajectory = dataclasses.replace(
        samples.trajectory(), tokens=random.integers(0, 150_000, size).astype(np.int32), logprobs=logprobs, loss_mask=mask,
        reference={}, version_spans=(VersionSpan(prompt, size, 5, "start"),),
        segments=(Segment(0, prompt, "prompt"), Segment(prompt, size, "policy")),
    )  # fmt: skip
    task = msgspec.structs.replace(samples.TASK, prompt=pack_tokens(random.integers(0, 150_000, prompt)), reference={})
    rows = tuple(BatchRow(100_000 + i // 8, i % 8, 1_000_000 + i, bytes(range(16)), 0.5, 100, policy) for i in range(512))
    batch = BatchRecord(writer="0123456789ab/100000", epoch=1, for_depth=100, rows=rows, at=1.7e9)
    score = next(one for one in samples.OUTCOMES.values() if isinstance(one, Score))
    control = len(encode(TaskRecord(writer="0123456789ab/100000", task=task))) + CONTROL_FRAME_BYTES + len(encode(batch)) // 512
    return len(encode_trajectory(trajectory)) + FRAME_BYTES, control, len(encode(score)) + FRAME_BYTES


@pytest.mark.parametrize(("prompt", "policy"), [(200, 1000), (1000, 200), (500, 16_000)])
def test_the_bytes_of_a_sample_are_those_of_the_formulas(prompt: int, policy: int) -> None:
    row = re.compile(r"^\| (\w+) \| ([^|]+) \| (\d+)% \|$", re.M)
    table = {stream: (formula.replace(",", ""), int(share)) for stream, formula, share in row.findall(PAGE)}
    assert {key: share for key, (_, share) in table.items()} == {
        spec.key: round(100 * spec.budget_share) for spec in (TRAJECTORY, CONTROL, OUTCOME)
    }
    for spec, measured in zip((TRAJECTORY, CONTROL, OUTCOME), _bytes(prompt, policy), strict=True):
        terms = [term.split() for term in table[spec.key][0].split(" + ")]
        unit = {"": 1, "T": policy, "P": prompt, "R": 0}
        said = sum(float(term[0]) * unit["".join(term[1:])] for term in terms if term != ["R"])
        assert said == pytest.approx(measured, rel=0.05), spec.key


def test_the_samples_that_the_default_budget_holds_are_those_of_the_formula() -> None:
    budget = Settings.model_fields["bus"].default.budget_bytes - len(BUCKETS) * BUCKET_BYTES
    assert "less 48 MiB" in PAGE
    assert len(BUCKETS) * BUCKET_BYTES == 48 << 20
    holds = [
        budget * spec.budget_share / size for spec, size in zip((TRAJECTORY, CONTROL, OUTCOME), _bytes(200, 1000), strict=True)
    ]
    match = re.search(r"the default 4 GiB hold ([\d,]+) samples \(TRAJECTORY fills first\)", " ".join(PAGE.split()))
    assert match is not None
    assert int(match[1].replace(",", "")) == pytest.approx(holds[0], rel=0.03)
    assert holds[0] < min(holds[1:])


def test_readme_operations_and_doctor_say_the_same_of_a_power_cut() -> None:
    readme, doctor = " ".join((ROOT / "README.md").read_text().split()), (ROOT / "libs/towline/doctor/bus.py").read_text()
    claim = "`bus.replicas = 3` on machines that don't lose power together makes it rare"
    assert claim in readme
    assert claim in " ".join(PAGE.split())
    for text in (readme, PAGE, doctor):
        assert "sync_interval: always" in text
