"""Which replica takes a request, by the LOG's depths and what each says of itself."""

from __future__ import annotations

import pytest

from towline.config import GatewaySettings, TenantSettings
from towline.errors import UsageError
from towline.gateway.answers import ApiError
from towline.gateway.plans import bound_model, choice_seed
from towline.gateway.routing import Candidate, Constraint, Prefixes, order
from towline.gateway.server import ApiServer
from towline.gateway.tenants import Tenants
from towline.store.lineage import Lineage
from unit.store.entries import base, opened, version

LINE = (base(), opened(1, 0, 0), version(2, 1, 0, 1), version(3, 1, 2, 2))
FORK = (*LINE, opened(4, 2, 1), version(5, 4, 2, 2))


def lineage(*entries: object) -> Lineage:
    found = Lineage()
    for entry in entries:
        found.extend(entry)  # type: ignore[arg-type]
    return found


def replica(name: str, at: int | None, load: int = 0, **fields: object) -> Candidate:
    return Candidate(**({"name": name, "version": at, "slots": 4, "load": load, "usable": True, "pinned": False} | fields))  # type: ignore[arg-type]


def names(candidates: list[Candidate], constraint: Constraint, of: Lineage, favourite: str | None = None) -> list[str]:
    return [one.name for one in order(candidates, constraint, of, favourite)]


def test_a_minimum_is_met_by_depth_on_the_newest_line_and_by_no_number() -> None:
    fleet = [replica("old", 2), replica("off", 3), replica("new", 5)]
    forked = lineage(*FORK)
    assert names(fleet, Constraint(min_version=2), forked) == ["new", "old"]
    assert names(fleet, Constraint(min_version=3), forked) == ["new"], "3 left the line; 5 has its depth"
    assert names(fleet, Constraint(), forked) == ["new", "old"]
    assert names(fleet, Constraint(exact_version=3), forked) == ["off"], "who names a version gets it"
    assert names(fleet, Constraint(min_version=9), forked) == []
    assert names([replica("a", None), replica("b", 2, usable=False)], Constraint(), forked) == []
    assert names([replica("ahead", 6)], Constraint(min_version=5), forked) == ["ahead"], "its door knows more of the LOG"


def test_the_least_busy_comes_first_and_the_warm_one_while_it_has_room() -> None:
    fleet = [replica("a", 3, 3), replica("b", 3, 1), replica("c", 3, 8, slots=64)]
    assert names(fleet, Constraint(), lineage(*LINE)) == ["c", "b", "a"]
    assert names(fleet, Constraint(), lineage(*LINE), "a")[0] == "a"
    assert names([replica("a", 3, 4), replica("b", 3, 1)], Constraint(), lineage(*LINE), "a")[0] == "b", "it's full"
    assert names([replica("p", 3, pinned=True), replica("a", 3, 9)], Constraint(), lineage(*LINE)) == ["a", "p"]


def test_the_longest_known_prefix_and_the_session_say_where_a_prompt_was() -> None:
    prefixes = Prefixes()
    prompt = list(range(300))
    prefixes.note(prompt, None, "a")
    prefixes.note(prompt[:64] + [7] * 200, None, "b")
    assert prefixes.favourite([*prompt[:256], 9], None) == "a"
    assert prefixes.favourite(prompt[:64] + [7] * 70, None) == "b"
    assert prefixes.favourite(prompt[:63], None) is None
    prefixes.note([1], "s", "c")
    assert prefixes.favourite(prompt, "s") == "c"
    few = Prefixes(kept=2)
    few.note([1], "one", "a")
    few.note([1], "two", "a")
    few.note([1], "three", "a")
    assert few.favourite([1], "one") is None


def test_a_model_name_may_bind_the_version() -> None:
    assert bound_model("run", "run", Constraint(min_version=1)) == Constraint(min_version=1)
    assert bound_model("run@7", "run", Constraint()) == Constraint(exact_version=7)
    for name in ("other", "other@7", "run@", "run@-1", "run@x", "run@" + "9" * 30, "run@\N{SUPERSCRIPT TWO}"):
        with pytest.raises(ApiError) as refused:
            bound_model(name, "run", Constraint())
        assert refused.value.status == 404
    with pytest.raises(ApiError, match="different versions"):
        bound_model("run@7", "run", Constraint(min_version=3))


def test_choices_have_seeds_of_their_own_and_the_first_has_the_request_s() -> None:
    assert choice_seed(5, 0) == 5
    found = {choice_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(found) == 400
    assert all(0 <= seed < 1 << 63 for seed in found)


def test_a_tenant_s_minute_fills_up_again() -> None:
    now = [0.0]
    tenants = Tenants({"a": TenantSettings(token="t" * 16, requests_per_minute=6)}, lambda: now[0])  # type: ignore[arg-type]
    assert tenants.of("Bearer " + "t" * 16) == "a"
    assert tenants.of("bearer " + "t" * 16) == "a", "the scheme's case doesn't matter"
    for wrong in ("", "t" * 16, "Basic " + "t" * 16, "Bearer " + "t" * 15, "Bearer \N{SNOWMAN}"):
        with pytest.raises(ApiError):
            tenants.of(wrong)

    def send() -> str | None:
        try:
            with tenants.admitted("a"):
                return None
        except ApiError as error:
            return error.headers["Retry-After"]

    assert [send() for _ in range(7)] == [None] * 6 + ["10"]
    now[0] = 9.0
    assert send() == "1"
    now[0] = 10.0
    assert send() is None
    now[0] = 1000.0
    assert [send() for _ in range(7)] == [None] * 6 + ["10"], "no more than a minute's is saved up"


def test_beyond_loopback_tenants_are_needed_and_tls_files_must_be_there() -> None:
    with pytest.raises(UsageError, match=r"needs gateway\.tenants"):
        ApiServer(None, GatewaySettings(host="0.0.0.0"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no such file"):
        ApiServer(None, GatewaySettings(tls_certificate="/nowhere.pem", tls_key="/nowhere.key"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set both or neither"):
        GatewaySettings(tls_key="x")
    with pytest.raises(ValueError, match="at least 16"):
        TenantSettings(token="short")  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "said"), [(["t" * 16, "t" * 16], "a and b have the same"), (["é" * 16], "a: a header")])
def test_tokens_that_cannot_tell_whose_they_are_are_refused(tokens: list[str], said: str) -> None:
    named = {name: TenantSettings(token=token) for name, token in zip("ab", tokens, strict=False)}  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=said):
        Tenants(named)
