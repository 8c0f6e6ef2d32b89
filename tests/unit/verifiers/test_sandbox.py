"""Model output that runs as a program: it does its work, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from towline.errors import VerifierError
from towline.verifiers.base import Reward, Sample
from towline.verifiers.sandbox import Limits, PythonTests, code_of, isolation, run_python

QUICK = Limits(cpu_seconds=1, wall_seconds=3.0, memory_bytes=256 << 20, file_bytes=1 << 20, output_bytes=1000)


def test_a_program_runs_with_its_input_and_its_status_is_told() -> None:
    ran = run_python("import sys; print(sys.stdin.read()[::-1])", stdin="abc")
    assert (ran.status, ran.stdout, ran.ok) == (0, "cba\n", True)
    wrong = run_python("assert 1 == 2, 'no'")
    assert not wrong.ok
    assert "AssertionError: no" in wrong.stderr


def test_a_busy_program_ends_by_its_cpu_time() -> None:
    begun = time.monotonic()
    ran = run_python("while True: pass", limits=QUICK)
    assert not ran.ok
    assert time.monotonic() - begun < 8


def test_a_sleeping_program_ends_by_the_clock_with_its_children(tmp_path: Path) -> None:
    late = tmp_path / "late"
    program = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2); open({str(late)!r}, 'w')"])
time.sleep(60)
"""
    begun = time.monotonic()
    ran = run_python(program, limits=Limits(wall_seconds=1.0))
    assert ran.status is None
    assert time.monotonic() - begun < 5
    time.sleep(2.0)
    assert not late.exists(), "a child outlived its program"


def test_memory_files_and_output_are_bounded() -> None:
    assert "MemoryError" in run_python("x = bytearray(1 << 30)", limits=QUICK).stderr
    assert not run_python("open('big', 'wb').write(bytes(8 << 20))", limits=QUICK).ok
    assert len(run_python("print('x' * 100_000)", limits=QUICK).stdout) == 1000


def test_it_starts_in_an_empty_folder_with_nothing_of_ours_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_STORE__SECRET_KEY", "secret")
    ran = run_python("import os; open('mine', 'w'); print(os.getcwd(), sorted(os.listdir('.')), dict(os.environ))")
    assert "['mine', 'program.py']" in ran.stdout
    assert "secret" not in ran.stdout
    assert not os.path.exists(ran.stdout.split()[0])


@pytest.mark.skipif(isolation() != "namespaces", reason="this machine forbids user namespaces: only limits hold")
def test_there_is_no_network_and_no_other_process() -> None:
    program = """
import os, socket
try:
    socket.create_connection(("127.0.0.1", PORT), 1)
    print("connected")
except OSError as error:
    print("refused", type(error).__name__)
print(sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()))
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = run_python(program.replace("PORT", str(server.getsockname()[1])), require_isolation=True)
    assert ran.stdout.startswith("refused"), ran
    seen = ran.stdout.splitlines()[1].strip("[]").split(", ")
    assert seen[0] == "1"
    assert len(seen) <= 2, "it sees itself alone"


def test_the_last_block_of_code_is_what_runs() -> None:
    assert code_of("x\n```python\na = 1\n```\ny\n```\nb = 2\n```\n") == "b = 2\n"
    assert code_of("a = 1") == "a = 1"
    assert code_of("```text\nhello\n```") == "text\nhello\n"


def test_a_response_passes_where_its_code_passes_the_references_tests(make_sample: Callable[..., Sample]) -> None:
    verifier, tests = PythonTests(cpu_seconds=1, wall_seconds=5.0), "assert double(4) == 8"

    def reward(text: str) -> Reward:
        return verifier(make_sample(text, tests=tests))

    right = reward("Here:\n```python\ndef double(x):\n    return 2 * x\n```")
    assert (right.value, right.components["timeout"]) == (1.0, 0.0)
    assert right.components["isolated"] == float(isolation() == "namespaces")
    assert reward("```python\ndef double(x):\n    return x\n```").value == 0.0
    assert reward("no code at all").value == 0.0
    for early in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "print('0' * 32)"):
        assert reward(f"```python\n{early}\n```").value == 0.0, "it never reached the tests"
    with pytest.raises(VerifierError, match="no 'tests'"):
        verifier(make_sample("x = 1"))
