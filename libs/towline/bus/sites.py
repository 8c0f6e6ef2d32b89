"""What a run has where, when it has several sites: home decides, a site works on copies of home's decisions.

A site's bus is a JetStream domain of its own, joined to home's by one leaf connection. Streams have the same names in both, and
a client reaches those of the server that it's connected to, so no service knows where it is. CONTROL and POLICY are home's, the
site mirrors them; what is made at a site stands in the site's own streams first, and home sources it from there whenever the
connection is up. Subjects that both sides' streams capture, and acks, never cross: the connection's rules deny them.
"""

from __future__ import annotations

from collections.abc import Iterable
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
SITE_STREAMS = (*MIRRORED, *(spec for spec in STREAMS if spec in GATHERED), *OWN)
SITE_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket in GATHERED)


def domain_api(domain: str) -> str:
    """The prefix under which the JetStream of another domain takes requests."""
    return f"$JS.{domain}.API"


def placed(config: dict[str, Any], spec: StreamSpec | BucketSpec, settings: BusSettings) -> dict[str, Any] | None:
    """The stream's configuration as it is where `settings` come to; None where it has no such stream."""
    if settings.site:
        if spec in MIRRORED:
            kept = {key: value for key, value in config.items() if key not in ("subjects", "duplicate_window", "allow_atomic")}
            return kept | {"mirror": _from(config["name"], settings.home_domain)}
        return config if spec in SITE_STREAMS or spec in SITE_BUCKETS else None
    if settings.sites and spec in GATHERED:
        return config | {"sources": [_from(config["name"], site) for site in settings.sites]}
    return config


def _from(name: str, domain: str) -> dict[str, Any]:
    return {"name": name, "external": {"api": domain_api(domain), "deliver": ""}}


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
