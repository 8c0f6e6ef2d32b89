"""Thinning keeps what a curve shows; convergence keeps what acks told; letters are read as they were sent."""

from __future__ import annotations

from towline.bus.client import Message
from towline.contract.codec import encode
from towline.contract.outcome import Failure
from towline.contract.policy import Ack, Served
from towline.view.convergence import MOST_VERSIONS, Convergence
from towline.view.letters import content_of, letter_of
from towline.view.thinning import buckets, spread


def ack(replica: str, version: int, at: float, history: tuple[Served, ...] = (), engine: str | None = "d") -> Ack:
    return Ack(
        replica=replica, version=version, files_digest="d", engine_digest=engine, probe_max_abs_diff=0.0, probe_tolerance=0.1,
        prepare_seconds=1.0, pause_seconds=0.1, wire_bytes=10, mode="retract", at=at, history=history,
    )  # fmt: skip


def test_thinning_takes_every_item_once_and_keeps_the_last():
    for count in (0, 1, 5, 399, 400, 401, 1234):
        parts = buckets(list(range(count)), 400)
        assert [item for part in parts for item in part] == list(range(count))
        assert len(parts) <= 400
        assert all(part for part in parts)
        assert spread(list(range(count)), 400)[-1:] == list(range(count))[-1:]


def test_what_a_later_ack_repeats_of_a_version_does_not_replace_what_its_own_said():
    told = Convergence()
    told.take([ack("a", 3, 10.0), ack("b", 3, 11.0, engine=None)])
    history = (Served(version=3, depth=1, published_at=9.0, at=10.0), Served(version=4, depth=2, published_at=12.0, at=13.0))
    told.take([ack("a", 4, 13.0, history=history)])
    first, second = told.of(3)
    assert (first.replica, first.mode, first.engine) == ("a", "retract", "equal")
    assert (second.replica, second.engine) == ("b", None)
    assert [one.replica for one in told.of(4)] == ["a"]
    late = Convergence()
    late.take([ack("a", 4, 13.0, history=history)])
    assert [(one.at, one.mode) for one in late.of(3)] == [(10.0, None)]


def test_convergence_is_bounded():
    told = Convergence()
    for version in range(MOST_VERSIONS + 50):
        told.take([ack("a", version, float(version))])
    assert told.of(49) == []
    assert told.of(50) != []


def test_a_letter_is_told_whole_and_a_request_is_none():
    def message(subject: str, **headers: str) -> Message:
        return Message(
            f"towline.r.{subject}", 5, b"\x00\x01", {name.replace("_", "-"): text for name, text in headers.items()}, 7.0
        )

    def relative(subject: str) -> str:
        return subject.removeprefix("towline.r.")

    letter = letter_of(message("dead.reward", Towline_Reason="why", Towline_Context='{"subject": "x"}'), relative)
    assert letter is not None
    assert (letter.stage, letter.reason, letter.context, letter.nbytes) == ("reward", "why", {"subject": "x"}, 2)
    cut = letter_of(message("dead.reward", Towline_Context='{"subject": "x'), relative)
    assert cut is not None
    assert cut.context == {"cut": '{"subject": "x'}
    assert letter_of(message("dead.requeue.5"), relative) is None
    failure = Failure(
        run="r", lane="train", group=1, sample=2, task_sequence=3, delivery=1, stage="verify", reason="no", replica="w"
    )
    assert content_of(encode(failure))["reason"] == "no"
    assert content_of(b"\x00\x01") == {"unreadable": "0001"}
