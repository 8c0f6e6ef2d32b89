"""A session's branch as a sample from outside: an external trajectory, published once (docs/design/001-protocol.md, 7)."""

from __future__ import annotations

from collections.abc import Callable

from towline import spans
from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.config import Settings
from towline.contract.groups import EXTERNAL, external_group
from towline.contract.task import PromptRef, SamplingParams
from towline.contract.trajectory import Timings, Trajectory, decode_trajectory, encode_trajectory
from towline.errors import MalformedError
from towline.gateway.session_store import Content, Finish
from towline.session.branch import branch
from towline.session.tree import Session
from towline.spans import Span


def trajectory_of(
    session: Session, name: str, content: Content, sampling: SamplingParams, finish: Finish, settings: Settings, replica: str
) -> Trajectory:
    """The head's branch. `ConflictError` where the policy has said nothing on it. The same call gives the same bytes, but for
    `replica`: the gateway."""
    found = branch(session, finish.node)
    return Trajectory(
        run=settings.run.name, lane=EXTERNAL, group=external_group(finish.name), sample=finish.sample,
        group_size=finish.group_size, task_sequence=0, attempt=0, prompt_ref=PromptRef(name, 0, 0), reference=finish.reference,
        tokens=found.tokens, loss_mask=found.loss_mask, logprobs=found.logprobs, version_spans=found.spans,
        segments=found.segments, finish=found.finish, sampling=sampling, seed=content.seed, engine=settings.rollout.engine,
        replica=replica, timings=Timings(pulled_at=content.created, finished_at=finish.at),
    )  # fmt: skip


async def publish(bus: Bus, trajectory: Trajectory, is_mine: Callable[[bytes], bool] | None = None) -> tuple[str, int | None]:
    """The subject, and the sequence of its one message; None where another session's stands there. `is_mine` tells whether what
    stands is this one's; an external sample's by its session's name, where it's left out."""
    subject = bus.topology.trajectory(trajectory.group, trajectory.sample)
    data = encode_trajectory(trajectory)
    decode_trajectory(data)
    with await _span(bus, trajectory) as span:
        created = await bus.create(subject, data, headers=span.headers)
        if span and not created.won:
            span.renumber()
    if not created.won:
        standing = created.existing or b""
        if not (is_mine(standing) if is_mine is not None else _is_of(standing, trajectory.prompt_ref)):
            return subject, None
    return subject, created.sequence


async def _span(bus: Bus, trajectory: Trajectory) -> Span:
    """The sample's first span, which the buffer's and the reward's go on from."""
    tracer = spans.tracer
    if tracer is None:
        return spans.NOTHING
    born = (await bus.stream_state(CONTROL)).created_at
    trace = spans.sample_trace(trajectory.run, born, trajectory.group, trajectory.sample)
    if not tracer.sampled(trace):
        return spans.NOTHING
    asked = spans.current.get()
    span = tracer.start(
        "trajectory", None, kind="producer", own=spans.fixed_context(trace, "trajectory"), links=() if asked is None else (asked,)
    )
    span.set(group=trajectory.group, sample=trajectory.sample, lane=trajectory.lane, tokens=trajectory.policy_tokens)
    return span


def _is_of(data: bytes, ref: PromptRef) -> bool:
    try:
        return decode_trajectory(data).prompt_ref == ref
    except MalformedError:  # whoever sent it, it wasn't this session
        return False
