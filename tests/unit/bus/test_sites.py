"""What a site's streams take in, and where home's messages came from."""

from __future__ import annotations

from typing import Any

import pytest

from towline.bus.origins import parse_source
from towline.bus.sites import GATHERED, MIRRORED, kept, placed, syncs
from towline.bus.topology import BUCKETS, CONTROL, STREAMS, TRAJECTORY, BucketSpec, StreamSpec, Topology
from towline.config import BusSettings

HOME = BusSettings(url="nats://home", sites=("b", "c"))
AT_B = HOME.model_copy(update={"site": "b"})


def config(settings: BusSettings, spec: StreamSpec) -> dict[str, Any]:
    found = placed({"name": Topology("run").stream(spec), "subjects": ["s"], "max_bytes": 1}, spec, settings)
    assert found is not None
    return found


def whole(spec: StreamSpec | BucketSpec, settings: BusSettings) -> list[dict[str, Any]]:
    return syncs(Topology("run", settings.site, settings.sites), spec)


@pytest.mark.parametrize("spec", [*STREAMS, *BUCKETS], ids=lambda spec: spec.key)
def test_each_way_in_has_its_consumer_on_the_side_where_the_messages_are(spec: StreamSpec | BucketSpec) -> None:
    at_home, at_b = whole(spec, HOME), whole(spec, AT_B)
    assert [one["durable_name"] for one in at_home] == (["sync-b", "sync-c"] if spec in MIRRORED else [])
    assert [one["durable_name"] for one in at_b] == (["sync-b"] if spec in GATHERED else [])
    assert not whole(spec, BusSettings(url="nats://alone"))


def test_the_names_that_one_side_asks_for_are_those_that_the_other_side_makes() -> None:
    (mirror,) = [one for one in whole(CONTROL, HOME) if one["durable_name"] == "sync-b"]
    asked = config(AT_B, CONTROL)["mirror"]["consumer"]
    assert asked == {"name": mirror["durable_name"], "deliver_subject": mirror["deliver_subject"]}
    (source,) = whole(TRAJECTORY, AT_B)
    asked = config(HOME, TRAJECTORY)["sources"][0]["consumer"]
    assert asked == {"name": source["durable_name"], "deliver_subject": source["deliver_subject"]}
    ways = [one["deliver_subject"] for spec in (*STREAMS, *BUCKETS) for one in (*whole(spec, HOME), *whole(spec, AT_B))]
    assert len(ways) == len(set(ways)), "two streams' messages on one subject"


def test_what_stands_is_taken_in_as_it_was_and_only_a_new_site_in_the_new_way() -> None:
    old = {"name": "towline_run_TRAJECTORY", "external": {"api": "$JS.b.API", "deliver": ""}}
    wanted = config(HOME, TRAJECTORY)
    found = kept(wanted, {"sources": [old]})
    assert found["sources"] == [old, wanted["sources"][1]]
    mirror = {"name": "towline_run_CONTROL", "external": {"api": "$JS.home.API", "deliver": ""}}
    assert kept(config(AT_B, CONTROL), {"mirror": mirror})["mirror"] == mirror
    assert kept(config(AT_B, CONTROL), {"subjects": ["s"]}) == config(AT_B, CONTROL)
    assert kept(wanted, {"subjects": ["s"]}) == wanted


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("towline_r_TRAJECTORY:9OTaER0X:C=CsQepArc 51 > > towline.r.trajectory.51.0 Qc3xfENv", ("9OTaER0X", 51)),
        ("towline_r_TRAJECTORY:9OTaER0X 7 > > towline.r.trajectory.51.0", ("9OTaER0X", 7)),
        ("towline_r_TRAJECTORY 7 > >", None),
        ("towline_r_TRAJECTORY:9OTaER0X", None),
        ("", None),
    ],
    ids=["durable", "before", "same_domain", "cut", "none"],
)
def test_a_messages_origin_is_read_as_the_server_writes_it(header: str, found: tuple[str, int] | None) -> None:
    assert parse_source(header) == found
