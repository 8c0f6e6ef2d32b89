"""Where materializing starts from: all ways, the cheapest first, by the sums over whole chains; and how far that looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from live.store import logs
from towline.config import StoreSettings
from towline.errors import MissingError
from towline.store import materialize
from towline.store.anchors import AnchorRecord
from towline.store.log import Head, Log
from towline.store.materialize import APPLY_WEIGHT, plan
from towline.store.objects import open_store


def log_of(folder: Path, versions: list[dict[str, Any]]) -> Log:
    """Entry 0, an epoch, and these versions: numbers 2, 3, ..."""
    log = Log(open_store(StoreSettings(url=folder.as_uri())), "r")
    log.append(logs.base())
    log.append(logs.opened())
    for fields in versions:
        log.append(logs.version(**fields))
    return log


def starts(log: Log, version: int, have: int | None, anchors: dict[int, int]) -> Any:
    """`plan`, where there are anchors of these sizes; of an odd size: only the hint has it."""

    def read(objects: object, run: str, number: int) -> AnchorRecord:
        if anchors.get(number, 1) % 2:
            raise MissingError("no such object", code="object_missing")
        return mock.Mock(spec=AnchorRecord, nbytes=anchors[number])

    with (
        mock.patch.object(materialize, "read_anchor", read),
        mock.patch.object(log, "read_hint", return_value=Head(0, tuple(anchors))),
    ):
        yield from plan(mock.Mock(), log, version, have)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_ways_come_the_cheapest_first(tmp_path_factory: Any, data: st.DataObject) -> None:
    sizes = st.integers(1, 100)
    one = st.fixed_dictionaries(
        {"wire_bytes": sizes, "model_bytes": sizes, "representation": st.sampled_from(["delta"] * 4 + ["full"])}
    )
    versions = data.draw(st.lists(one, min_size=1, max_size=12))
    log = log_of(tmp_path_factory.mktemp("plan"), versions)
    line = log.lineage.path()
    version = data.draw(st.sampled_from(line[1:]))
    have = data.draw(st.sampled_from([None, *line]))
    anchors = data.draw(st.dictionaries(st.sampled_from(line), st.integers(1, 400)))

    def after(number: int) -> tuple[int, ...]:
        return tuple(v for v in line if number < v <= version)

    def cost(chain: tuple[int, ...]) -> float:
        return sum(versions[v - 2]["wire_bytes"] + APPLY_WEIGHT * versions[v - 2]["model_bytes"] for v in chain)

    want = [("own", after(have), cost(after(have)))] if have is not None and have <= version else []
    want += [("anchor", after(n), cost(after(n)) + size) for n, size in anchors.items() if n <= version and size % 2 == 0]
    full = [v for v in line[1:] if v <= version and versions[v - 2]["representation"] == "full"]
    want += [("full", tuple(v for v in line if full[-1] <= v <= version), 0.0)] if full else []
    want = [(kind, chain, cost(chain) if kind == "full" else whole) for kind, chain, whole in want]
    found = list(starts(log, version, have, anchors))
    costs = [start.cost for start in found]
    assert costs == sorted(costs) or max(a - b for a, b in zip(costs, sorted(costs), strict=True)) < 1e-9
    assert sorted((s.kind, s.chain, round(s.cost, 6)) for s in found) == sorted((k, c, round(w, 6)) for k, c, w in want)


def test_who_has_the_version_before_looks_no_further_back(tmp_path: Path) -> None:
    log = log_of(tmp_path, [{"wire_bytes": 10, "model_bytes": 100}] * 60)
    newest = log.lineage.latest
    with mock.patch.object(log, "version", wraps=log.version) as looked_at:
        first = next(starts(log, newest, newest - 1, {0: 100, newest - 40: 100}))
    assert (first.kind, first.chain) == ("own", (newest,))
    assert looked_at.call_count <= 2
