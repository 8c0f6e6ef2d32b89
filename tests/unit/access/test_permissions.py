"""What holds for every role's permissions, whatever the topology comes to have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.access import s3
from towline.access.credentials import bus_users, store_keys
from towline.access.identity import as_role
from towline.access.nats import Permissions, permissions
from towline.access.nats_config import Account, users_config
from towline.access.roles import ROLES, SERVICES
from towline.bus.topology import BUCKETS, CONTROL, STREAMS, TRAJECTORY, Topology
from towline.config import Settings
from towline.errors import UsageError

RUN_NAMES = st.lists(st.from_regex(r"\A[a-z0-9-]{1,12}\Z"), min_size=1, max_size=4, unique=True)


def matches(pattern: str, subject: str) -> bool:
    """Subject matching as NATS documents it: `*` is one token, `>` one or more at the end."""
    tokens, wanted = subject.split("."), pattern.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > index
        if index >= len(tokens) or token not in ("*", tokens[index]):
            return False
    return len(tokens) == len(wanted)


def may_publish(granted: Permissions, subject: str) -> bool:
    return any(matches(p, subject) for p in granted.publish) and not any(matches(p, subject) for p in granted.publish_deny)


@settings(max_examples=10, deadline=None)
@given(runs=RUN_NAMES)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_nothing_outside_its_runs(role: str, runs: list[str]) -> None:
    granted = permissions(role, runs)
    for subject in (*granted.publish, *granted.subscribe):
        if subject in ("$JS.API.INFO", f"_INBOX.{role}.>", "_INBOX.gateway.>"):
            continue
        words = [word.removeprefix("KV_") for word in subject.split(".")]
        named = [
            run for run in runs if words[:2] == ["towline", run] or any(word.startswith(f"towline_{run}_") for word in words)
        ]
        assert named, subject


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_a_bare_wildcard(role: str) -> None:
    granted = permissions(role, ["run"])
    for subject in (*granted.publish, *granted.subscribe):
        assert subject.split(".")[0] not in ("*", ">")
        assert subject not in ("$JS.>", "$JS.API.>", "$KV.>", "towline.>", "_INBOX.>")


def test_control_has_one_writer_and_every_stream_some() -> None:
    topology = Topology("run")
    writers = {role for role in ROLES if may_publish(permissions(role, ["run"]), topology.control("batch"))}
    assert writers == {"buffer"}
    for spec in STREAMS:
        prefix = topology.subject(spec.subjects[0].removesuffix(">"))
        somebody = [role for role in SERVICES for p in permissions(role, ["run"]).publish if p.startswith(prefix)]
        assert somebody, spec.key


def test_only_init_makes_streams_and_nobody_deletes_one() -> None:
    topology = Topology("run")
    names = [topology.stream(spec) for spec in STREAMS] + [f"KV_{topology.bucket(bucket)}" for bucket in BUCKETS]
    for role in ROLES:
        granted = permissions(role, ["run"])
        for name in names:
            assert may_publish(granted, f"$JS.API.STREAM.CREATE.{name}") == (role == "init")
            assert not may_publish(granted, f"$JS.API.STREAM.DELETE.{name}")
            assert not may_publish(granted, f"$JS.API.STREAM.MSG.DELETE.{name}")
            assert may_publish(granted, f"$JS.API.STREAM.INFO.{name}")


def test_two_runs_are_the_sum_of_each() -> None:
    for role in ROLES:
        both, one, two = (permissions(role, runs) for runs in (["a", "b"], ["a"], ["b"]))
        assert set(both.publish) == set(one.publish) | set(two.publish)
        assert set(both.publish_deny) == set(one.publish_deny) | set(two.publish_deny)


def test_a_runs_sites_give_the_buffer_what_it_does_there_and_keep_all_but_init_off_what_keeps_the_sides_level() -> None:
    topology = Topology("run")
    for role in ROLES:
        granted, without = permissions(role, ["run"], ["b"]), permissions(role, ["run"])
        for verb in ("CREATE", "DELETE", "MSG.NEXT"):
            allowed = may_publish(granted, f"$JS.API.CONSUMER.{verb}.{topology.stream(CONTROL)}.sync-b")
            assert allowed == (role == "init" and verb == "CREATE"), (role, verb)
        for site in ("b", "c"):
            purge = f"$JS.{site}.API.STREAM.PURGE.{topology.stream(CONTROL)}"
            assert may_publish(granted, purge) == (role == "buffer" and site == "b")
            confirmed = f"$JS.{site}.API.CONSUMER.INFO.{topology.stream(TRAJECTORY)}.sync-{site}"
            assert may_publish(granted, confirmed) == (role == "buffer" and site == "b")
            assert not may_publish(without, purge)
        assert not may_publish(granted, f"$JS.home.API.STREAM.PURGE.{topology.stream(CONTROL)}")


def test_an_unknown_role_or_no_run_is_refused() -> None:
    with pytest.raises(UsageError, match="no role 'root'; there are trainer"):
        permissions("root", ["run"])
    with pytest.raises(UsageError, match="at least one run"):
        permissions("buffer", [])
    with pytest.raises(UsageError, match="run name 'A B'"):
        permissions("buffer", ["A B"])


def test_the_servers_configuration_holds_no_secret(tmp_path: Path) -> None:
    users = bus_users(tmp_path, ROLES)
    text = users_config([Account("tenant", ["run"], users)])
    for role in ROLES:
        seed = (tmp_path / f"{role}.nk").read_text()
        assert seed.startswith("SU")
        assert seed not in text
        assert users[role] in text


def test_secrets_are_their_owners_alone_and_stay_until_they_are_rotated(tmp_path: Path) -> None:
    first, pairs = bus_users(tmp_path, ROLES), store_keys(tmp_path, ROLES)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert bus_users(tmp_path, ROLES) == first
    assert store_keys(tmp_path, ROLES) == pairs
    anew = bus_users(tmp_path, ROLES, anew=True)
    assert not set(anew.values()) & set(first.values())
    assert len(set(anew.values())) == len(ROLES)


def test_a_process_takes_its_own_roles_keys_and_what_is_named_comes_first(tmp_path: Path) -> None:
    bus_users(tmp_path, ROLES)
    pairs = store_keys(tmp_path, ROLES)
    tree: dict[str, dict[str, str | int]] = {
        "run": {"name": "run"}, "model": {"source": "m"}, "prompts": {"source": "a:b"}, "sampling": {"max_tokens": 1},
        "reward": {"function": "a:b"}, "bus": {"keys_folder": str(tmp_path)}, "store": {"keys_folder": str(tmp_path)},
    }  # fmt: skip
    loaded = Settings.model_validate(tree)
    own = as_role(loaded, "reward")
    assert own.bus.seed == (tmp_path / "reward.nk").read_text()
    assert own.store.keys == (pairs["reward"].access, pairs["reward"].secret)
    assert loaded.bus.seed == (tmp_path / "operator.nk").read_text()
    viewer = as_role(Settings.model_validate(tree | {"bus": tree["bus"] | {"role": "viewer"}}), "operator")
    assert viewer.bus.seed == (tmp_path / "viewer.nk").read_text()
    named = Settings.model_validate(tree | {"bus": tree["bus"] | {"nkey_seed_file": str(tmp_path / "gc.nk")}})
    assert as_role(named, "reward").bus.seed == (tmp_path / "gc.nk").read_text()


def test_a_policy_lets_no_role_delete_what_others_read_but_gc() -> None:
    for role in ROLES:
        document = s3.policy(role, "bucket", ["run"], prefix="deep/er")
        deletes = [
            resource for statement in document["Statement"]
            if statement["Effect"] == "Allow" and "s3:DeleteObject" in statement["Action"] for resource in statement["Resource"]
        ]  # fmt: skip
        read_by_others = [
            r for r in deletes if any(f"/run/{part}/" in r for part in ("log", "versions", "anchors", "checkpoints"))
        ]
        assert bool(read_by_others) == (role == "gc"), role
        assert "s3:*" not in json.dumps(document)
        assert all("arn:aws:s3:::bucket" in resource for s in document["Statement"] for resource in s["Resource"])


def test_on_aws_the_log_is_create_only_by_policy_too() -> None:
    for role in ("trainer", "publisher", "operator"):
        denies = [s for s in s3.policy(role, "b", ["run"])["Statement"] if s["Effect"] == "Deny" and "Condition" in s]
        assert [(s["Action"], s["Resource"], s["Condition"]) for s in denies] == [
            (["s3:PutObject"], ["arn:aws:s3:::b/run/log/*"], {"Null": {"s3:if-none-match": "true"}})
        ]
    assert not any("Condition" in s for s in s3.policy("trainer", "b", ["run"], flavour="minio")["Statement"])


def test_a_denied_consumer_is_one_that_others_share() -> None:
    topology = Topology("run")
    denied = permissions("viewer", ["run"]).publish_deny
    assert f"$JS.API.CONSUMER.MSG.NEXT.{topology.stream(CONTROL)}.lane-train" in denied
    assert all(subject.rsplit(".", 1)[1] in ("lane-train", "lane-session", "reward", "publisher") for subject in denied)
