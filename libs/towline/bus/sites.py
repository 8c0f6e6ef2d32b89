"""What a run has where, when it has several sites: home decides, a site works on copies of home's decisions.

A site's bus is a JetStream domain of its own, joined to home's by one leaf connection. Streams have the same names in both, and
a client reaches those of the server that it's connected to, so no service knows where it is. CONTROL and POLICY are home's, the
site mirrors them; what is made at a site stands in the site's own streams first, and home sources it from there whenever the
connection is up. Subjects that both sides' streams capture, and acks, never cross: the connection's rules deny them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from towline.bus.topology import (
    ACKS,
    BUCKETS,
    CONTROL,
    DEAD,
    OUTCOME,
    PARTIAL,
    POLICY,
    REPLICAS,
    STATUS,
    STREAMS,
    TRAJECTORY,
    BucketSpec,
    StreamSpec,
    Topology,
)
from towline.config import BusSettings

MIRRORED = (CONTROL, POLICY)
"""Home's, read at the sites with the same sequences."""
GATHERED: tuple[StreamSpec | BucketSpec, ...] = (TRAJECTORY, OUTCOME, DEAD, REPLICAS, ACKS, STATUS)
"""Written on either side. Home's have what all sides wrote, numbered anew; a site's its own alone."""
OWN = (PARTIAL,)
"""Each side's own: a hand-over stays within a site."""
KEPT_SMALL = (CONTROL, TRAJECTORY, OUTCOME, DEAD, PARTIAL)
"""Of a site's streams, those that home's buffer purges there."""
SITE_STREAMS = (*MIRRORED, *(spec for spec in STREAMS if spec in GATHERED), *OWN)
SITE_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket in GATHERED)


SYNC_RENEWALS = 4
"""How often a stream of a site can be taken in by a new consumer. Each has a name of its own: home's server remembers for each
name how far it was, and takes nothing below that."""
SYNC_WINDOW = 8192
"""Messages that may be on their way over a site's connection, of one stream, before what has arrived is confirmed."""
_NANOSECONDS = 1_000_000_000


def domain_api(domain: str) -> str:
    """The prefix under which the JetStream of another domain takes requests."""
    return f"$JS.{domain}.API"


def placed(config: dict[str, Any], spec: StreamSpec | BucketSpec, settings: BusSettings) -> dict[str, Any] | None:
    """The stream's configuration as it is where `settings` come to; None where it has no such stream."""
    name = config["name"]
    if settings.site:
        if spec in MIRRORED:
            kept = {key: value for key, value in config.items() if key not in ("subjects", "duplicate_window", "allow_atomic")}
            return kept | {"mirror": _from(name, settings.home_domain, settings.site)}
        return config if spec in SITE_STREAMS or spec in SITE_BUCKETS else None
    if settings.sites and spec in GATHERED:
        return config | {"sources": [_from(name, site, site) for site in settings.sites]}
    return config


def kept(wanted: dict[str, Any], standing: dict[str, Any]) -> dict[str, Any]:
    """`wanted` with what a stream that stands takes in from elsewhere as it stands: a mirror can't be changed, and a source that
    is asked in another way is one that everything is taken of again."""
    if "mirror" in wanted and "mirror" in standing:
        return wanted | {"mirror": standing["mirror"]}
    if "sources" in wanted:
        there = {_whose(source): source for source in standing.get("sources") or ()}
        return wanted | {"sources": [there.get(_whose(source), source) for source in wanted["sources"]]}
    return wanted


def syncs(topology: Topology, spec: StreamSpec | BucketSpec) -> list[dict[str, Any]]:
    """The consumers by which the other side takes in the stream that is here: one for each site, of home's; one of a site's.

    They are durable: the server that asks hears of one that is there again by its heartbeat, within a second, and needn't wait
    for its own next try, which after a cut of a minute is 40 s away. And they know what has arrived at the other side.
    """
    stream = stream_of(topology, spec)
    if topology.site:
        return [_sync(stream, topology.site)] if spec in GATHERED else []
    return [_sync(stream, site) for site in topology.sites] if spec in MIRRORED else []


def sync_name(site: str) -> str:
    """The consumer that `init` makes."""
    return f"sync-{site}"


def sync_names(site: str) -> tuple[str, ...]:
    """It and those that may follow it. No site's name has an underscore."""
    return (sync_name(site), *(f"{sync_name(site)}_{number}" for number in range(1, SYNC_RENEWALS + 1)))


def taken_by(config: Mapping[str, Any], site: str) -> str | None:
    """The consumer by which home's stream, configured so, takes the site's in; None where it's by none."""
    for source in config.get("sources") or ():
        if _whose(source)[1] == domain_api(site):
            name = (source.get("consumer") or {}).get("name")
            return str(name) if name else None
    return None


def taking_by(config: dict[str, Any], site: str, consumer: str) -> dict[str, Any]:
    """The configuration of home's stream, with the site's taken in by another consumer."""
    by = {"name": consumer, "deliver_subject": _way(config["name"], site, consumer)}
    sources = [source | {"consumer": by} if _whose(source)[1] == domain_api(site) else source for source in config["sources"]]
    return config | {"sources": sources}


def renewed_sync(stream: str, site: str, consumer: str, start: int) -> dict[str, Any]:
    """One of the consumers that may follow the first, which begins at the sequence `start`."""
    config = _sync(stream, site) | {
        "name": consumer, "durable_name": consumer, "deliver_subject": _way(stream, site, consumer),
    }  # fmt: skip
    return config | ({"deliver_policy": "by_start_sequence", "opt_start_seq": start} if start > 1 else {})


def stream_of(topology: Topology, spec: StreamSpec | BucketSpec) -> str:
    """The server's name of it; a bucket is a stream too."""
    return topology.stream(spec) if isinstance(spec, StreamSpec) else f"KV_{topology.bucket(spec)}"


def _sync(stream: str, site: str) -> dict[str, Any]:
    return {
        "name": sync_name(site), "durable_name": sync_name(site), "deliver_subject": _way(stream, site), "deliver_policy": "all",
        "ack_policy": "flow_control", "flow_control": True, "idle_heartbeat": _NANOSECONDS, "max_ack_pending": SYNC_WINDOW,
    }  # fmt: skip


def _way(stream: str, site: str, consumer: str = "") -> str:
    """The subject on which the stream's messages go over the site's connection, by the first consumer or one that followed it.
    No stream has it."""
    return f"towline.sync.{stream}.{site}{consumer.removeprefix(sync_name(site))}"


def _from(name: str, domain: str, site: str) -> dict[str, Any]:
    by = {"name": sync_name(site), "deliver_subject": _way(name, site)}
    return {"name": name, "external": {"api": domain_api(domain), "deliver": ""}, "consumer": by}


def _whose(source: dict[str, Any]) -> tuple[str, str]:
    return source["name"], (source.get("external") or {}).get("api", "")


def kept_apart(runs: Iterable[str]) -> list[str]:
    """Subjects that cross a site's connection in neither direction: both sides' streams would take what is sent on either, and
    an ack of the one side's consumer would count for the other's of the same name."""
    subjects: set[str] = set()
    for run in runs:
        topology = Topology(run)
        for spec in STREAMS:
            if spec in GATHERED or spec in OWN:
                subjects.update(topology.subject(subject) for subject in spec.subjects)
            subjects.update(_acks(topology.stream(spec)))
        for bucket in BUCKETS:
            subjects.add(f"$KV.{topology.bucket(bucket)}.>")
            subjects.update(_acks(f"KV_{topology.bucket(bucket)}"))
    return sorted(subjects)


def kept_in(runs: Iterable[str]) -> list[str]:
    """Subjects that a site sends to nobody: what home alone decides."""
    return sorted(Topology(run).subject(subject) for run in runs for spec in MIRRORED for subject in spec.subjects)


def _acks(stream: str) -> tuple[str, str]:
    """Both forms of ack subjects: without and with a domain and an account."""
    return f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>"
