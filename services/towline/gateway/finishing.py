"""A session's end as a trajectory, in steps that any gateway goes on from: marked, published, its task acked, said to be so.

What was asked stands in the session before anything is published, so whoever goes on publishes the very same tokens; the one
message of the sample decides. A claimed session becomes its task's sample, any other one a sample from outside.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from towline import faults
from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.trajectory import GivenReward, Timings, Trajectory, decode_trajectory
from towline.errors import ConflictError, MalformedError, MissingError
from towline.gateway.answers import ApiError
from towline.gateway.claims import Claims
from towline.gateway.external import publish, trajectory_of
from towline.gateway.session_store import Content, End, Finish, Held, SessionStore, conflict
from towline.runtime.metrics import Metrics
from towline.session.branch import branch
from towline.session.tree import Session

_log = structlog.get_logger("towline.gateway")


class Finisher:
    """`tree` makes a content's session."""

    def __init__(
        self, settings: Settings, *, bus: Bus, store: SessionStore, claims: Claims, tree: Callable[[Content], Session],
        metrics: Metrics, replica: str,
    ) -> None:  # fmt: skip
        self._settings, self._bus, self._store, self._claims, self._tree = settings, bus, store, claims, tree
        self._replica = f"gateway-{replica}"
        self._finished = metrics.counter("sessions_finished_total", "sessions that became trajectories")
        self.trajectories = self.tokens = 0
        """Sessions that this process finished, and their policy tokens."""

    async def finish(self, held: Held, wanted: Finish) -> dict[str, Any]:
        """What the client is told; a repeat gets the same. 409 where the session was finished otherwise, or can't be."""
        content = held.content
        if content.end is not None:
            raise conflict(f"session {held.id} is over: {content.end.reason}; claim another task")
        if content.finish is None:
            await self._claims.check(held)
            marked = msgspec.structs.replace(content, state="finishing", finish=wanted)
            await self._made(held.id, marked)  # what can't be finished stays open
            held = await self._store.save(held, marked)
            faults.point("gateway.finish_marked")
        elif msgspec.structs.replace(wanted, at=content.finish.at) != content.finish:
            said = f"as sample {content.finish.sample} of {content.finish.name!r}" if content.task is None else "with other words"
            raise conflict(f"session {held.id} was finished otherwise: {said}")
        return await self.go_on(held)

    async def go_on(self, held: Held) -> dict[str, Any]:
        """From wherever a finish was cut short."""
        content = held.content
        assert content.finish is not None
        trajectory = await self._made(held.id, content)
        subject, sequence = await publish(self._bus, trajectory, self._is_mine(trajectory) if content.task is not None else None)
        faults.point("gateway.trajectory_published")
        if sequence is None:
            await self._lost(held, trajectory)
        if content.claim is not None:
            await self._bus.ack_of(content.claim.receipt)
            faults.point("gateway.task_acknowledged")
        if content.state != "finished":
            await self._store.save(held, msgspec.structs.replace(content, state="finished"))
            self._finished.inc()
            self.trajectories += 1
            self.tokens += trajectory.policy_tokens
            faults.point("gateway.finished")
        return {
            "id": held.id, "group": trajectory.group, "sample": trajectory.sample, "group_size": trajectory.group_size,
            "subject": subject, "sequence": sequence, "tokens": int(trajectory.tokens.size),
            "policy_tokens": trajectory.policy_tokens, "weight_version_start": trajectory.version_start,
            "weight_version_end": trajectory.version_end,
        }  # fmt: skip

    async def _lost(self, held: Held, trajectory: Trajectory) -> None:
        """Another trajectory of the sample stands."""
        content, finish = held.content, held.content.finish
        assert finish is not None
        if content.claim is None:
            await self._store.save(held, msgspec.structs.replace(content, state="open", finish=None))
            name = finish.name.partition("/")[2]
            raise conflict(f"sample {finish.sample} of group {name!r} stands already: give another sample or group")
        end = End(stage=None, reason="another attempt at its sample was finished first")
        await self._claims.end(held, end)
        raise conflict(f"session {held.id} is over: {end.reason}; claim another task")

    def _is_mine(self, trajectory: Trajectory) -> Callable[[bytes], bool]:
        def check(data: bytes) -> bool:
            try:
                standing = decode_trajectory(data)
            except MalformedError:
                return False
            same = standing.task_sequence == trajectory.task_sequence and standing.lane == trajectory.lane
            return same and standing.tokens.tolist() == trajectory.tokens.tolist()

        return check

    async def _made(self, name: str, content: Content) -> Trajectory:
        """The same call gives the same bytes, but for the gateway's name in them."""
        sampling, finish, settings = content.sampling, content.finish, self._settings
        if sampling is None or finish is None:
            raise conflict("the session has no turn of the policy: there is nothing to finish")
        if sampling.temperature <= 0:
            raise conflict("the session was sampled greedily (temperature 0): its logprobs can't be trained on")

        def make() -> Trajectory:
            session = self._tree(content)
            if content.task is None:
                return trajectory_of(session, name, content, sampling, finish, settings, self._replica)
            return self._claimed(session, content, finish)

        try:
            made = await asyncio.to_thread(make)
        except ConflictError as error:
            raise conflict(error.message) from error
        except MissingError as error:
            raise ApiError(400, "invalid_request_error", f"node: {error.message}") from error
        if finish.reward is None:
            return made
        given = GivenReward(value=finish.reward, components=finish.components, by=finish.name.partition("/")[0])
        return dataclasses.replace(made, given_reward=given)

    def _claimed(self, session: Session, content: Content, finish: Finish) -> Trajectory:
        task, claim, found = content.task, content.claim, branch(session, finish.node)
        assert task is not None
        assert claim is not None
        return Trajectory(
            run=task.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
            task_sequence=claim.task_sequence, attempt=task.attempt, prompt_ref=task.prompt_ref, reference=task.reference,
            tokens=found.tokens, loss_mask=found.loss_mask, logprobs=found.logprobs, version_spans=found.spans,
            segments=found.segments, finish=found.finish, sampling=task.sampling, seed=task.seed,
            engine=self._settings.rollout.engine, replica=self._replica,
            timings=Timings(pulled_at=content.created, finished_at=finish.at),
        )  # fmt: skip
