"""The digest of what a server's ranks hold together, from the digest of each rank's slice of each tensor.

A tensor that one rank holds whole has its own digest there, bit for bit the version's. Of one that lies in slices the ranks
can't compute it, so each slice is compared with that of the version's host-local copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from towline.delta.state import DTYPE_BYTES, ModelState, RawTensor, model_digest

Slice = tuple[int, int, int, str]
"""(dimension, first index, length, xxh3-128 of the slice in the published dtype, row-major)."""


def live_digest(ranks: Sequence[Mapping[str, Sequence[object]]], state: ModelState) -> str:
    """Model digest of the live weights: the state's where they are the state's, another one where they aren't. Blocks.

    `ranks` hold what each rank answered: {name: slice}.
    """
    digests = {}
    for name, tensor in state.items():
        slices = {_slice(rank[name]) for rank in ranks if name in rank}
        digests[name] = _tensor_digest(sorted(part for part in slices if part[2] or not tensor.spec.shape), tensor)
    return model_digest(digests)


def _tensor_digest(slices: list[Slice], tensor: RawTensor) -> str:
    shape = tensor.spec.shape
    if len(slices) == 1 and (not shape or slices[0][1:3] == (0, shape[slices[0][0]])):
        return slices[0][3]
    at = 0
    for dim, start, length, digest in slices:
        # Ranks that hold the same slice, but not the same bytes, leave two of them here.
        if dim != slices[0][0] or start != at or slice_digest(tensor, dim, start, length) != digest:
            break
        at += length
    else:
        if slices and at == shape[slices[0][0]]:
            return tensor.digest()
    return xxhash.xxh3_128_hexdigest(repr(slices).encode())


def slice_digest(tensor: RawTensor, dim: int, start: int, length: int) -> str:
    """xxh3-128 of the tensor's slice along `dim`, as a tensor of its own."""
    spec = tensor.spec
    rows = tensor.data.reshape(*spec.shape, DTYPE_BYTES[spec.dtype])
    part = rows[(slice(None),) * dim + (slice(start, start + length),)]
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(part).data)


def _slice(answer: Sequence[object]) -> Slice:
    dim, start, length, digest = answer
    return int(str(dim)), int(str(start)), int(str(length)), str(digest)
