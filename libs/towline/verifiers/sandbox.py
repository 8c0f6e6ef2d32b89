"""Runs model output as a program: in a process of its own, with limits, without network where the kernel lets us.

What it bounds: CPU seconds, wall-clock seconds, address space, the size of files, their number, the number of processes, and what
it reads back. The program gets an empty folder, no environment but PATH, and no standard input but what it's given. With
unprivileged user namespaces it has no network and sees no other process; `isolation()` says what this machine grants. It isn't a
boundary against an attacker who knows the kernel: run reward in a container of its own for that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from towline.errors import UsageError, VerifierError
from towline.verifiers.base import Reward, Sample

Isolation = Literal["namespaces", "limits"]
_UNSHARE = ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc")
_MOST_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """For one run."""

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    """Of address space, each process."""
    file_bytes: int = 16 << 20
    processes: int = 64
    """Of this user, where the kernel counts them (not for root)."""
    output_bytes: int = 64 << 10
    """Read back of stdout and of stderr; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How the program ended. `status` is its exit status, -N for signal N, None where its time was up."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.status == 0


@functools.cache
def isolation() -> Isolation:
    """`namespaces`: no network, no other processes. `limits`: the kernel or its container forbids that, only limits hold."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return "limits"
    try:
        probe = subprocess.run([unshare, *_UNSHARE, "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "limits"
    return "namespaces" if probe.returncode == 0 else "limits"


def run_python(program: str, *, stdin: str = "", limits: Limits | None = None, require_isolation: bool = False) -> Ran:
    """Run Python source. Blocks; `VerifierError` where no process could be started, `UsageError` where isolation is required
    and this machine doesn't grant it."""
    limits = limits or Limits()
    granted = isolation()
    if require_isolation and granted != "namespaces":
        raise UsageError(
            "the sandbox can't take the network away here (unshare is forbidden): allow user namespaces, or run reward in a "
            "container without network and set require_isolation = false",
            code="sandbox",
        )
    with tempfile.TemporaryDirectory(prefix="towline-sandbox-") as folder:
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-S", "program.py"]
        if granted == "namespaces":
            command = [str(shutil.which("unshare")), *_UNSHARE, *command]
        return _run(command, Path(folder), stdin, limits)


def _run(command: list[str], folder: Path, stdin: str, limits: Limits) -> Ran:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                _limited(command, limits), cwd=folder,
                stdin=given, stdout=out, stderr=err, start_new_session=True, close_fds=True,
                env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise VerifierError(f"the sandbox can't start a process: {error}", code="sandbox") from error
        status: int | None
        try:
            status = process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_all(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(limits.output_bytes).decode("utf-8", "replace"))
    return Ran(status, *texts)


def _limited(command: list[str], limits: Limits) -> list[str]:
    """The command behind a launcher that lowers its own limits and becomes it. Not a preexec_fn: after a fork of a process
    with threads, as reward is, Python code may wait for a lock that nobody holds any more."""
    pairs = {
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: _MOST_FILES,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_CORE: 0,
    }
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, repr(pairs), *command]


_LAUNCHER = """
import ast, os, resource, sys
for kind, most in ast.literal_eval(sys.argv[1]).items():
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))
os.execv(sys.argv[2], sys.argv[2:])
"""


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """The program and whatever it left running in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class PythonTests:
    """Reward 1 where the response's last Python block, followed by the reference's tests, runs to its end; else 0.

    That the tests were reached is told by a token, which the program is given and prints after them: one that ends itself
    earlier passes nothing. What runs in the tests' own process can still tamper with them; keep tests that matter out of reach
    by a verifier of your own on `run_python`'s standard input and output.

    The reference has `tests` (source), or under `reference_key`. Components: `passed`, `timeout`, `isolated`.
    """

    def __init__(
        self,
        reference_key: str = "tests",
        cpu_seconds: int = 5,
        wall_seconds: float = 10.0,
        memory_megabytes: int = 512,
        require_isolation: bool = False,
    ) -> None:
        self._key = reference_key
        self._limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=wall_seconds, memory_bytes=memory_megabytes << 20)
        self._require = require_isolation

    def __call__(self, sample: Sample) -> Reward:
        tests = sample.reference.get(self._key)
        if not isinstance(tests, str):
            raise VerifierError(f"the reference has no {self._key!r}: the prompt source must give the tests' source")
        token = secrets.token_hex(16)
        program = _WITH_TESTS.format(solution=code_of(sample.text), tests=tests)
        ran = run_python(program, stdin=f"{token}\n", limits=self._limits, require_isolation=self._require)
        passed = ran.ok and ran.stdout.rstrip().endswith(token)
        isolated = float(isolation() == "namespaces")
        return Reward(float(passed), {"passed": float(passed), "timeout": float(ran.status is None), "isolated": isolated})


_WITH_TESTS = """
import sys
def run(token):
    scope = {{"__name__": "solution"}}
    exec(compile({solution!r}, "solution", "exec"), scope)
    exec(compile({tests!r}, "tests", "exec"), scope)
    sys.__stdout__.write(token)
run(sys.stdin.readline())
"""


def code_of(text: str) -> str:
    """The last fenced block, of Python or of no language; the whole text where there is none."""
    blocks = text.split("```")[1::2]
    if not blocks:
        return text
    first, _, rest = blocks[-1].partition("\n")
    return rest if first.strip().lower() in ("", "python", "py", "python3") else blocks[-1]
