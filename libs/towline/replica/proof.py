"""The proof that an engine serves a version: its live weights have the entry's digest, and its logprobs on the entry's fixed
tokens are those that the trainer saw. The files being right doesn't prove it."""

from __future__ import annotations

from dataclasses import dataclass

from towline.engine.base import Activation, Engine
from towline.errors import TowlineError
from towline.replica.host import Copy


@dataclass(frozen=True, slots=True)
class Proof:
    """`doubt`: why the engine doesn't serve the version, None where it does. `difference`: the largest |logprob - expected|,
    None without a probe, or without a model to ask."""

    doubt: str | None
    difference: float | None


async def prove(engine: Engine, copy: Copy, activation: Activation) -> Proof:
    difference: float | None = None
    try:
        difference = await _probe(engine, copy)
    except TowlineError as error:
        return Proof(f"the probe failed: {error}", None)
    if activation.engine_digest is not None and activation.engine_digest != copy.files_digest:
        doubt = f"the engine's live weights have the digest {activation.engine_digest}, the version's is {copy.files_digest}"
        return Proof(doubt, difference)
    if difference is not None and copy.probe is not None and not difference <= copy.probe.tolerance:
        doubt = f"its logprobs on the probe differ by {difference:.3g}, more than {copy.probe.tolerance:.3g}"
        return Proof(doubt, difference)
    return Proof(None, difference)


async def _probe(engine: Engine, copy: Copy) -> float | None:
    if copy.probe is None or (got := await engine.logprobs(list(copy.probe.tokens))) is None:
        return None
    # A NaN on either side must not pass for agreement, as max() would let it.
    differences = [abs(a - b) for a, b in zip(got, copy.probe.logprobs, strict=True)]
    return float("nan") if any(value != value for value in differences) else max(differences, default=0.0)
