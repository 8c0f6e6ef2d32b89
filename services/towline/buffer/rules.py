"""The run's settings as the decider needs them: plain numbers, nothing to look up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from towline.buffer.policies.base import Policy, load_policy
from towline.buffer.policies.stalest_first import stalest_first
from towline.config import Settings
from towline.contract.task import SamplingParams
from towline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the run admits, bounds, batches, evaluates and ends. Durations are seconds."""

    run: str
    seed: int
    steps: int
    """Batches of the whole run."""
    group_size: int
    groups_per_batch: int
    max_staleness: int
    max_open_groups: int
    group_deadline_seconds: float
    max_attempts: int
    keep_off_line: bool
    """Versions off the lineage count from the common ancestor (True) or drop their group (False; always at max_staleness 0)."""
    sampling: SamplingParams
    environment: str
    eval_every: int
    eval_prompts: int
    eval_samples: int
    eval_deadline_seconds: float
    eval_sampling: SamplingParams
    policy: Policy = stalest_first
    tail_wait_seconds: float = 0.0
    over_stale: str = "drop"
    """drop, requeue, mask_stale_tokens or keep."""
    admit_external: bool = True
    external_groups: int = 0
    """Of groups_per_batch: left to external groups."""
    session_groups: int = 0
    """Of groups_per_batch: issued in lane session."""
    session_environment: str = "agent"
    oversample: float = 1.0
    filter_equal_rewards: bool = False
    max_resample_rounds: int = 0
    max_failed_groups: int = 0
    min_batch_groups: int = 1
    sites: tuple[str, ...] = ()
    """That have a lane of their own."""

    @property
    def admitted_per_batch(self) -> int:
        """Groups admitted for each batch."""
        return math.ceil(self.groups_per_batch * self.oversample)

    @property
    def keeps_over_stale(self) -> bool:
        """Whether a group over the bound may be trained, in part or whole."""
        return self.over_stale in ("mask_stale_tokens", "keep")


def rules_from(settings: Settings, *, stop_token_ids: tuple[int, ...]) -> Rules:
    """The run's rules; `stop_token_ids` are the model's own, used where the settings name none. `UsageError` where they clash."""
    buffer, sampling = settings.buffer, settings.sampling
    if buffer.max_open_groups < buffer.groups_per_batch:
        raise UsageError(
            f"buffer.max_open_groups = {buffer.max_open_groups} is below buffer.groups_per_batch = {buffer.groups_per_batch}: "
            "no batch could ever be complete; raise the first or lower the second",
            code="max_open_groups",
        )
    if buffer.min_batch_groups > buffer.groups_per_batch:
        raise UsageError(
            f"buffer.min_batch_groups = {buffer.min_batch_groups} is above buffer.groups_per_batch = {buffer.groups_per_batch}",
            code="min_batch_groups",
        )
    keep: Literal["drop", "keep"] = buffer.off_line
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids,
    )
    return Rules(
        run=settings.run.name,
        seed=settings.run.seed,
        steps=settings.run.steps,
        group_size=buffer.group_size,
        groups_per_batch=buffer.groups_per_batch,
        max_staleness=buffer.max_staleness,
        max_open_groups=buffer.max_open_groups,
        group_deadline_seconds=buffer.group_deadline_seconds,
        max_attempts=buffer.max_attempts,
        keep_off_line=keep == "keep" and buffer.max_staleness > 0,
        sampling=params,
        environment=settings.prompts.environment,
        eval_every=settings.eval.every,
        eval_prompts=settings.eval.prompts,
        eval_samples=settings.eval.samples,
        eval_deadline_seconds=settings.eval.deadline_seconds,
        eval_sampling=SamplingParams(
            max_tokens=params.max_tokens,
            temperature=settings.eval.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=params.stop_token_ids,
        ),
        policy=load_policy(buffer.policy),
        tail_wait_seconds=buffer.tail_wait_seconds,
        over_stale=buffer.over_stale,
        admit_external=buffer.external == "admit",
        external_groups=buffer.external_groups,
        session_groups=buffer.session_groups,
        session_environment=settings.gateway.sessions.environment,
        oversample=buffer.oversample,
        filter_equal_rewards=buffer.filter_equal_rewards,
        max_resample_rounds=buffer.max_resample_rounds,
        max_failed_groups=settings.reward.max_failed_groups,
        min_batch_groups=buffer.min_batch_groups,
        sites=settings.bus.sites,
    )
