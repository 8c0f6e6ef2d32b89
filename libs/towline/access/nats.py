"""What each role may publish and subscribe to on the bus, generated from the topology: all else is refused.

JetStream's own requests are subjects too. What a role needs of them is said by three verbs: it `looks` at messages of a
stream, it `reads` a stream in order by a consumer of its own, it `pulls` from a durable consumer that its kind shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from towline.access import roles
from towline.bus.sites import GATHERED, KEPT_SMALL, MIRRORED, domain_api, stream_of, sync_name, sync_names
from towline.bus.topology import (
    ACKS,
    BUCKETS,
    CONTROL,
    DEAD,
    IDEMPOTENCY,
    LEASES,
    OUTCOME,
    PARTIAL,
    POLICY,
    REPLICAS,
    SESSIONS,
    STATUS,
    STREAMS,
    TRAJECTORY,
    BucketSpec,
    ConsumerSpec,
    StreamSpec,
    Topology,
)
from towline.contract.requests import STAGE as REQUEUE
from towline.contract.task import SESSION, TRAIN
from towline.errors import UsageError

_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects, wildcards allowed, sorted. What is allowed and denied is denied; what is neither is denied."""

    publish: tuple[str, ...]
    publish_deny: tuple[str, ...]
    subscribe: tuple[str, ...]
    subscribe_deny: tuple[str, ...] = ()


def inbox(role: str) -> str:
    """The prefix of the role's reply subjects, which nobody else may listen to."""
    return f"_INBOX.{roles.checked(role)}"


def permissions(role: str, runs: Sequence[str], sites: Sequence[str] = ()) -> Permissions:
    """The role's permissions in these runs, which share an account, and have these sites (bus/sites.py)."""
    roles.checked(role)
    if not runs:
        raise UsageError("name at least one run", code="run_missing")
    grants = [_Grants(role, Topology(run, sites=tuple(sites))) for run in runs]
    for one in grants:
        _GIVE[role](one)
    return Permissions(
        publish=_merged(one.publish for one in grants),
        publish_deny=_merged(one.publish_deny - one.publish for one in grants),
        subscribe=_merged([{f"{inbox(role)}.>"}, *(one.subscribe for one in grants)]),
    )


def shared_consumers(topology: Topology) -> list[ConsumerSpec]:
    """The durable consumers that a run has from its start on; lane eval has another for each version."""
    return [
        topology.lane_consumer(TRAIN, 1),
        topology.lane_consumer(SESSION, 1),
        topology.reward_consumer(),
        topology.publisher_consumer(),
    ]


class _Grants:
    """What one role gets in one run."""

    def __init__(self, role: str, topology: Topology) -> None:
        self.role = role
        self.topology = topology
        self.publish: set[str] = set()
        self.publish_deny: set[str] = set()
        self.subscribe: set[str] = set()
        for spec in STREAMS:
            self._api("STREAM.INFO", topology.stream(spec))
        for bucket in BUCKETS:
            self._api("STREAM.INFO", _kv(topology, bucket))

    # What a role sends

    def send(self, *subjects: str) -> None:
        self.publish.update(subjects)

    def hear(self, *subjects: str) -> None:
        self.subscribe.update(subjects)

    def bury(self, *stages: str) -> None:
        """Dead letters of these stages."""
        self.send(*(self.topology.dead(stage) for stage in stages))

    # What it reads

    def look(self, *specs: StreamSpec) -> None:
        """Single messages, by sequence or the last of a subject."""
        for spec in specs:
            self._look(self.topology.stream(spec))

    def read(self, *specs: StreamSpec) -> None:
        """The whole stream, by consumers of the reader's own. Those that others share are kept from it."""
        for spec in specs:
            self._read(self.topology.stream(spec))

    def read_all(self) -> None:
        self.read(*STREAMS)
        for bucket in BUCKETS:
            self._read(_kv(self.topology, bucket))

    def pull(self, spec: ConsumerSpec) -> None:
        """From the consumer, which its readers make where it's missing."""
        self.manage(spec.stream, spec.durable, "CREATE", "INFO", "MSG.NEXT")
        self._acknowledge(spec.stream, spec.durable)

    def pull_exact(self) -> None:
        """From lane eval's consumers: their names have the version in them, and a wildcard stands for a whole name."""
        stream = self.topology.stream(CONTROL)
        self.manage(stream, "*", "CREATE", "INFO", "MSG.NEXT")
        self._acknowledge(stream, "*")
        self._keep_off(stream)

    def tend(self, *specs: ConsumerSpec) -> None:
        """Make, look at and change the consumers, without pulling from them."""
        for spec in specs:
            self.manage(spec.stream, spec.durable, "CREATE", "INFO")

    def own_entries(self, bucket: BucketSpec, keys: str = ">") -> None:
        """Write the keys that match, and look at them."""
        self.send(f"$KV.{self.topology.bucket(bucket)}.{keys}")
        self._look(_kv(self.topology, bucket))

    def list_entries(self, *buckets: BucketSpec) -> None:
        for bucket in buckets:
            self._read(_kv(self.topology, bucket))

    def purge(self, *specs: StreamSpec) -> None:
        for spec in specs:
            self._api("STREAM.PURGE", self.topology.stream(spec))

    def serve(self, *, lease: bool = False) -> None:
        """What every service does: say how it is, and see the run's end."""
        self.send(f"$KV.{self.topology.bucket(STATUS)}.{self.role.replace('-', '_')}.*")
        self.look(CONTROL)
        if lease:
            self.own_entries(LEASES, self.role)

    def make(self) -> None:
        """Streams and buckets, and the consumers that their readers share."""
        for name in [self.topology.stream(spec) for spec in STREAMS] + [_kv(self.topology, bucket) for bucket in BUCKETS]:
            self._api("STREAM.CREATE", name)
            self._api("STREAM.UPDATE", name)
        self.tend(*shared_consumers(self.topology))
        for spec in (*MIRRORED, *GATHERED):
            for site in self.topology.sites:
                self.manage(stream_of(self.topology, spec), sync_name(site), "CREATE", "INFO")

    def keep_sites(self) -> None:
        """Over the sites' connections: take away there what home needs no more, fit their lane to their replicas, and have what a
        site makes under old numbers taken in by another consumer."""
        lane = self.topology.lane_consumer(TRAIN, 1)
        for site in self.topology.sites:
            for spec in KEPT_SMALL:
                for verb in ("INFO", "PURGE"):
                    self.send(f"{domain_api(site)}.STREAM.{verb}.{self.topology.stream(spec)}")
            for gathered in GATHERED:
                stream = stream_of(self.topology, gathered)
                self.send(*(f"{domain_api(site)}.STREAM.{verb}.{stream}" for verb in ("INFO", "MSG.GET")))
                for name in sync_names(site):
                    self.send(*(f"{domain_api(site)}.CONSUMER.{verb}.{stream}.{name}" for verb in ("INFO", "CREATE")))
                self._api("STREAM.UPDATE", stream)
                self._read(stream)
            for verb in ("INFO", "CREATE"):
                self.send(f"{domain_api(site)}.CONSUMER.{verb}.{lane.stream}.{lane.durable}")

    def look_for_twins(self) -> None:
        """From a site, at home's registry, whatever home's domain is called."""
        if self.topology.sites:
            self.send(f"$JS.*.API.STREAM.MSG.GET.{_kv(self.topology, REPLICAS)}")

    def _look(self, stream: str) -> None:
        self._api("STREAM.MSG.GET", stream)
        self._api("DIRECT.GET", stream)

    def _read(self, stream: str) -> None:
        self._look(stream)
        self.manage(stream, "*", "CREATE", "MSG.NEXT", "DELETE")
        self._keep_off(stream)

    def _keep_off(self, stream: str) -> None:
        """Consumers that others share have their work in them: nobody else takes from them, changes or deletes them."""
        for spec in shared_consumers(self.topology):
            if spec.stream == stream:
                self._deny(stream, spec.durable)
        taken_in = any(stream == stream_of(self.topology, spec) for spec in GATHERED)
        for site in self.topology.sites:
            for name in sync_names(site) if taken_in else (sync_name(site),):
                self._deny(stream, name)

    def _deny(self, stream: str, durable: str) -> None:
        for verb in ("CREATE", "MSG.NEXT", "DELETE"):
            self.publish_deny.add(f"{_API}.CONSUMER.{verb}.{stream}.{durable}")

    def manage(self, stream: str, name: str, *verbs: str) -> None:
        """These requests about one consumer, or about all of the stream's."""
        for verb in verbs:
            self._api(f"CONSUMER.{verb}", f"{stream}.{name}")

    def _acknowledge(self, stream: str, name: str) -> None:
        """Both forms of ack subjects: without and with a domain and an account."""
        self.send(f"$JS.ACK.{stream}.{name}.>", f"$JS.ACK.*.*.{stream}.{name}.>")

    def _api(self, verb: str, name: str) -> None:
        self.send(f"{_API}.{verb}.{name}")


def _trainer(grants: _Grants) -> None:
    topology = grants.topology
    grants.serve(lease=True)
    grants.read(CONTROL)
    grants.look(TRAJECTORY, POLICY)
    grants.send(topology.policy("opened"), topology.policy("staged"))
    grants.hear(*(topology.policy(kind) for kind in ("opened", "committed", "refused")))


def _worker(grants: _Grants) -> None:
    topology = grants.topology
    grants.serve()
    grants.read(CONTROL)
    grants.look(TRAJECTORY, PARTIAL)
    grants.pull(topology.lane_consumer(TRAIN, 1))
    grants.pull_exact()
    grants.send(topology.trajectory("*", "*"), topology.failure("*", "*"), topology.partial("*", "*"))
    grants.bury("rollout", "partial")
    grants.own_entries(REPLICAS, "*")
    grants.own_entries(ACKS, "*")
    grants.list_entries(REPLICAS, ACKS)
    grants.look_for_twins()
    grants.hear(*(topology.policy(kind) for kind in ("opened", "committed")))
    grants.hear(topology.serve("*"), f"{topology.serve('*')}.cancel")
    grants.send(f"{inbox(roles.GATEWAY)}.>")


def _reward(grants: _Grants) -> None:
    topology = grants.topology
    grants.serve()
    grants.pull(topology.reward_consumer())
    grants.look(TRAJECTORY, OUTCOME)
    grants.send(topology.score("*", "*"), topology.failure("*", "*"))
    grants.bury("reward")


def _buffer(grants: _Grants) -> None:
    topology = grants.topology
    grants.serve(lease=True)
    grants.send(topology.control(">"))
    grants.read(CONTROL, OUTCOME, TRAJECTORY, DEAD)
    grants.look(PARTIAL, POLICY)
    grants.list_entries(REPLICAS)
    grants.hear(*(topology.policy(kind) for kind in ("opened", "committed")))
    grants.bury("outcome")
    grants.purge(CONTROL, OUTCOME, TRAJECTORY, PARTIAL)
    grants.keep_sites()
    stream = topology.stream(CONTROL)
    grants.tend(topology.lane_consumer(TRAIN, 1), topology.lane_consumer(SESSION, 1))
    grants.manage(stream, "*", "INFO")  # lane eval's consumers, which it makes as its own
    reward, publisher = topology.reward_consumer(), topology.publisher_consumer()
    grants.manage(reward.stream, reward.durable, "CREATE", "INFO", "DELETE")  # made anew where TRAJECTORY went backwards
    grants.manage(publisher.stream, publisher.durable, "INFO")


def _publisher(grants: _Grants) -> None:
    topology = grants.topology
    grants.serve()
    grants.pull(topology.publisher_consumer())
    grants.look(POLICY)
    grants.send(topology.policy("committed"), topology.policy("refused"))
    grants.bury("publisher")


def _gateway(grants: _Grants) -> None:
    topology = grants.topology
    grants.serve()
    grants.read_all()  # what its web view shows
    grants.pull(topology.lane_consumer(SESSION, 1))
    grants.send(topology.trajectory("*", "*"), topology.failure("*", "*"))
    grants.send(topology.serve("*"), f"{topology.serve('*')}.cancel")
    grants.bury("gateway")
    for bucket in (IDEMPOTENCY, SESSIONS):
        grants.own_entries(bucket)
    grants.hear(*(topology.policy(kind) for kind in ("opened", "committed")))


def _viewer(grants: _Grants) -> None:
    grants.read_all()
    grants.send(f"{_API}.INFO")
    for spec in shared_consumers(grants.topology):
        grants.manage(spec.stream, spec.durable, "INFO")


def _operator(grants: _Grants) -> None:
    _viewer(grants)
    grants.send(grants.topology.dead(f"{REQUEUE}.*"))
    grants.purge(DEAD)


def _gc(grants: _Grants) -> None:
    grants.look(CONTROL)
    grants.list_entries(REPLICAS, ACKS)


def _init(grants: _Grants) -> None:
    grants.send(f"{_API}.INFO")
    grants.make()


_GIVE: dict[str, Callable[[_Grants], None]] = {
    roles.TRAINER: _trainer,
    roles.WORKER: _worker,
    roles.REWARD: _reward,
    roles.BUFFER: _buffer,
    roles.PUBLISHER: _publisher,
    roles.GATEWAY: _gateway,
    roles.OPERATOR: _operator,
    roles.VIEWER: _viewer,
    roles.GC: _gc,
    roles.INIT: _init,
}


def _kv(topology: Topology, bucket: BucketSpec) -> str:
    """The bucket's stream."""
    return f"KV_{topology.bucket(bucket)}"


def _merged(sets: Iterable[set[str]]) -> tuple[str, ...]:
    return tuple(sorted(set().union(*sets)))
