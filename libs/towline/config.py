"""A run's settings: one typed model per part, one TOML file per run, `TOWLINE_SECTION__KEY` in the environment on top.

[bus] and [store] stand in config_servers.py, [trainer] and [publisher] in config_trainer.py, [gateway] in config_gateway.py.
Every service reads the same file. An unknown key, a wrong type or an impossible value is one line that names the key.
Import paths (`module:name`) are looked up with the TOML file's folder on `sys.path`, so that a run's own code may lie beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from towline.bus.topology import ACK_WAIT_SECONDS, MAX_ATOMIC_MESSAGES, REWARD_ACK_WAIT_SECONDS, RUN_NAME
from towline.config_gateway import GatewaySettings, TenantSettings
from towline.config_loading import STRICT, Count, ImportPath, Positive, import_object, read_settings
from towline.config_servers import BusSettings, StoreSettings, read_secret
from towline.config_sessions import SessionSettings
from towline.config_trainer import PublisherSettings, TrainerSettings

__all__ = [
    "BusSettings",
    "GatewaySettings",
    "PublisherSettings",
    "SessionSettings",
    "StoreSettings",
    "TenantSettings",
    "TrainerSettings",
    "import_object",
]


class _Section(BaseModel):
    model_config = STRICT


class RunSettings(_Section):
    name: str
    """1 to 32 of a-z, 0-9 and '-'; part of every stream's and object's name."""
    seed: int = 0
    steps: Count = 100
    """Batches to train; the run ends after them."""
    directory: str = "runs"
    """Where `towline up` keeps logs, local servers' data and summary.json, under DIRECTORY/NAME."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("use 1 to 32 of a-z, 0-9 and '-'")
        return value


class ModelSettings(_Section):
    source: str = ""
    """A Hugging Face folder or id: the model before the first step."""
    revision: str | None = None
    """The commit of a Hugging Face id."""
    factory: ImportPath | None = None
    """Instead of `source`: function(folder: Path, seed: int, **arguments) that writes a Hugging Face folder and returns a
    line that says how the model came about."""
    arguments: dict[str, Any] = {}
    publish_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the tensors that the versions carry."""

    @model_validator(mode="after")
    def _one(self) -> ModelSettings:
        if bool(self.source) == bool(self.factory):
            raise ValueError("give either source or factory")
        return self


class PromptSettings(_Section):
    source: ImportPath
    """function(tokenizer, seed: int, **arguments) -> towline.environment.prompts.PromptSource for training."""
    arguments: dict[str, Any] = {}
    eval_source: ImportPath | None = None
    eval_arguments: dict[str, Any] = {}
    environment: ImportPath = "towline.environment.single_turn:SingleTurn"
    environment_arguments: dict[str, Any] = {}
    """The environment's own keywords; one with a parameter `tokenizer` gets the model's."""


class SamplingSettings(_Section):
    max_tokens: Count
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop_token_ids: tuple[int, ...] | None = None
    """None: the model's end-of-sequence tokens."""


class BufferSettings(_Section):
    group_size: Annotated[int, Field(ge=1, le=MAX_ATOMIC_MESSAGES)] = 8
    groups_per_batch: Count = 64
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """In depths; 0 is the synchronous mode."""
    max_open_groups: Count = 100_000
    group_deadline_seconds: Positive = 600.0
    max_attempts: Count = 8
    """Failed attempts of one sample before its group is dropped."""
    off_line: Literal["drop", "keep"] = "drop"
    policy: str = "stalest_first"
    """Which complete groups are batched first: stalest_first, fifo, freshest_first, priority, or module:name of one's own."""
    tail_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """A batch waits for groups that would be too stale for the next one, up to this long after their admission."""
    over_stale: Literal["drop", "requeue", "mask_stale_tokens", "keep"] = "drop"
    """What becomes of a group over the bound. requeue: its prompt is admitted again as a new group; mask_stale_tokens: it's
    trained, the tokens over the bound without a gradient; keep: it's trained whole, under trainer.correction."""
    external: Literal["admit", "drop"] = "admit"
    """Groups that others sampled, unasked (lane external): admitted as pacing has room, or always dropped as `unpaced`."""
    external_groups: Annotated[int, Field(ge=0)] = 0
    """Of groups_per_batch: the share of external groups, prompts having the rest. 0: external ones come first, as they come."""
    session_groups: Annotated[int, Field(ge=0)] = 0
    """Of groups_per_batch: the share whose samples the gateways' clients claim (lane session); 0: the workers have all."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Groups admitted for each one that a batch takes; what is too many becomes stale, and is dropped as that."""
    filter_equal_rewards: bool = False
    """Dynamic filtering: drop complete groups whose rewards are all equal (they have no advantage), as `equal_rewards`."""
    max_resample_rounds: Annotated[int, Field(ge=0)] = 10
    """Batches' worth of filtered and requeued groups in a row after which the run flushes what it has, or ends; 0: no limit."""
    min_batch_groups: Count = 1
    """The least that a flushed batch may hold, at the data's end or after max_resample_rounds."""
    site_silent_seconds: Positive = 600.0
    """A site (bus.sites) that nothing is heard of for so long counts as lost: what it was asked for and hasn't delivered is
    issued at home. One that was only cut off generated it, too: the first to arrive is trained, the other was for nothing."""
    snapshot_every_records: Count = 20_000
    keep_history: bool = True
    """False: what no restart can need any more is purged from CONTROL, TRAJECTORY and OUTCOME (docs/design/020-buffer.md)."""


class EvalSettings(_Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Depths between evaluations; 0: none. The first and the last version are evaluated in any case but 0."""
    prompts: Count = 128
    samples: Annotated[int, Field(ge=1, le=MAX_ATOMIC_MESSAGES)] = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
    deadline_seconds: Positive = 120.0
    exact_hold_seconds: Positive = 30.0


class RolloutSettings(_Section):
    engine: Literal["torch", "sglang", "synthetic"] = "torch"
    replicas: Count = 1
    """Worker processes that `towline up` starts."""
    slots: Count = 64
    """Samples that one worker generates at a time."""
    device: str = "cpu"
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    threads: Count = 1
    activation: Literal["retract", "in_place", "drain"] = "retract"
    hold_seconds: Positive = 60.0
    poll_seconds: Positive = 0.5
    """How often the LOG is read where no hint comes."""
    max_context_tokens: Count = 4096
    ack_wait_seconds: Annotated[float, Field(ge=1)] = ACK_WAIT_SECONDS
    """How long the tasks of a killed worker stay with it, and so what a synchronous run may stand still. A worker that the
    bus hears nothing of for so long is taken for dead: what it is at is generated a second time."""
    partial_every_tokens: Annotated[int, Field(ge=0)] = 256
    """After so many tokens of a turn, and after each turn, what a running sample has is written down for whoever would have
    to go on; 0: after turns only. Whatever runs when the worker is told to stop is written down in any case."""
    max_starts: Count = 4
    """How often a task may be begun without an outcome or more tokens, because its worker died, before it counts as poisoned."""
    turn_seconds: Annotated[float, Field(ge=0)] = 0.0
    """A turn of the policy that takes longer ends its sample, as `deadline`; 0: none does."""
    tool_seconds: Annotated[float, Field(ge=0)] = 120.0
    """An answer of the environment that takes longer ends its sample, as `deadline`; 0: none does."""
    group_margin_seconds: Annotated[float, Field(ge=0)] = 5.0
    """A sample that still runs so long (at most a tenth of its group's time) before its group's deadline ends, as `deadline`,
    rather than be dropped with all its group; 0: it goes on."""
    queue_seconds: Positive = 1.0
    """A worker asks for fewer samples at a time where they wait longer than this in its engine (and than a tenth of the time
    that they take), and for more again where they don't."""
    arguments: dict[str, Any] = {}
    """The engine's own."""
    subscription: Literal["latest", "pinned", "behind", "canary"] = "latest"
    """Which version a worker serves. pinned: `pinned_version` alone; behind: one that is at most `behind_versions` behind the
    latest, so that it activates less often; canary: see `canary_share`."""
    pinned_version: Annotated[int, Field(ge=0)] | None = None
    """The LOG's number of the version that a pinned worker serves, on the line or not."""
    behind_versions: Count = 1
    canary_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The share of the canary workers, at least one, that takes the newest version first: those whose names hash lowest."""
    canary_seconds: Positive = 60.0
    """The other canary workers follow once every one of those has proved a version and this time has passed."""
    copy_folder: str = ""
    """Where the host's copy of the weights lies, which its workers share: a disk or /dev/shm; empty: beside their run files."""
    copy_budget_bytes: Annotated[int, Field(ge=0)] = 0
    """What the copies on a host may take, in bytes of weights. Room for two or more: a version is made beside the one that is
    served. For one: it is made in place, with an undo journal. 0: two, and as many as are in use."""
    prepare_threads: Annotated[int, Field(ge=0)] = 0
    """Threads that prepare a version, at low priority; 0: the cores that `threads` leaves free, at least one."""
    missing_seconds: Positive = 600.0
    """How long parts that aren't in the store (yet) are waited for before their version counts as failed here."""

    @model_validator(mode="after")
    def _pinned(self) -> RolloutSettings:
        if (self.subscription == "pinned") != (self.pinned_version is not None):
            raise ValueError('pinned_version and subscription = "pinned" go together: set both or neither')
        return self


class RewardSettings(_Section):
    function: ImportPath
    """function(sample: towline.verifiers.Sample) -> float | towline.verifiers.Reward."""
    arguments: dict[str, Any] = {}
    scope: Literal["sample", "group"] = "sample"
    max_attempts: Count = 3
    timeout_seconds: Positive = 30.0
    concurrency: Count = 64
    ack_wait_seconds: Annotated[float, Field(ge=1)] = REWARD_ACK_WAIT_SECONDS
    """How long what a killed replica had in hand stays with it."""
    max_failed_groups: Annotated[int, Field(ge=0)] = 256
    """So many groups, and nine of ten, that can't be judged, without a batch in between, end the run (`verify_failed_all`).
    0: never."""


class ServiceSettings(_Section):
    host: str = "127.0.0.1"
    """Where /healthz, /readyz and /metrics listen."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free one; it's logged and stands in the status."""
    token: SecretStr = SecretStr("")
    """Bearer token; needed where host isn't a loopback address."""
    token_file: str = ""
    """A file that holds the token, instead of its value here."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    drain_seconds: Positive = 8.0

    @property
    def secret(self) -> str:
        """The token, by value or from its file."""
        return read_secret(self.token_file, "service.token_file") or self.token.get_secret_value()


class TelemetrySettings(_Section):
    endpoint: str = ""
    """Base URL of an OTLP collector's HTTP port (http://host:4318): tracing is on. Empty: OTEL_EXPORTER_OTLP_ENDPOINT; neither:
    off. Other OTEL_EXPORTER_OTLP_… variables count too (headers, certificates)."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the samples that are traced, each whole or not at all. None: OTEL_TRACES_SAMPLER's, else one in a hundred."""
    timeout_seconds: Positive = 5.0
    """For the collector's answer; nothing but the exporting thread waits for it."""

    @field_validator("endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("give the URL of the collector's HTTP port, like http://127.0.0.1:4318")
        return value


class Settings(_Section):
    """The whole file."""

    run: RunSettings
    bus: BusSettings = BusSettings()
    store: StoreSettings = StoreSettings()
    model: ModelSettings
    prompts: PromptSettings
    sampling: SamplingSettings
    buffer: BufferSettings = BufferSettings()
    eval: EvalSettings = EvalSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings
    trainer: TrainerSettings = TrainerSettings()
    publisher: PublisherSettings = PublisherSettings()
    gateway: GatewaySettings = GatewaySettings()
    service: ServiceSettings = ServiceSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        corrected = self.trainer.correction != "none" or self.trainer.loss == "decoupled_ppo"
        if self.buffer.over_stale == "keep" and not corrected:
            raise ValueError(
                "buffer.over_stale = 'keep' trains on samples over the bound: set trainer.correction (tis, icepop, mask, "
                "sequence_mask or module:name) or trainer.loss = 'decoupled_ppo', or buffer.over_stale to another"
            )
        if self.buffer.external_groups + self.buffer.session_groups > self.buffer.groups_per_batch:
            raise ValueError(
                "buffer.external_groups and session_groups are together more than buffer.groups_per_batch: they are parts of it"
            )
        return self


def load_settings(path: Path, overrides: dict[str, Any] | None = None) -> Settings:
    """The file, then `TOWLINE_SECTION__KEY` from the environment, then `overrides` ({"section.key": value}).

    Puts the file's folder on `sys.path`. Raises `UsageError` with one line a fault.
    """
    return read_settings(Settings, path, overrides)
