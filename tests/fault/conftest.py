from __future__ import annotations

from collections.abc import Iterator

import pytest

from fault.field import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks services for all fields of the session."""
    made = Zygote()
    yield made
    made.close()
