"""What ranks may rely on: the same bytes everywhere, one rank's error on all, and an end where a rank is gone or hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import world_ranks
from support.ranks import run_ranks
from towline.errors import FencedError, InvariantError, UsageError
from towline.learner.sharing import Share, divide
from towline.learner.world import World, place


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("world")
    run_ranks(Path(world_ranks.__file__), [str(folder)], 3, 120.0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_every_rank_gets_the_same_bytes(found: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(found):
        assert (said["rank"], said["size"]) == (rank, 3)
        assert (said["broadcast"], said["empty"], said["from_2"]) == ("abc", "", "of 2")
        assert said["all"] == ["", "x", "xx"]
        assert said["gathered"] == (["0", "1", "2"] if rank == 0 else None)
        assert said["channel"] == [rank, 3]
        assert said["after"] == ["0", "1", "2"]


def test_a_world_splits_by_colour(found: list[dict[str, Any]]) -> None:
    assert [said["part"] for said in found] == [[0, 2, ["0", "2"]], [0, 1, ["1"]], [1, 2, ["0", "2"]]]
    assert [said["part_from_last"] for said in found] == ["2", "1", "2"]


def test_one_ranks_error_is_raised_on_all_with_its_class_and_code(found: list[dict[str, Any]]) -> None:
    messages = {0: "rank 1: taken over", 1: "taken over", 2: "rank 1: taken over"}
    for rank, said in enumerate(found):
        assert said["sound"] == []
        assert said["one_fails"] == ["FencedError", "mine", messages[rank]]
        assert said["agreed"]
        assert said["two_fail"] == ["UsageError", "usage", "of 1" if rank == 1 else "rank 1: of 1"]


def test_a_rank_that_hangs_or_is_gone_ends_the_world(found: list[dict[str, Any]]) -> None:
    assert found[0]["hangs"] == found[2]["hangs"] == ["UnavailableError", "rank_lost"]
    assert found[0]["dead"] == found[1]["dead"] == ["UnavailableError", "rank_lost"]


def test_alone_every_call_is_its_own_answer() -> None:
    world = World()
    assert (world.broadcast(b"x"), world.all_gather(b"x"), world.gather(b"x")) == (b"x", [b"x"], [b"x"])
    assert world.split(3).size == world.channel().size == 1
    world.barrier()
    with pytest.raises(FencedError, match="mine"), world.together():
        raise FencedError("mine")
    with pytest.raises(InvariantError, match="gave no bytes"):
        world.broadcast(None)


def test_a_place_that_cant_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="RANK = 2 isn't below WORLD_SIZE = 2"):
        place()
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(UsageError, match="must be numbers"):
        place()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_rows_are_divided_whole_and_evenly(count: int) -> None:
    tokens = np.random.default_rng(count).integers(1, 500, 64).tolist()
    parts = divide(tokens, count)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(64))
    sums = [sum(tokens[row] for row in part) for part in parts]
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1
    assert max(sums) - min(sums) <= max(tokens)


def test_a_share_finds_the_rows_at_hand() -> None:
    share = Share(mine=np.array([1, 4, 6]), advantages=np.zeros(7, np.float32), policy_tokens=np.ones(7, np.int64))
    assert share.local(np.array([6, 0, 1, 5])).tolist() == [2, 0]
    empty = Share(mine=np.zeros(0, np.int64), advantages=share.advantages, policy_tokens=share.policy_tokens)
    assert empty.local(np.array([6, 0])).tolist() == []
