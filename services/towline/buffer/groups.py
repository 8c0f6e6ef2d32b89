"""What the buffer remembers of samples, groups and batches: numbers and digests, never a trajectory.

An external group is an *offer* until it's admitted. A group is `open` from its admission; `complete` once each of its samples has
a score; `batched` while it stands in a batch that no fork has voided. Dropped and evaluated groups are forgotten: their number is
below the next one and names nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from towline.contract.groups import is_external
from towline.contract.outcome import Score
from towline.contract.task import EVAL, Task


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sample's score, as far as batching needs it. The trajectory is named by (sequence, digest)."""

    task_sequence: int
    sequence: int
    digest: bytes
    reward: float
    policy_tokens: int
    versions: tuple[int, ...]
    """The distinct versions of its policy tokens, ascending."""
    version_tokens: tuple[int, ...] = ()
    """How many tokens each of `versions` sampled; empty where there is one that sampled all `policy_tokens`."""

    @property
    def counted_tokens(self) -> int:
        """Policy tokens by its spans."""
        return sum(self.version_tokens) if self.version_tokens else self.policy_tokens

    def tokens_below(self, depths: Mapping[int, int], least: int) -> int | None:
        """Policy tokens of versions whose depth is below `least`; None where that isn't known (a snapshot of an older
        release)."""
        below = [place for place, version in enumerate(self.versions) if depths[version] < least]
        if not below:
            return 0
        if self.version_tokens:
            return sum(self.version_tokens[place] for place in below)
        return self.policy_tokens if len(self.versions) == 1 else None


def scored_from(score: Score) -> Scored:
    tokens: dict[int, int] = {}
    for span in score.version_spans:
        tokens[span.version] = tokens.get(span.version, 0) + span.end - span.start
    versions = tuple(sorted(tokens))
    plain = len(versions) == 1 and tokens[versions[0]] == score.policy_tokens
    return Scored(
        score.task_sequence,
        score.trajectory_sequence,
        score.trajectory_digest,
        score.reward,
        score.policy_tokens,
        versions,
        () if plain else tuple(tokens[version] for version in versions),
    )


class Sample(msgspec.Struct, gc=False):
    """One sample of a group that isn't closed."""

    task_sequence: int
    """CONTROL sequence of its newest task or re-issue."""
    not_before_depth: int
    attempt: int
    seed: int
    failures: dict[tuple[int, int, str], bool] | None = None
    """(task sequence, delivery, stage) -> whether it counts as an attempt."""
    final: str | None = None
    """Why it can't be had, by a final failure; its group must be dropped."""
    cancelled: int = 0
    """The newest task of it that a cancel record named."""
    scored: Scored | None = None
    site: str = ""
    """Whose workers its newest task is for; "": home's."""

    @property
    def attempts(self) -> int:
        """Failed attempts. Waiting in vain for a version (`not_ready`, `version_moved`) isn't one: the deadline bounds that."""
        return sum(self.failures.values()) if self.failures else 0

    @property
    def failing(self) -> bool:
        """Its newest task failed and it has no score: it's missing until it is issued again."""
        return self.scored is None and any(key[0] == self.task_sequence for key in self.failures or ())


class Group(msgspec.Struct, gc=False):
    """The samples of one prompt. Once it's batched only their scores are kept, as bytes: a fork may open it again."""

    number: int
    lane: str
    size: int
    deadline: float
    version: int | None
    """Lane eval: the version that is evaluated."""
    task: Task | None
    """The first sample's task, of which the others differ in sample, seed, attempt and not_before_depth. None once batched, and
    for an external group."""
    samples: list[Sample | None]
    batch: int | None = None
    """for_depth of the batch that it stands in."""
    scores: int = 0
    """How many samples have one."""
    admitted_sequence: int = 0
    """CONTROL sequence of its first task; 0 in snapshots of an older release, which keep everything."""
    packed: bytes | None = None
    """The scores of a batched group that has them all; `samples` is empty then."""

    @property
    def complete(self) -> bool:
        return self.scores == self.size

    @property
    def flat(self) -> bool:
        """Complete, and all rewards are equal: no sample has an advantage over another."""
        return self.complete and self.size > 1 and len({scored.reward for _, scored in self.rows()}) == 1

    @property
    def is_train(self) -> bool:
        """To be trained: lane train, or external."""
        return self.lane != EVAL

    @property
    def is_external(self) -> bool:
        return is_external(self.number)

    @property
    def is_eval(self) -> bool:
        return self.lane == EVAL

    def pack(self) -> None:
        """Keep the scores alone, if they're all there."""
        if self.complete:
            self.packed = _encode([scored for _, scored in self.rows()])
            self.samples = []

    def unpack(self) -> None:
        """The opposite of `pack`; nothing else of the samples is needed again."""
        if self.packed is not None:
            self.samples = [Sample(0, 0, 0, 0, scored=scored) for scored in _decode(self.packed)]
            self.packed = None

    def least_sequence(self) -> int | None:
        """The first of its samples' places in TRAJECTORY; None without a score."""
        scored = [found for _, found in self.rows()] if self.packed is None else _decode(self.packed)
        return min((found.sequence for found in scored), default=None)

    def versions(self) -> set[int]:
        """The versions of all the policy tokens that are in."""
        found: set[int] = set()
        for sample in self.samples:
            if sample is not None and sample.scored is not None:
                found.update(sample.scored.versions)
        return found

    def rows(self) -> list[tuple[int, Scored]]:
        """(sample, score), in order, of those that have one."""
        return [(i, s.scored) for i, s in enumerate(self.samples) if s is not None and s.scored is not None]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Scored]).decode


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """A batch that no fork has voided."""

    epoch: int
    for_depth: int
    sequence: int
    """Its place in CONTROL."""
    groups: tuple[int, ...]
    samples: int
    staleness: dict[int, int]
    """for_depth - least depth -> how many of its samples."""
    tokens: int = 0
    """Policy tokens of its samples."""
    token_staleness: int = 0
    """Sum of (for_depth - least depth) * policy tokens."""
    over_samples: int = 0
    """Samples that hold tokens over the bound, by the record's word; `staleness`, `tokens` and `token_staleness` leave them
    out."""
    over_tokens: int = 0
    """Those tokens."""
    over_sample_tokens: int = 0
    """All policy tokens of those samples."""
    over_most: int = 0
    """The greatest staleness among them."""
