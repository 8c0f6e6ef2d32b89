"""`python -m MODULE`, many times over, without the seconds that torch's import takes each time.

One process imports everything, then forks for each line of JSON on its standard input: {"tag", "argv", "log", "environment"}.
It answers with lines of JSON: {"tag", "pid"} and, once that ended, {"tag", "pid", "code"}. What it started is a process of its
own in everything else: session, signals, files, memory. It dies with its parent, and they with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

IMPORTS = (
    "torch", "transformers", "numba", "towline.learner.torch_backend", "towline.engine.torch_engine", "towline.local.preflight",
    "towline.buffer.service", "towline.rollout_worker.service", "towline.reward.service", "towline.trainer.service",
    "towline.publisher.service", "towline.store.s3", "sort_digits.model", "fault.faulty",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_FIRST_FD, _LAST_FD = 3, 256


def main() -> None:
    die_with_parent()
    for name in IMPORTS:
        importlib.import_module(name)
    import transformers

    transformers.Qwen3ForCausalLM  # noqa: B018  transformers imports a model's module at its first use
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads can't be forked safely"
    gc.freeze()
    read, write = socket.socketpair()
    for end in (read, write):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write.fileno())
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(read, selectors.EVENT_READ)
    tags: dict[int, str] = {}
    rest = b""
    say({"ready": True})
    while True:
        for key, _ in selector.select():
            if key.fileobj is read:
                with contextlib.suppress(BlockingIOError):
                    read.recv(4096)
                continue
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = fork(order)
                tags[pid] = order["tag"]
                say({"tag": order["tag"], "pid": pid})
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                say({"tag": tags.pop(ended[0]), "pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def say(answer: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(_FIRST_FD, _LAST_FD)
        os.environ.update(order["environment"])
        module, *sys.argv[1:] = order["argv"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  what a process of its own would print at its end
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        os._exit(code)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
