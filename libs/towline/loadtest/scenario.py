"""A load test's scenario: a run's settings as in any run's TOML file, and a table `[load]` that says how it's loaded.

The same file is what `towline simulate` reads. Sections that a load test doesn't depend on (model, prompts, reward) have
defaults here: the synthetic policy, prompts and verifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from towline.config import BusSettings, Settings, StoreSettings
from towline.config_loading import faults, read_toml
from towline.engine.recording import MARK_TOKENS, read_recording
from towline.errors import UsageError
from towline.loadtest import metric_names
from towline.loadtest.gateway_scenario import GatewayLoad

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Target = Literal["buffer", "rollout_worker", "reward", "trainer", "publisher", "nats-server"]

TASK = "towline.loadtest.task"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainerLoad(_Table):
    """The synthetic trainer: it fetches and checks rows as a real one, computes for a while, and changes some weights."""

    step_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Mean time of a step."""
    step_sigma: Annotated[float, Field(ge=0)] = 0.0
    """Of the log of a step's time."""
    seconds_per_token: Annotated[float, Field(ge=0)] = 0.0
    """Of the batch's policy tokens, on top."""
    model_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    changed_share: Share = 0.01
    """Of the elements, by one ulp, a step."""


class Disturbance(_Table):
    """Something that happens to the run, once or again and again. Times are seconds after the first version is served."""

    target: Target
    action: Literal["kill", "pause"] = "kill"
    """kill: SIGKILL, and the supervisor starts it again. pause: SIGSTOP for `seconds`, then SIGCONT."""
    at_seconds: Annotated[float, Field(ge=0)] = 5.0
    every_seconds: Annotated[float, Field(ge=0)] = 0.0
    """0: once."""
    seconds: Positive = 5.0


class Link(_Table):
    """What a simulation assumes between a replica's host and bus and store. A load test doesn't shape its network."""

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the workers."""
    round_trip_seconds: Annotated[float, Field(ge=0)] = 0.0
    bytes_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Of one host; 0: no limit."""


class Model(_Table):
    """What a simulation can't know and a measurement can: costs of this machine's hops, seconds."""

    task_seconds: Annotated[float, Field(ge=0)] = 0.01
    """From a task's record to a worker that has a free slot."""
    score_seconds: Annotated[float, Field(ge=0)] = 0.01
    """From a finished sample to the buffer's knowing its score."""
    scores_per_second: Annotated[float, Field(ge=0)] = 0.0
    """The reward services together; 0: no limit."""
    batch_seconds: Annotated[float, Field(ge=0)] = 0.05
    """From the last score of a batch to rows at the trainer."""
    snapshot_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Training stands still for it before a version's encoding."""
    publish_seconds: Annotated[float, Field(ge=0)] = 0.2
    """Encode, upload, verify and commit a version."""
    prepare_seconds: Annotated[float, Field(ge=0)] = 0.05
    """A host's download, application and proof, besides the link."""
    pause_seconds: Annotated[float, Field(ge=0)] = 0.0
    store_bytes_per_second: Annotated[float, Field(ge=0)] = 0.0
    """All hosts together; 0: no limit."""
    wire_bytes: Annotated[int, Field(ge=0)] = 0
    """Of a version's delta."""
    start_seconds: Annotated[float, Field(ge=0)] = 2.0
    """Of a worker that was killed, until it serves again."""
    worker_mtbf_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Mean time between one worker's failures; 0: none fails."""
    trainer_mtbf_seconds: Annotated[float, Field(ge=0)] = 0.0
    trainer_start_seconds: Annotated[float, Field(ge=0)] = 60.0
    links: tuple[Link, ...] = (Link(),)


class Threshold(_Table):
    least: float | None = None
    most: float | None = None

    @model_validator(mode="after")
    def _asks(self) -> Threshold:
        if self.least is None and self.most is None:
            raise ValueError("give least, most or both")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"least = {self.least:g} is more than most = {self.most:g}: nothing can keep to it")
        return self


class Load(_Table):
    kind: Literal["run", "transport", "gateway"] = "run"
    """run: a whole run; transport: one hop, worker -> bus or store -> trainer, against the bare clients; gateway: a run that goes
    on while clients ask its gateways."""
    workers: Count = 8
    """Each with an engine and a connection of its own."""
    processes: Count = 2
    """That the workers share."""
    start: tuple[Literal["buffer", "rollout_worker", "reward", "trainer", "publisher"], ...] = (
        "buffer", "rollout_worker", "reward", "trainer", "publisher",
    )  # fmt: skip
    """What is started here; a deployed cluster has the others. Then bus.url and store.url name it."""
    warm_up_seconds: Annotated[float, Field(ge=0)] = 5.0
    """After the first batch: left out of every figure."""
    measure_seconds: Positive = 20.0
    """transport: of each open-loop rate; gateway: of each part. A run ends by run.steps."""
    most_seconds: Positive = 900.0
    """A run that takes longer fails."""
    repetitions: Count = 1
    lengths_from: str = ""
    """A recording (`towline loadtest record`), a run, a bundle or a file of `towline replay --to`: the samples' lengths, turns,
    tools, speeds, ends and failures are drawn from it, a group at a time."""
    prompt_tokens: Count = 64
    prompts: Count = 10_000
    agent_turns: Annotated[float, Field(ge=0)] = 0.0
    """Mean turns of a sample, geometric; 0: single turn."""
    tool_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Mean time of a tool, log-normal with sigma 1."""
    tool_tokens: Annotated[int, Field(ge=0)] = 64
    reward_seconds: Annotated[float, Field(ge=0)] = 0.0
    """A verifier's time for one sample."""
    trainer: TrainerLoad = TrainerLoad()
    gateway: GatewayLoad = GatewayLoad()
    disturbances: tuple[Disturbance, ...] = ()
    payload_bytes: tuple[Count, ...] = (65536,)
    window: Count = 64
    """transport: messages in flight in the closed loop, and at most in the open one for each sender."""
    senders: Count = 1
    rates: tuple[Positive, ...] = ()
    """transport: offered messages a second, one open-loop measurement each; none: the closed loop."""
    profile: tuple[tuple[Positive, Positive], ...] = ()
    """transport: (seconds, rate) one after the other in one open-loop measurement: a burst."""
    rounds: Count = 3
    """transport: closed-loop measurements, in turn with the bare clients'."""
    sweep: tuple[Count, ...] = ()
    """run: numbers of workers, a run each, for throughput against workers. buffer.groups_per_batch is the least number's and
    grows with them."""
    messages: Count = 4000
    """transport: of a closed-loop round."""
    thresholds: dict[str, Threshold] = {}
    """Metric -> what it must keep to, or the load test fails."""


class Scenario(_Table):
    """Settings of the run, and how it's loaded."""

    name: str
    path: Path
    settings: Settings
    load: Load
    simulate: Model


_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"source": "synthetic"},
    "prompts": {"source": f"{TASK}:prompts"},
    "sampling": {"max_tokens": 512, "stop_token_ids": [0]},
    "reward": {"function": f"{TASK}:Verifier"},
    "rollout": {"engine": "synthetic", "slots": 1},
    "eval": {"every": 0},
}


def load_scenario(path: Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario of a TOML file, with `overrides` ("section.key" -> value, "load.trainer.step_seconds" too) on top.

    A run's own TOML file is a scenario as well: with every default of `[load]`. `UsageError` has one line a fault.
    """
    tree = _tree(path, overrides)
    if (lengths := lengths_target(path, overrides)) is not None:
        _record(tree, path, lengths)
    load, simulate = tree.pop("load", {}), tree.pop("simulate", {})
    tree.setdefault("run", {}).setdefault("name", path.stem)
    for section, defaults in _DEFAULTS.items():
        tree[section] = defaults | tree.get(section, {})
    if "factory" in tree["model"]:
        tree["model"].pop("source")
    table: tuple[str, ...] = ("load",)
    try:
        made = Load.model_validate(load)
        table = ("simulate",)
        model = Model.model_validate(simulate)
        table = ()
        settings = Settings.model_validate(_with_task(tree, made))
    except ValidationError as error:
        raise UsageError(f"{path}: {faults(error, table=table)}", code="config") from None
    if unknown := metric_names.faults(made):
        raise UsageError(f"{path}: {'; '.join(unknown)}", code="threshold")
    return Scenario(name=path.stem, path=path, settings=settings, load=made, simulate=model)


@dataclass(frozen=True, slots=True)
class LengthsTarget:
    """What load.lengths_from names: `made` where it's a recording already, else a run, a bundle or a file of trajectories."""

    where: str
    made: bool


def lengths_target(path: Path, overrides: Mapping[str, Any] | None = None) -> LengthsTarget | None:
    """None where the scenario names nothing. A path counts from the scenario's folder, else from here."""
    named = _tree(path, overrides).get("load", {}).get("lengths_from", "")
    if not isinstance(named, str) or not named:
        return None
    beside = path.parent / named
    where = beside if beside.exists() else Path(named)
    made = where.is_file() and where.read_bytes()[:64].lstrip().startswith(b'{"kind":"towline-recording"')
    return LengthsTarget(str(where.absolute()) if where.exists() else named, made)


def _record(tree: dict[str, Any], path: Path, lengths: LengthsTarget) -> None:
    """The engine's, and the limits that none of the recorded samples is over, where the scenario says nothing of them."""
    if not lengths.made:
        raise UsageError(
            f"{path}: load.lengths_from = {lengths.where!r} is no recording; `towline loadtest record RUN --out FILE` makes one",
            code="recording",
        )
    recording = read_recording(lengths.where)
    samples = [sample for group in recording.groups for sample in group]
    rollout, sampling = tree.setdefault("rollout", {}), tree.setdefault("sampling", {})
    if rollout.get("engine", "synthetic") != "synthetic":
        raise UsageError(
            f"{path}: load.lengths_from is for rollout.engine = 'synthetic'; leave rollout.engine out", code="recording"
        )
    rollout["arguments"] = {**rollout.get("arguments", {}), "recorded": lengths.where}
    sampling.setdefault("max_tokens", max(sample.policy_tokens for sample in samples) + 1)
    whole = max(sample.prompt + sum(turn.policy + turn.environment for turn in sample.turns) for sample in samples)
    first = max(sample.prompt for sample in samples) + int(sampling["max_tokens"])  # the first turn may ask for all of it
    rollout.setdefault("max_context_tokens", max(whole, first) + MARK_TOKENS + 1)


def _tree(path: Path, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    tree = read_toml(path, "loadtests/ has scenarios")
    for name, value in tree.items():
        if not isinstance(value, dict):
            raise UsageError(f"{path}: {name}: must be a table, [{name}]", code="config")
    for dotted, value in (overrides or {}).items():
        *tables, key = dotted.split(".")
        at = tree
        for table in tables:
            at = at.setdefault(table, {})
            if not isinstance(at, dict):
                raise UsageError(f"--set {dotted}: {table} is no table", code="override")
        at[key] = value
    return tree


def _with_task(tree: dict[str, Any], load: Load) -> dict[str, Any]:
    """The synthetic task's arguments, where the scenario names no task of its own."""
    prompts, reward = tree["prompts"], tree["reward"]
    if recorded := tree["rollout"].get("arguments", {}).get("recorded"):
        prompts.setdefault("environment", f"{TASK}:RecordedAgent")
        prompts.setdefault("environment_arguments", {"recorded": recorded})
        if prompts["source"] == f"{TASK}:prompts":
            prompts["source"] = f"{TASK}:recorded_prompts"
            prompts.setdefault("arguments", {"recorded": recorded, "rows": load.prompts})
    if prompts["source"] == f"{TASK}:prompts":
        prompts.setdefault("arguments", {"tokens": load.prompt_tokens, "rows": load.prompts})
        if load.agent_turns:
            prompts.setdefault("environment", f"{TASK}:Agent")
            prompts.setdefault(
                "environment_arguments", {"turns": load.agent_turns, "seconds": load.tool_seconds, "tokens": load.tool_tokens}
            )
    if reward["function"] == f"{TASK}:Verifier":
        reward.setdefault("arguments", {"seconds": load.reward_seconds})
    return tree


def at_addresses(scenario: Scenario, bus: BusSettings, store: StoreSettings, directory: Path, name: str) -> Settings:
    """The settings of one run of the load test."""
    settings = scenario.settings
    run = settings.run.model_copy(update={"name": name, "directory": str(directory)})
    service = settings.service.model_copy(update={"port": 0, "drain_seconds": min(settings.service.drain_seconds, 4.0)})
    rollout = settings.rollout.model_copy(update={"replicas": scenario.load.workers})
    return settings.model_copy(update={"bus": bus, "store": store, "run": run, "service": service, "rollout": rollout})
