"""The undo journal: whatever was changed through it comes back, also from one that was cut off, and twice does no harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import CorruptError, MissingError
from towline.replica.journal import UndoJournal, roll_back

DTYPES = ["U8", "BF16", "F32", "F64"]


def state_of(random: np.random.Generator) -> ModelState:
    specs = [TensorSpec(f"t{index}", dtype, (7, 40)) for index, dtype in enumerate(DTYPES)]
    return {spec.name: RawTensor(spec, random.integers(0, 256, spec.nbytes, dtype=np.uint8)) for spec in specs}


def changed(state: ModelState, journal: UndoJournal, random: np.random.Generator, share: float) -> None:
    """Ranges of every tensor, each told to the journal first."""
    for tensor in state.values():
        width = tensor.spec.nbytes // tensor.spec.elements
        for start in range(0, tensor.data.size, 80 * width):
            old = tensor.data[start : start + 80 * width]
            new = np.where(random.random(old.size) < share, random.integers(0, 256, old.size, dtype=np.uint8), old)
            journal.record(tensor.spec, start, old, new)
            old[:] = new


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), rounds=st.integers(1, 4), share=st.sampled_from([0.0, 0.02, 0.3, 1.0]), cut=st.floats(0, 1))
def test_what_was_changed_comes_back_also_after_a_crash_anywhere(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rounds: int, share: float, cut: float
) -> None:
    path = tmp_path_factory.mktemp("journal") / "undo"
    random = np.random.default_rng(seed)
    state = state_of(random)
    before = {name: tensor.data.copy() for name, tensor in state.items()}
    journal = UndoJournal(path)
    for _ in range(rounds):
        changed(state, journal, random, share)
    journal.close()
    now = {name: tensor.data.copy() for name, tensor in state.items()}
    names = {name for name in state if (now[name] != before[name]).any()}
    assert names <= journal.names
    half_way = {name: RawTensor(tensor.spec, tensor.data.copy()) for name, tensor in state.items()}
    assert roll_back(path, state) == journal.names
    roll_back(path, state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(tensor.data, before[name])
    # A record that was cut off is about bytes that weren't changed yet, as the next one's are: nothing else is touched.
    data = path.read_bytes()
    path.write_bytes(data[: 8 + int(cut * (len(data) - 8))])
    for tensor, name in zip(half_way.values(), half_way, strict=True):
        tensor.data[:] = before[name]
    roll_back(path, half_way)


def test_a_journal_of_another_model_or_none_is_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    state = state_of(random)
    with pytest.raises(MissingError, match="no journal"):
        roll_back(tmp_path / "none", state)
    (tmp_path / "junk").write_bytes(b"not a journal")
    with pytest.raises(CorruptError, match="isn't an undo journal"):
        roll_back(tmp_path / "junk", state)
    journal = UndoJournal(tmp_path / "undo")
    changed(state, journal, random, 0.5)
    journal.close()
    del state["t1"]
    with pytest.raises(CorruptError, match="another model"):
        roll_back(tmp_path / "undo", state)
