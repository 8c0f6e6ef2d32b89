"""Every stream, subject, consumer, bucket and limit of a run, as data. Nothing else in Towline spells a subject.

Names include the run, so that many runs share one bus. Streams keep their messages (limits retention), live in files and
refuse what doesn't fit (discard new): a full stream is back-pressure, never loss. Sizes are shares of the run's budget.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from towline.contract.groups import group_token
from towline.errors import UsageError

RUN_NAME = re.compile(r"[a-z0-9-]{1,32}")

ACK_WAIT_SECONDS = 45.0
"""`rollout.ack_wait_seconds` unless set: a cluster that elects a new leader was measured without answers for up to 10 s."""
IN_PROGRESS_SHARE = 1 / 3
"""Of the ack wait, between two signs of life for what is in hand: two may be lost in a row."""
REWARD_ACK_WAIT_SECONDS = 20.0
"""`reward.ack_wait_seconds` where nothing is set. Shorter, since scoring is quick and a whole batch may wait for it."""
PUBLISHER_ACK_WAIT_SECONDS = 300.0
REGISTRY_TTL_SECONDS = 15.0
LEASE_TTL_SECONDS = 15.0
MAX_ATOMIC_MESSAGES = 1000
"""nats-server's limit on the messages of one atomic batch; so no group is larger."""

DEFAULT_LANES = ("train", "eval")
TOKEN = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream: its subjects (relative to `towline.RUN.`) and its share of the run's storage budget."""

    key: str
    subjects: tuple[str, ...]
    budget_share: float
    max_msgs_per_subject: int = -1
    atomic: bool = False


CONTROL = StreamSpec("CONTROL", ("control.>",), 0.25, atomic=True)
TRAJECTORY = StreamSpec("TRAJECTORY", ("trajectory.>",), 0.50)
OUTCOME = StreamSpec("OUTCOME", ("outcome.>",), 0.15, atomic=True)
PARTIAL = StreamSpec("PARTIAL", ("partial.>",), 0.05, max_msgs_per_subject=1)
POLICY = StreamSpec("POLICY", ("policy.>",), 0.01)
DEAD = StreamSpec("DEAD", ("dead.>",), 0.02)
STREAMS = (CONTROL, OUTCOME, TRAJECTORY, PARTIAL, POLICY, DEAD)
"""In the order of creation: where the server's storage runs short, CONTROL and OUTCOME have theirs already."""


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A key-value bucket. `ttl_seconds` None: entries stay. It has BUCKET_BYTES, or its share of the budget if that's more."""

    key: str
    ttl_seconds: float | None
    history: int = 1
    budget_share: float = 0.0


REPLICAS = BucketSpec("replicas", REGISTRY_TTL_SECONDS)
ACKS = BucketSpec("acks", None)
LEASES = BucketSpec("leases", LEASE_TTL_SECONDS)
STATUS = BucketSpec("status", REGISTRY_TTL_SECONDS)
SESSIONS = BucketSpec("sessions", 86400.0, budget_share=0.01)
IDEMPOTENCY = BucketSpec("idempotency", 86400.0, budget_share=0.01)
BUCKETS = (REPLICAS, ACKS, LEASES, STATUS, SESSIONS, IDEMPOTENCY)
BUCKET_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer that its readers share. Filters are full subjects."""

    stream: str
    durable: str
    filters: tuple[str, ...]
    max_ack_pending: int
    ack_wait_seconds: float = ACK_WAIT_SECONDS
    inactive_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """The names of one run. `site`: whose streams these are, "" at home; `sites`: all that have lanes of their own (sites.py)."""

    run: str
    site: str = ""
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise UsageError(f"run name {self.run!r}: use 1 to 32 of a-z, 0-9 and '-'", code="run_name")

    def stream(self, spec: StreamSpec) -> str:
        return f"towline_{self.run}_{spec.key}"

    def bucket(self, spec: BucketSpec) -> str:
        return f"towline_{self.run}_{spec.key}"

    def subject(self, relative: str) -> str:
        """`towline.RUN.` + relative; the inverse is `relative`."""
        return f"towline.{self.run}.{relative}"

    def relative(self, subject: str) -> str:
        return subject.removeprefix(f"towline.{self.run}.")

    # CONTROL
    def task(self, lane: str, version: int | None = None, site: str = "") -> str:
        """`site`: whose workers alone get it; "": home's."""
        return self.subject(f"control.task.{_lane(lane, version, site)}")

    def reissue(self, lane: str, version: int | None = None, site: str = "") -> str:
        return self.subject(f"control.reissue.{_lane(lane, version, site)}")

    def control(self, kind: str) -> str:
        """`kind`: writer, batch, drop, requeue, cancel, admit, eval, fork, snapshot or end."""
        return self.subject(f"control.{kind}")

    # data
    def trajectory(self, group: int | str, sample: int | str) -> str:
        return self.subject(f"trajectory.{_group(group)}.{sample}")

    def score(self, group: int | str, sample: int | str) -> str:
        return self.subject(f"outcome.score.{_group(group)}.{sample}")

    def failure(self, group: int | str, sample: int | str) -> str:
        return self.subject(f"outcome.failure.{_group(group)}.{sample}")

    def partial(self, group: int | str, sample: int | str) -> str:
        return self.subject(f"partial.{_group(group)}.{sample}")

    def policy(self, kind: str) -> str:
        """`kind`: opened, staged, committed or refused."""
        return self.subject(f"policy.{kind}")

    def dead(self, stage: str) -> str:
        return self.subject(f"dead.{stage}")

    def serve(self, replica: str) -> str:
        """Core NATS, no stream: requests to the replica's door; `.cancel` below it takes one back."""
        return self.subject(f"serve.{replica}")

    # consumers
    def lane_consumer(
        self, lane: str, fleet_slots: int, version: int | None = None, ack_wait_seconds: float = ACK_WAIT_SECONDS
    ) -> ConsumerSpec:
        """The lane's one consumer here, from which every worker pulls. An exact version's goes away when nobody pulls.

        At a site it has the same name, on the mirror, and only what is issued to the site: so no task has two consumers.
        """
        return ConsumerSpec(
            stream=self.stream(CONTROL),
            durable=f"lane-{_lane(lane, version).replace('.', '-')}",
            filters=(self.task(lane, version, self.site), self.reissue(lane, version, self.site)),
            max_ack_pending=max(2 * fleet_slots, 1),
            ack_wait_seconds=ack_wait_seconds,
            inactive_seconds=600.0 if version is not None else None,
        )

    def reward_consumer(self, max_ack_pending: int = 4096, ack_wait_seconds: float = REWARD_ACK_WAIT_SECONDS) -> ConsumerSpec:
        return ConsumerSpec(self.stream(TRAJECTORY), "reward", (self.subject("trajectory.>"),), max_ack_pending, ack_wait_seconds)

    def publisher_consumer(self) -> ConsumerSpec:
        return ConsumerSpec(self.stream(POLICY), "publisher", (self.policy("staged"),), 16, PUBLISHER_ACK_WAIT_SECONDS)


def _group(group: int | str) -> str:
    """Numbers below 0 are external groups: -17 is `ext-17`."""
    return group if isinstance(group, str) else group_token(group)


def _lane(lane: str, version: int | None, site: str = "") -> str:
    if not TOKEN.fullmatch(lane):
        raise UsageError(f"lane {lane!r}: use letters, digits, '_' and '-'", code="lane_name")
    return ".".join([lane, *([] if version is None else [str(version)]), *([site] if site else [])])
