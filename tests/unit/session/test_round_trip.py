"""Token-in token-out on real tokenizers: what a trajectory holds is what the engine saw and said, whatever the texts were."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from support.real_tokenizers import names, real
from towline.session.branch import branch
from towline.session.families import boundary_of
from towline.session.record import decode_session, encode_session
from unit.session.conversations import talks


@pytest.fixture(scope="module", params=names())
def boundary(request):
    return boundary_of(real(request.param))


def go_through(boundary, count: int, seed: int) -> Counter:
    seen: Counter = Counter()
    vocabulary = boundary.tokenizer.vocab_size
    for talk in talks(boundary, vocabulary, count, seed):
        for turn in range(talk.rng.randint(1, 4)):
            talk.say()
            call = talk.turn()
            if turn:
                before = talk.calls[-2]
                stands = (*before.prompt, *before.said)
                assert call.prompt[: len(stands)] == stands, "the engine was given another history than it said"
                assert len(call.prompt) > len(stands)
            if talk.rng.random() < 0.2:
                talk.session = decode_session(encode_session(talk.session), boundary)
        made = branch(talk.session)
        last = talk.calls[-1]
        assert made.tokens.tolist() == [*last.prompt, *last.said]
        mask = np.zeros(len(made.tokens), np.uint8)
        logprobs = np.full(len(made.tokens), np.nan, np.float32)
        for call in talk.calls:
            place = slice(len(call.prompt), len(call.prompt) + len(call.said))
            mask[place] = 1
            logprobs[place] = call.logprobs
        np.testing.assert_array_equal(made.loss_mask, mask)
        np.testing.assert_array_equal(made.logprobs, logprobs)
        covered = [position for span in made.spans for position in range(span.start, span.end)]
        assert covered == np.flatnonzero(mask).tolist()
        again = boundary.tokenizer.encode(boundary.tokenizer.decode(made.tokens.tolist()), add_special_tokens=False)
        seen["conversations"] += 1
        seen["turns"] += len(talk.calls)
        seen["text would differ"] += again != made.tokens.tolist()
        seen.update(talk.session.mismatches)
    return seen


def test_the_trajectory_is_what_the_engine_saw_and_said(boundary):
    seen = go_through(boundary, 400, seed=1)
    assert seen["text would differ"] > 100, "the conversations are too tame to show anything"
    assert seen["whitespace"] > 0
    assert not {"edited", "foreign", "opening", "tools"} & set(seen)


@pytest.mark.slow
def test_ten_thousand_conversations_and_more(boundary):
    seen = go_through(boundary, 4_000, seed=2)
    print(boundary.family, dict(seen))
    assert seen["conversations"] == 4_000


def test_text_would_not_do(boundary):
    """The reason for all of this: a word sampled in two halves reads the same and is another sequence of tokens."""
    tokenizer = boundary.tokenizer
    halves = tokenizer.encode("hel", add_special_tokens=False) + tokenizer.encode("lo", add_special_tokens=False)
    assert tokenizer.decode(halves) == "hello"
    assert tokenizer.encode(tokenizer.decode(halves), add_special_tokens=False) != halves
    sign = tokenizer.encode("𒀀", add_special_tokens=False)
    assert len(sign) > 1
    assert tokenizer.encode(tokenizer.decode(sign[:1]), add_special_tokens=False) != sign[:1]
