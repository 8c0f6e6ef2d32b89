"""Parts come before the last tensor is there, applying starts before the last byte, and only so many blocks are held."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from towline.delta import work
from towline.delta.codec import apply, encode
from towline.delta.state import ModelState, RawTensor, copy_state, layout_of, tensor_digests
from unit.delta.states import applied, parts_of, random_state, same, step, tensor


class Lazy(Mapping[str, RawTensor]):
    """A state whose tensors are made when they are asked for."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> RawTensor:
        self.asked.append(name)
        tensor = self.state[name]
        return RawTensor(tensor.spec, tensor.data.copy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def large(tensors: int, elements: int) -> tuple[ModelState, ModelState]:
    rng = np.random.default_rng(31)
    base = {
        f"{i:03d}": tensor(f"{i:03d}", "BF16", (elements,), rng.integers(0x3C00, 0x3E00, elements).astype("<u2"))
        for i in range(tensors)
    }
    new = copy_state(base)
    for value in new.values():
        bits = value.data.view("<u2")
        bits[rng.random(elements) < 0.02] += 1
    return base, new


def test_the_first_part_comes_before_the_last_tensor_is_asked_for() -> None:
    base, new = large(40, 4000)
    lazy = Lazy(new)
    encoding = encode(base, lazy, block_bytes=4096, max_part_bytes=1000, threads=2)
    first = next(encoding)
    assert first.name == "part-00000.safetensors"
    assert len(lazy.asked) < 20
    rest = list(encoding)
    assert lazy.asked == sorted(new)
    assert [part.name for part in rest] == [f"part-{i:05d}.safetensors" for i in range(1, len(rest) + 1)]
    assert same(applied(base, [first.data, *(part.data for part in rest)]), new)


def test_applying_starts_before_the_last_byte_arrives() -> None:
    base, new = large(40, 4000)
    (data,) = parts_of(base, new, block_bytes=4096)
    state = copy_state(base)
    sent = threading.Event()

    def slow() -> Iterator[bytes]:
        yield data[: len(data) // 2]
        for _ in range(2000):
            if same({"000": state["000"]}, {"000": new["000"]}):
                sent.set()
                break
            threading.Event().wait(0.005)
        yield data[len(data) // 2 :]

    apply(state, [slow()], layout=layout_of(base), digests=tensor_digests(new), threads=2)
    assert sent.is_set()
    assert same(state, new)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_part_may_come_in_pieces_of_any_size(size: int) -> None:
    rng = np.random.default_rng(32)
    base = random_state(rng, 8)
    new = step(rng, base)
    parts = parts_of(base, new, block_bytes=2048, max_part_bytes=4000)
    state = copy_state(base)
    report = apply(
        state, ([p[i : i + size] for i in range(0, len(p), size)] for p in parts), layout=layout_of(base), digests=None
    )
    assert same(state, new)
    assert report.wire_bytes == sum(map(len, parts))


def test_memory_is_bounded_by_the_blocks_in_flight() -> None:
    base, new = large(24, 1 << 20)  # 48 MiB of model in 1 MiB blocks
    options = {"block_bytes": 1 << 20, "threads": 2, "backend": "numpy", "max_part_bytes": 1 << 20}
    parts = parts_of(base, new, **options)
    state = copy_state(base)
    peaks = []
    tracemalloc.start()
    for run in (
        lambda: sum(len(part.data) for part in encode(base, new, **options)),  # type: ignore[arg-type]
        lambda: apply(state, parts, layout=layout_of(base), digests=None, threads=2, backend="numpy"),
    ):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert max(peaks) < 20 << 20, peaks
    assert same(state, new)


def test_only_so_many_items_are_in_flight_and_an_error_stops_the_rest() -> None:
    taken, done = [], []

    def items() -> Iterator[int]:
        for i in range(1000):
            taken.append(i)
            yield i

    for i, out in enumerate(work.in_order(lambda x: x * 2, items(), 3)):
        assert out == 2 * i
        assert len(taken) <= i + 7

    def failing(x: int) -> int:
        if x == 10:
            raise ValueError("ten")
        done.append(x)
        return x

    with pytest.raises(ValueError, match="ten"):
        list(work.in_order(failing, iter(range(1000)), 3))
    assert max(done) < 30
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("delta")]
