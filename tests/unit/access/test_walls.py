"""What holds for a tenant's accounts, whatever the topology comes to have."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.access.nats import permissions
from towline.access.roles import ROLES
from towline.access.walls import Walled, account_of, walled
from towline.bus.consumer import GRACE_SECONDS, LONGEST_PULL_SECONDS
from towline.bus.jetstream import ATTEMPT_SECONDS
from towline.bus.read import SILENCE_SECONDS
from towline.errors import UsageError

RUN_NAMES = st.lists(st.from_regex(r"\A[a-z0-9-]{1,12}\Z"), min_size=1, max_size=2, unique=True)
OWN_ANSWERS = ("_INBOX.", "_R_.")


def both(one: str, other: str) -> bool:
    """Whether a subject matches both patterns, as NATS documents them: `*` is one token, `>` one or more at the end."""
    left, right = one.split("."), other.split(".")
    for a, b in itertools.zip_longest(left, right):
        if a is None or b is None:
            return False
        if ">" in (a, b):
            return True
        if "*" not in (a, b) and a != b:
            return False
    return True


def within(narrow: str, wide: str) -> bool:
    """Whether the one pattern's subjects are all of the other's."""
    left, right = narrow.split("."), wide.split(".")
    for a, b in itertools.zip_longest(left, right):
        if b == ">":
            return a is not None
        if a is None or b is None or a == ">" or (b != "*" and a != b):
            return False
    return True


@settings(max_examples=4, deadline=None)
@given(runs=RUN_NAMES)
def test_a_roles_account_imports_what_the_role_may_publish_and_hear_and_nothing_else(runs: list[str]) -> None:
    for one in walled("tenant", runs)[1:]:
        plain = permissions(one.role, runs)
        asked = [wish.subject for wish in one.imports if not wish.stream]
        for subject in plain.publish:
            assert subject.startswith("_INBOX.") or any(within(subject, wish) for wish in asked), subject
        for subject in asked:
            assert subject == "$JS.API.INFO" or any(within(subject, mine) for mine in plain.publish), subject
        for wish in one.imports:
            if wish.stream:
                assert wish.subject in plain.subscribe
        assert one.permissions is not None
        assert one.permissions.subscribe == plain.subscribe
        assert one.permissions.publish_deny == plain.publish_deny
        assert {s for s in one.permissions.publish if not s.startswith(OWN_ANSWERS)} == {
            s for s in plain.publish if not s.startswith("_INBOX.")
        }


def test_every_import_is_of_an_account_that_gives_it_to_this_one() -> None:
    accounts = {one.name: one for one in walled("tenant", ["one", "two"])}
    for one in accounts.values():
        for wish in one.imports:
            given_to = [
                given for given in accounts[wish.account].exports
                if given.stream == wish.stream and given.subject == wish.subject and one.name in given.to
            ]  # fmt: skip
            assert given_to, (one.name, wish)


def test_nothing_that_is_sent_goes_out_twice() -> None:
    for one in walled("tenant", ["one", "two"]):
        requests = [wish.subject for wish in one.imports if not wish.stream]
        for left, right in itertools.combinations(requests, 2):
            acks = left.startswith("$JS.ACK.*.*.") != right.startswith("$JS.ACK.*.*.")  # of two forms: an ack has one of them
            assert acks or not both(left, right), (one.name, left, right)


def test_the_account_of_the_streams_has_no_user_and_exports_nothing_to_hear() -> None:
    core, *others = walled("tenant", ["one"])
    assert core.name == "tenant"
    assert core.permissions is None
    assert not [given for given in core.exports if given.stream]
    assert [one.name for one in others] == [account_of("tenant", role) for role in ROLES]
    assert all(given.to for one in (core, *others) for given in one.exports)


def test_what_many_messages_answer_is_remembered_for_longer_than_a_fetch_or_a_reader_is_without_one() -> None:
    core: Walled = walled("tenant", ["one"])[0]
    seconds = {given.subject: given.seconds for given in core.exports}
    pull = seconds["$JS.API.CONSUMER.MSG.NEXT.towline_one_CONTROL.lane-train"] or 0
    assert pull > max(LONGEST_PULL_SECONDS + GRACE_SECONDS, SILENCE_SECONDS)
    assert pull <= 30  # an idle worker pulls several times a second
    assert ATTEMPT_SECONDS < (seconds["$JS.API.DIRECT.GET.towline_one_TRAJECTORY"] or 0) <= 30
    assert (seconds["towline.one.serve.*"] or 0) >= 60
    assert seconds["towline.one.trajectory.*.*"] is None


def test_an_account_is_of_a_role_that_there_is() -> None:
    with pytest.raises(UsageError, match="no role 'root'"):
        account_of("tenant", "root")
