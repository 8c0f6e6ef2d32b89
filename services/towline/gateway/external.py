"""A session's branch as a sample from outside: an external trajectory, published once (docs/design/001-protocol.md, 7)."""

from __future__ import annotations

from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.groups import EXTERNAL, external_group
from towline.contract.task import PromptRef, SamplingParams
from towline.contract.trajectory import Timings, Trajectory, decode_trajectory, encode_trajectory
from towline.errors import MalformedError
from towline.gateway.session_store import Content, Finish
from towline.session.branch import branch
from towline.session.tree import Session


def trajectory_of(
    session: Session, name: str, content: Content, sampling: SamplingParams, finish: Finish, settings: Settings, replica: str
) -> Trajectory:
    """The head's branch. `ConflictError` where the policy has said nothing on it. The same call gives the same bytes, but for
    `replica`: the gateway."""
    found = branch(session)
    return Trajectory(
        run=settings.run.name, lane=EXTERNAL, group=external_group(finish.name), sample=finish.sample,
        group_size=finish.group_size, task_sequence=0, attempt=0, prompt_ref=PromptRef(name, 0, 0), reference=finish.reference,
        tokens=found.tokens, loss_mask=found.loss_mask, logprobs=found.logprobs, version_spans=found.spans,
        segments=found.segments, finish=found.finish, sampling=sampling, seed=content.seed, engine=settings.rollout.engine,
        replica=replica, timings=Timings(pulled_at=content.created, finished_at=finish.at),
    )  # fmt: skip


async def publish(bus: Bus, trajectory: Trajectory) -> tuple[str, int | None]:
    """The subject, and the sequence of its one message; None where another session's stands there."""
    subject = bus.topology.trajectory(trajectory.group, trajectory.sample)
    data = encode_trajectory(trajectory)
    decode_trajectory(data)
    created = await bus.create(subject, data)
    if not created.won and not _is_of(created.existing or b"", trajectory.prompt_ref):
        return subject, None
    return subject, created.sequence


def _is_of(data: bytes, ref: PromptRef) -> bool:
    try:
        return decode_trajectory(data).prompt_ref == ref
    except MalformedError:  # whoever sent it, it wasn't this session
        return False
