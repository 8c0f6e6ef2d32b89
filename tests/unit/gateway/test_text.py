"""Text that grows with its tokens: the same as decoding all at once, never half a character, cut where a stop string stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from towline.gateway.text import Detokenizer, StopStrings


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Tokenizer:
    """A byte a token, so that most characters of other scripts are split."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 160), max_size=12))
def test_pieces_add_up_to_the_text_and_none_has_half_a_character(bytes_tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens = bytes_tokenizer.encode(text).ids
    detokenizer, pieces = Detokenizer(bytes_tokenizer, skip_special_tokens=False), list[str]()
    for count in sorted({min(cut, len(tokens)) for cut in cuts} - {len(tokens)}):
        pieces.append(detokenizer.more(tokens[:count], last=False))
        assert text.startswith("".join(pieces))
    pieces.append(detokenizer.more(tokens, last=True))
    assert "".join(pieces) == text


def test_bytes_that_are_no_character_come_out_in_the_end(bytes_tokenizer: Tokenizer) -> None:
    tokens = bytes_tokenizer.encode("aé").ids[:2]
    detokenizer = Detokenizer(bytes_tokenizer, skip_special_tokens=False)
    assert detokenizer.more(tokens, last=False) == ""
    assert detokenizer.more(tokens, last=True) == "a\N{REPLACEMENT CHARACTER}"


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
def test_what_goes_out_is_the_text_up_to_the_first_stop_string_that_is_complete(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    filtered, out, text = StopStrings(stops, keep=keep), "", ""
    for index, piece in enumerate([*pieces, ""]):
        text += piece
        out += filtered.more(piece, last=index == len(pieces))
        assert text.startswith(out), "nothing is taken back"
        found = [stop for stop in stops if stop in text]
        assert (filtered.matched is not None) == bool(found)
        if found:
            at = text.index(filtered.matched or "")
            assert filtered.matched in found
            assert out == text[: at + (len(filtered.matched or "") if keep else 0)]
            return
    assert out == text
