"""Prompts from table folders, iterables and reasoning-gym: the same prompt for the same cursor, in a new process too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from towline.contract.task import Cursor
from towline.environment.iterable_prompts import iterable
from towline.environment.prompts import PromptSource, draw, exhausted
from towline.environment.reasoning_gym_prompts import tasks
from towline.environment.table_prompts import folder
from towline.errors import UsageError

HERE = "unit.environment.test_prompt_sources"
NUMBERS = [[5, 6], [7, 8]]


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def endless(first: int) -> Iterator[dict[str, Any]]:
    return ({"prompt": f"q{number}", "answer": number} for number in count(first))


def strange() -> list[object]:
    return ["fine", 3.5]


def walk(source: PromptSource, steps: int) -> list[tuple[list[int], dict[str, Any]]]:
    cursor, found = Cursor(0, 0), []
    for _ in range(steps):
        prompt, cursor = draw(source, cursor)
        found.append((prompt.tokens, prompt.reference))
    return found


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Ten questions, as `save_to_disk` lays out a DatasetDict and as the hub does, in two files each."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for part in range(2):
        rows = pa.table({"question": [f"q{5 * part + i}" for i in range(5)], "answer": [5 * part + i for i in range(5)]})
        name = f"data-0000{part}-of-00002.arrow"
        with pa.OSFile(str(tmp_path / "saved" / "train" / name), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows)
        pq.write_table(rows, tmp_path / "hub" / "data" / f"train-0000{part}-of-00002.parquet")
        pq.write_table(rows.slice(0, 1), tmp_path / "hub" / "data" / f"test-0000{part}-of-00002.parquet")
    return tmp_path


@pytest.mark.parametrize("layout", ["saved", "hub"])
def test_a_datasets_folder_gives_each_row_once_a_pass_in_a_seeded_order(table: Path, layout: str) -> None:
    def source(seed: int) -> PromptSource:
        return folder(Letters(), seed=seed, path=str(table / layout), split="train", prompt_key="question", epochs=2)

    found = walk(source(1), 20)
    assert sorted(reference["answer"] for _, reference in found[:10]) == list(range(10))
    assert all(tokens == Letters().encode(f"q{reference['answer']}") for tokens, reference in found)
    assert found[:10] != found[10:]
    assert found == walk(source(1), 20)
    assert found != walk(source(2), 20)
    assert exhausted(source(1), Cursor(2, 0))


def test_a_slice_of_a_folder_and_its_columns_under_other_names(table: Path) -> None:
    source = folder(Letters(), seed=0, path=str(table / "hub"), split="train", columns={"question": "prompt"}, start=3, stop=5,
                    shuffle=False)  # fmt: skip
    assert walk(source, 2) == [(Letters().encode("q3"), {}), (Letters().encode("q4"), {})]
    assert len(folder(Letters(), seed=0, path=str(table / "hub"), split="test", prompt_key="question")) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"path": "nowhere"}, "is no folder"),
        ({"split": "dev"}, "split 'dev'"),
        ({}, "name the prompt's with prompt_key"),
        ({"columns": {"text": "prompt"}}, "no column 'text'"),
    ],
)
def test_a_folder_that_cant_serve_says_why(table: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        folder(Letters(), seed=0, **({"path": str(table / "hub"), "split": "train"} | arguments))


def test_a_torn_file_is_named(table: Path) -> None:
    file = next((table / "hub" / "data").glob("train-00000*"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="train-00000"):
        folder(Letters(), seed=0, path=str(table / "hub"), split="train", prompt_key="question")


def test_an_iterable_is_taken_by_import_path() -> None:
    source = iterable(Letters(), seed=3, factory=f"{HERE}:endless", arguments={"first": 4}, limit=6)
    found = walk(source, 6)
    assert sorted(reference["answer"] for _, reference in found) == [4, 5, 6, 7, 8, 9]
    assert found == walk(iterable(Letters(), seed=3, factory=f"{HERE}:endless", arguments={"first": 4}, limit=6), 6)
    assert walk(iterable(Letters(), seed=0, factory=f"{HERE}:NUMBERS", shuffle=False), 2) == [([5, 6], {}), ([7, 8], {})]
    with pytest.raises(UsageError, match="row 1 is neither"):
        iterable(Letters(), seed=0, factory=f"{HERE}:strange")
    with pytest.raises(UsageError, match="gave no row"):
        iterable(Letters(), seed=0, factory=f"{HERE}:NUMBERS", limit=0)


def test_without_reasoning_gym_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="pip install reasoning-gym"):
        tasks(Letters(), seed=0, task="leg_counting")


def test_reasoning_gyms_tasks_are_made_again_from_the_seed() -> None:
    pytest.importorskip("reasoning_gym")
    found = walk(tasks(Letters(), seed=7, task="leg_counting", size=5), 5)
    assert found == walk(tasks(Letters(), seed=7, task="leg_counting", size=5), 5)
    assert found != walk(tasks(Letters(), seed=8, task="leg_counting", size=5), 5)
    assert [reference["reasoning_gym"]["index"] for _, reference in found] == [0, 1, 2, 3, 4]
    assert all(reference["answer"].isdecimal() for _, reference in found)
    with pytest.raises(UsageError, match="no_such_task"):
        tasks(Letters(), seed=7, task="no_such_task")


def test_a_source_that_gives_something_else_than_a_prompt_is_named() -> None:
    class Words:
        def __len__(self) -> int:
            return 3

        def get(self, epoch: int, position: int) -> str:
            return "hello"

    with pytest.raises(UsageError, match=r"prompts.source gave a str as prompt 0 of pass 0"):
        draw(Words(), Cursor(0, 0))  # type: ignore[arg-type]
