"""Whether NetworkPolicies let one pod reach another, or an address outside, as Kubernetes' documentation says they are read.

A pod that no policy of a direction selects is open in it; one that some do may do what any of these allows.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manifests.rendered import Resource, of_kind, rendered


@dataclass(frozen=True)
class End:
    """A pod by its labels and its namespace's, or what has only an address."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


def own_namespace(overlay: str) -> dict[str, str]:
    (name,) = {one["metadata"]["namespace"] for one in rendered(overlay) if one["kind"] == "NetworkPolicy"}
    return {"kubernetes.io/metadata.name": name}


def pod(overlay: str, name: str) -> End:
    """The pod that the workload of this name makes."""
    for found in rendered(overlay):
        if found["kind"] in ("Deployment", "StatefulSet", "Job", "CronJob") and found["metadata"]["name"] == name:
            spec = found["spec"]["jobTemplate"]["spec"] if found["kind"] == "CronJob" else found["spec"]
            return End(spec["template"]["metadata"]["labels"], own_namespace(overlay))
    raise KeyError(name)


def reaches(overlay: str, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Both ends' policies must allow it, where the end is a pod of the overlay."""
    policies = [one["spec"] for one in of_kind(overlay, "NetworkPolicy").values()]
    home = own_namespace(overlay)
    out = _allowed(policies, "Egress", source, target, port, protocol, home) if source.namespace == home else True
    return out and (_allowed(policies, "Ingress", target, source, port, protocol, home) if target.namespace == home else True)


def _allowed(
    policies: Iterable[Resource], direction: str, own: End, other: End, port: int, protocol: str, home: Mapping[str, str]
) -> bool:
    selecting = [one for one in policies if direction in one["policyTypes"] and _selects(one["podSelector"], own.labels)]
    key, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return not selecting or any(
        _port(rule.get("ports"), port, protocol) and (peers not in rule or any(_peer(peer, other, home) for peer in rule[peers]))
        for one in selecting
        for rule in one.get(key, [])
    )


def _port(ports: list[Resource] | None, port: int, protocol: str) -> bool:
    return ports is None or any(one.get("port", port) == port and one.get("protocol", "TCP") == protocol for one in ports)


def _peer(peer: Resource, other: End, home: Mapping[str, str]) -> bool:
    if block := peer.get("ipBlock"):
        if not other.address:
            return False
        address = ipaddress.ip_address(other.address)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(one) for one in block.get("except", [])
        )
    if other.address:
        return False
    there = _selects(peer["namespaceSelector"], other.namespace) if "namespaceSelector" in peer else other.namespace == home
    return there and _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: Resource, labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In"
        if labels.get(one["key"]) not in one["values"]:
            return False
    return True
