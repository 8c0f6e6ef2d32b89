"""The processes that compute one step together: bytes between them, and agreement on errors. Alone, every call is trivial.

A `World` is a gloo group on the CPUs with time-outs, whatever device the learner is on. It carries bytes, never pickles. All
ranks make the same calls in the same order; a rank that dies or hangs is an `UnavailableError` on the others, and ends the world.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from towline import errors
from towline.errors import InvariantError, TowlineError, UnavailableError, UsageError

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others in one call: for one that hangs, or that fetches or uploads much more than they do. One
that dies is noticed at once."""
MAX_BYTES = 1 << 40
RANK_LOST = "rank_lost"
"""Code of the `UnavailableError` that no repeat helps against: start all ranks again."""


class World:
    """`size` processes, this one being `rank`. One thread at a time; several threads take a `channel` each."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        members: Sequence[int] = (0,),
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.rank = rank
        self.size = size
        self.members = tuple(members)
        """The global rank of each of this world's ranks."""
        self.timeout_seconds = timeout_seconds
        """Of this world's calls and those of what is made from it."""
        self.agreed: TowlineError | None = None
        """The last error that `agree` raised here: all ranks met it, at the same call."""
        self._group = group

    def channel(self) -> World:
        """The same processes again, for another thread. All of them call it, at the same point."""
        return self.split(0)

    def split(self, colour: int) -> World:
        """This process's part of the world: the ranks that gave the same colour, in their order. All ranks call it."""
        colours = [int(answer) for answer in self.all_gather(str(colour).encode())]
        mine = World()
        for each in sorted(set(colours)):
            places = [place for place, other in enumerate(colours) if other == each]
            members = [self.members[place] for place in places]
            group = self._new_group(members)
            if each == colour:
                mine = World(places.index(self.rank), len(places), group, members, self.timeout_seconds)
        return mine

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """`source`'s data, on every rank; the others' is ignored."""
        if self.rank == source and data is None:
            raise InvariantError(f"rank {source} broadcasts and gave no bytes", code="world")
        if self._alone:
            return data or b""
        head = self._tensor(np.array([len(data or b"")], np.int64))
        self._call(lambda dist: dist.broadcast(head, self.members[source], group=self._group))
        body = self._tensor(_bytes_of(data) if self.rank == source else np.zeros(_checked(int(head[0])), np.uint8))
        if body.numel():
            self._call(lambda dist: dist.broadcast(body, self.members[source], group=self._group))
        return data if self.rank == source and data is not None else _plain(body)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's data, on every rank, by rank. For what is small: each rank holds `size` times the longest."""
        if self._alone:
            return [data]
        lengths, padded, blocks = self._lengths(data)
        self._call(lambda dist: dist.all_gather(blocks, padded, group=self._group))
        return [_plain(block[:length]) for block, length in zip(blocks, lengths, strict=True)]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's data by rank, on rank 0; None on the others."""
        found = self.all_gather(data)
        return found if self.rank == 0 else None

    def barrier(self) -> None:
        """Until every rank has come here."""
        self.all_gather(b"")

    def agree(self, error: TowlineError | None = None) -> None:
        """Raise the first rank's error on every rank, if one has one: so all go on, or all repeat, or all give up."""
        if self._alone:
            if error is not None:
                raise error
            return
        own = b"" if error is None else msgspec.json.encode((type(error).__name__, error.code, error.message))
        for rank, answer in enumerate(self.all_gather(own)):
            if answer:
                self.agreed = error if error is not None and rank == self.rank else _error(rank, answer)
                raise self.agreed

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """The block is done on all ranks, or a `TowlineError` that one met is raised on all. No calls of this world inside."""
        error: TowlineError | None = None
        try:
            yield
        except TowlineError as raised:
            error = raised
        self.agree(error)

    @property
    def group(self) -> Any:
        """Its torch.distributed group (gloo, CPU tensors); None where the process is alone."""
        return self._group

    @property
    def _alone(self) -> bool:
        return self.size == 1

    def _lengths(self, data: bytes) -> tuple[list[int], Any, list[Any]]:
        """Each rank's length; this rank's data, and room for all of them, padded to the longest (and to a byte at least)."""
        own = self._tensor(np.array([len(data)], np.int64))
        found = [self._tensor(np.zeros(1, np.int64)) for _ in range(self.size)]
        self._call(lambda dist: dist.all_gather(found, own, group=self._group))
        lengths = [_checked(int(length[0])) for length in found]
        width = max(*lengths, 1)
        padded = np.zeros(width, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        return lengths, self._tensor(padded), [self._tensor(np.zeros(width, np.uint8)) for _ in range(self.size)]

    def _call(self, call: Callable[[Any], Any]) -> None:
        import torch.distributed as dist

        try:
            call(dist)
        except RuntimeError as error:
            line = (str(error).splitlines() or [""])[0]
            raise UnavailableError(f"rank {self.rank}: another rank is gone or hangs: {line}", code=RANK_LOST) from error

    def _new_group(self, members: list[int]) -> Any:
        if len(members) == 1:
            return None
        import torch.distributed as dist

        return dist.new_group(members, backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))

    @staticmethod
    def _tensor(values: Any) -> Any:
        import torch

        return torch.from_numpy(values)


def join_world(device: str, timeout_seconds: float = TIMEOUT_SECONDS) -> World:
    """The world that `torchrun` (RANK, WORLD_SIZE, MASTER_ADDR…) started this process in; alone where it didn't.

    Makes torch's default process group, on which a backend makes its own: nccl for CUDA tensors, gloo for the others.
    `UnavailableError` where the ranks don't find each other in `timeout_seconds`; `UsageError` where there is no such device.
    """
    rank, size = place()
    if size == 1:
        return World()
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device.startswith("cuda"):
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"trainer.device = {device!r}: rank {rank} wants GPU {local} of this machine, which has "
                f"{torch.cuda.device_count()}; start fewer ranks here",
                code="device",
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise UnavailableError(f"rank {rank} of {size}: the ranks don't find each other: {line}", code=RANK_LOST) from error
    members = list(range(size))
    group = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    return World(rank, size, group, members, timeout_seconds)


def place() -> tuple[int, int]:
    """(rank, size) as torchrun's environment says; (0, 1) without it."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise UsageError(f"RANK and WORLD_SIZE must be numbers: {error}", code="world") from None
    if not 0 <= rank < size:
        raise UsageError(f"RANK = {rank} isn't below WORLD_SIZE = {size}; start the ranks with torchrun", code="world")
    return rank, size


def device_of(device: str) -> str:
    """`trainer.device` for this process: "cuda" is the GPU of its local rank."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def _bytes_of(data: bytes | None) -> Any:
    return np.frombuffer(data or b"", np.uint8).copy()  # torch wants memory that may be written


def _plain(tensor: Any) -> bytes:
    return bytes(tensor.numpy().tobytes())


def _checked(length: int) -> int:
    if not 0 <= length <= MAX_BYTES:
        raise InvariantError(f"a rank sent the length {length}; the ranks aren't at the same call", code="world")
    return length


def _error(rank: int, answer: bytes) -> TowlineError:
    """What another rank met, as its own kind of error."""
    name, code, message = msgspec.json.decode(answer, type=tuple[str, str, str])
    kind = getattr(errors, name, TowlineError)
    cls = kind if isinstance(kind, type) and issubclass(kind, TowlineError) else TowlineError
    return cls(f"rank {rank}: {message}", code=code)
