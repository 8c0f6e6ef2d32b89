"""Whatever numba can do here, can't do, or isn't there: the same bytes come out."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import towline.errors
from support.waiting import until
from towline.delta import codec
from unit.delta.states import parts_of, random_state, step

TESTS = Path(__file__).parents[2]
ENCODE = """
import sys
import numpy as np
from towline.delta import backend, codec
from unit.delta.states import applied, random_state, same, step
rng = np.random.default_rng(33)
base = random_state(rng)
new = step(rng, base)
out = []
for mode in codec.MODES:
    parts = [part.data for part in codec.encode(base, new, mode=mode)]
    assert same(applied(base, parts), new)
    out += parts
print(backend.backend().name, file=sys.stderr)
sys.stdout.buffer.write(b"".join(out))
"""


def expected() -> bytes:
    rng = np.random.default_rng(33)
    base = random_state(rng)
    new = step(rng, base)
    return b"".join(part for mode in codec.MODES for part in parts_of(base, new, mode=mode))


def python(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, cwd=TESTS, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


def test_without_numba_the_same_bytes_come_from_numpy() -> None:
    """numba can't be found, as where it isn't installed: a finder that stands before all others hides it."""
    hide = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)
from importlib.machinery import PathFinder
real = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None:
        None if name.partition(".")[0] in ("numba", "llvmlite") else real(name, path, target)
)
"""
    done = python(hide + ENCODE)
    assert done.stderr.split() == [b"numpy"]
    assert done.stdout == expected()


def test_kernels_compile_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """Every place that numba would cache in lies beneath a regular file, which stops root too."""
    pytest.importorskip("numba")
    package = tmp_path / "libs" / "towline"
    source = Path(towline.errors.__file__).parent
    shutil.copytree(source / "delta", package / "delta", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "errors.py", package)
    wall = package / "delta" / "__pycache__"
    wall.write_bytes(b"")
    inside = "import towline.delta, sys; assert list(towline.delta.__path__)[0] == sys.path[0] + '/towline/delta'\n"
    path = f"import sys; sys.path[:0] = [{str(package.parent)!r}, {str(TESTS)!r}]\n"
    proof = """
from towline.delta import kernels16
assert type(kernels16.encode._cache).__name__ == "NullCache", kernels16.encode._cache
"""
    done = python(
        path + inside + ENCODE + proof,
        NUMBA_CACHE_DIR=f"{wall}/numba",
        HOME=f"{wall}/home",
        XDG_CACHE_HOME=f"{wall}/cache",
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert done.stderr.split() == [b"numba"]
    assert done.stdout == expected()
    assert sorted(path.name for path in package.rglob("*") if path.suffix in (".nbi", ".nbc")) == []


DOUBLE = """
from towline.delta.kernels16 import compiled
@compiled("int64(int64)")
def double(x):
    return x * 2
assert double(21) == 42
print(type(double._cache).__name__)
"""


def test_a_full_disk_or_a_damaged_cache_only_costs_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "probe.py").write_text(DOUBLE)

    def probe(limit: bool = False) -> str:
        # What a limit on file sizes refuses comes as an OSError from write(), as a full disk's does.
        code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n" * limit
        code = f"from towline.delta import kernels16\n{code}import sys; sys.path[:0] = [{str(tmp_path)!r}]; import probe"
        return python(code, PYTHONDONTWRITEBYTECODE="1", NUMBA_CACHE_DIR="").stdout.decode().strip()

    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    assert probe(limit=True) == "NullCache"
    assert probe() == "FunctionCache"
    (index,) = (tmp_path / "__pycache__").glob("probe.*.nbi")
    (code,) = (tmp_path / "__pycache__").glob("probe.*.nbc")
    for path in (code, index):
        whole = path.read_bytes()
        for cut in (0, len(whole) // 2):
            path.write_bytes(whole[:cut])
            assert probe() in ("NullCache", "FunctionCache")
        path.write_bytes(whole)
    assert probe() == "FunctionCache"


def test_warming_up_says_which_backend_is_used() -> None:
    pytest.importorskip("numba")
    assert codec.warm_up() == "numba"


class _Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "service", "work"),
    [
        ("towline.publisher.service", "PublisherService", "_publishing"),
        ("towline.rollout_worker.service", "RolloutWorkerService", "_worker"),
    ],
)
async def test_a_service_loads_its_kernels_before_it_works(
    monkeypatch: pytest.MonkeyPatch, module: str, service: str, work: str
) -> None:
    loaded = import_module(module)
    order = []

    async def begins(*_: object, **__: object) -> None:
        order.append("work")
        raise _Stop

    monkeypatch.setattr(loaded, "warm_up", lambda: order.append("warm"))
    made = object.__new__(getattr(loaded, service))
    made.draining = asyncio.Event()
    stand_in = SimpleNamespace(run=begins, not_ready="", drain=lambda: None)
    setattr(made, work, stand_in)
    made.health = SimpleNamespace(ready=lambda: None, not_ready=lambda _: None)
    with pytest.raises(_Stop):
        await made.run()
    assert order == ["warm", "work"]


async def test_a_trainer_loads_its_kernels_after_its_learners_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its first step: the first version is what needs them."""
    loading, order = import_module("towline.trainer.loading"), []
    monkeypatch.setattr(loading, "look_up", lambda *_: order.append("learner"))
    monkeypatch.setattr(loading, "warm_up", lambda: order.append("kernels"))
    loading.Loading("torch").wait()
    assert order[:1] == ["learner"]
    await until(lambda: order == ["learner", "kernels"])
