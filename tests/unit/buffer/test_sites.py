"""Several sites: where groups go, and what becomes of those of a site that nothing is heard of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from towline.buffer.presence import Listener, Presence
from towline.buffer.view import View
from towline.contract.control import CancelRecord, ReissueRecord, TaskRecord
from towline.contract.policy import ReplicaInfo

from .world import World, rules


@dataclass
class Spread(World):
    presence: Presence = field(default_factory=Presence)

    @property
    def view(self) -> View:
        return View(self.state, self.lineage, self.rules, self.sources, self.now, self.presence)


def begun(slots: dict[str, int], *, silent: frozenset[str] = frozenset(), sites: tuple[str, ...] = ("b", "c")) -> Spread:
    world = Spread(rules(sites=sites, groups_per_batch=12), presence=Presence(slots, silent))
    world.base()
    world.open()
    return world


def sites_of(world: Spread) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for record in world.settle():
        if isinstance(record, TaskRecord):
            found.setdefault(record.task.group, set()).add(record.task.issued_to)
    return found


def replica(site: str, slots: int = 4) -> ReplicaInfo:
    info = ReplicaInfo(replica=f"w-{site}", host="h", engine="e", slots=slots, busy=0, state="serving", version=0, at=0.0)
    return info if not site else ReplicaInfo(**{name: getattr(info, name) for name in info.__struct_fields__} | {"site": site})


def test_groups_go_to_sites_by_their_slots_and_each_group_whole_to_one() -> None:
    found = sites_of(begun({"": 3, "b": 2, "c": 1}))
    assert all(len(sites) == 1 for sites in found.values())
    assert Counter(next(iter(sites)) for sites in found.values()) == {"": 6, "b": 4, "c": 2}


def test_a_site_that_has_no_slots_or_is_not_the_runs_gets_nothing() -> None:
    assert {site for sites in sites_of(begun({"": 1, "b": 0, "elsewhere": 50})).values() for site in sites} == {""}
    assert {site for sites in sites_of(begun({"b": 1})).values() for site in sites} == {"b"}
    assert {site for sites in sites_of(begun({})).values() for site in sites} == {""}


def test_a_task_of_home_is_written_as_by_a_run_of_one_site() -> None:
    several, one = begun({"": 4}), begun({"": 4}, sites=())
    several.settle()
    one.settle()
    assert several.control == one.control


def test_what_a_silent_site_has_not_delivered_is_issued_at_home_once_and_nothing_else_is() -> None:
    world = begun({"": 1, "b": 1})
    found = sites_of(world)
    at_b = sorted(number for number, sites in found.items() if sites == {"b"})
    assert len(at_b) == 6
    world.outcome(world.score(at_b[0], 0))
    world.settle()
    world.presence = Presence({"": 1}, frozenset({"b"}))
    records = world.settle()
    again = {(r.task.group, r.task.sample): r for r in records if isinstance(r, ReissueRecord)}
    wanted = {(group, sample) for group in at_b for sample in range(2)} - {(at_b[0], 0)}
    assert set(again) == wanted
    assert {r.reason for r in again.values()} == {"site_silent"}
    assert {r.task.issued_to for r in again.values()} == {""}
    assert {(r.group, r.sample) for r in records if isinstance(r, CancelRecord)} == wanted
    assert world.settle() == []
    world.restart()
    assert world.settle() == []


def test_a_site_counts_as_silent_after_its_time_and_not_before_and_no_longer_once_it_is_heard() -> None:
    listener = Listener(["b"], 60.0)
    assert listener.hear([], 1000.0).silent == frozenset()
    assert listener.hear([replica("b"), replica("")], 1010.0) == Presence({"": 4, "b": 4}, frozenset())
    assert listener.hear([replica("")], 1069.0).silent == frozenset()
    assert listener.hear([replica("")], 1071.0) == Presence({"": 4}, frozenset({"b"}))
    assert listener.hear([replica("b")], 1072.0).silent == frozenset()


def test_a_site_that_a_new_buffer_never_heard_of_gets_its_time_too() -> None:
    listener = Listener(["b"], 60.0)
    assert listener.hear([], 5.0).silent == frozenset()
    assert listener.hear([], 64.0).silent == frozenset()
    assert listener.hear([], 66.0).silent == {"b"}


def test_a_name_that_comes_from_two_places_in_turn_is_two_replicas_and_one_that_moved_is_not() -> None:
    listener = Listener(["b"], 600.0)
    here, there = replica(""), replace(replica("b"), replica="w-")
    for heard in ([here], [there], [there]):
        listener.hear(heard, 0.0)
    assert listener.twice == {}, "it went from home to b"
    listener.hear([here], 1.0)
    assert listener.twice == {"w-": ("", "b")}


def test_a_replica_that_moves_there_and_back_with_its_name_free_in_between_is_one() -> None:
    listener = Listener(["b"], 600.0)
    here, there = replica(""), replace(replica("b"), replica="w-")
    for heard in ([here], [], [there], [], [here]):
        listener.hear(heard, 0.0)
    assert listener.twice == {}
