"""Group numbers in subjects: the buffer's own as they are, external ones as `ext-N`, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.bus.topology import Topology
from towline.contract.groups import external_group, group_token, is_external, parse_group


@given(st.integers(-(1 << 62), 1 << 62))
def test_a_group_comes_back_from_its_subject(group: int) -> None:
    token = group_token(group)
    assert parse_group(token) == group
    assert token.startswith("ext-") == is_external(group)
    names = Topology("run")
    assert names.relative(names.trajectory(group, 3)) == f"trajectory.{token}.3"
    assert names.relative(names.score(group, 3)) == f"outcome.score.{token}.3"
    assert names.relative(names.failure(group, 3)) == f"outcome.failure.{token}.3"
    assert names.relative(names.partial(group, 3)) == f"partial.{token}.3"


@pytest.mark.parametrize("token", ["", "ext-", "ext-0", "ext-01", "01", "-1", "ext--1", "ext-1a", "1_0", "ext-" + "9" * 20])
def test_one_group_has_one_token(token: str) -> None:
    assert parse_group(token) is None


def test_a_senders_name_gives_one_number_below_0_that_fits_into_int64() -> None:
    numbers = {external_group(f"session-{i}") for i in range(10_000)}
    assert len(numbers) == 10_000
    assert all(-(1 << 62) <= number < 0 for number in numbers)
    assert external_group("session-7") == external_group("session-7")
