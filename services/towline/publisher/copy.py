"""The publisher's own copy of the newest version, and the buffer in which the next one is made beside it."""

from __future__ import annotations

import numpy as np

from towline.delta.state import ModelState, copy_state


class OwnCopy:
    """`state` is version `version`'s, verified; nobody writes into it while it's that."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.state: ModelState = {}
        self._spare: ModelState | None = None
        self._lent = False

    def set(self, version: int, state: ModelState) -> None:
        """Another version altogether, whose state may be written into once it isn't the newest any more."""
        self.version, self.state, self._spare, self._lent = version, state, None, False

    def candidate(self) -> ModelState:
        """A writable copy of `state`, made in the buffer of the version before it where there is one: no pages to fault in."""
        spare, self._spare = self._spare, None
        if spare is None:
            return copy_state(self.state)
        for name, tensor in self.state.items():
            np.copyto(spare[name].data, tensor.data)
        return spare

    def advance(self, version: int, candidate: ModelState) -> None:
        """What `candidate` gave has become `version`."""
        self._spare = None if self._lent else self.state
        self.version, self.state, self._lent = version, candidate, False

    def lend(self) -> ModelState:
        """The state for a reader that takes its time: it stays as it is, also when a newer version comes."""
        self._lent = True
        return self.state
