"""The code that a trainer needs, loaded beside whatever it does first: seconds of imports, on standby too.

Nothing here touches model, store or bus, so it needs no lease: a standby that takes over has it all.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from towline.delta.codec import warm_up
from towline.learner.registry import BACKENDS, look_up


class Loading:
    """Begins at once, in a thread. `wait`, in another one, before anything is imported that the learner's code may import too."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._learner_loaded = threading.Event()
        # A daemon: a process that is asked to end doesn't wait for it.
        threading.Thread(target=self._load, name="towline-loading", daemon=True).start()

    def wait(self) -> None:
        """Until the learner's code is there. The delta kernels come after it: the first version waits for them by itself."""
        self._learner_loaded.wait()

    def _load(self) -> None:
        with _collector_rests():
            try:
                with contextlib.suppress(Exception):  # whoever makes the learner meets it again, and says it
                    look_up("trainer.backend", BACKENDS, self._backend)
            finally:
                self._learner_loaded.set()
            warm_up()


@contextlib.contextmanager
def _collector_rests() -> Iterator[None]:
    """Modules aren't garbage: looking for some among them over and over takes a sixth of the time of importing torch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
