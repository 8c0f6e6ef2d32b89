"""Rewards from the response's text: exact match, a number, a format.

The right answer comes from the prompt's reference, under `key`; a reference without it is the run's fault, not the policy's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from towline.errors import UsageError, VerifierError
from towline.verifiers.base import Sample

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/[-+]?\d+(?:\.\d+)?)?%?")
_BOXED = re.compile(r"\\boxed\s*\{")

Normalise = Literal["none", "strip", "words"]


def exact_match(sample: Sample, *, key: str = "answer", normalise: Normalise = "strip", finished: bool = True) -> float:
    """1 where the response is the reference's `key`, or one of a list of answers, else 0.

    `strip` ignores white space around it; `words` also its amount, case and final punctuation. With `finished` a response
    that was cut off is never right.
    """
    if finished and sample.finish != "stop":
        return 0.0
    same = _NORMAL[normalise]
    return float(same(sample.text) in {same(str(answer)) for answer in _answers(sample, key)})


def numeric_answer(
    sample: Sample, *, key: str = "answer", relative_tolerance: float = 0.0, absolute_tolerance: float = 0.0
) -> float:
    """1 where the response's final number equals the reference's `key`, within either tolerance, else 0.

    The final number is the one in the last \\boxed{}, else the last one of the text; 1,000 and 3/4 and 12% are read as such.
    """
    found = final_number(sample.text)
    if found is None:
        return 0.0
    for answer in _answers(sample, key):
        want = parse_number(str(answer))
        if want is None:
            raise VerifierError(f"the reference's {key!r} is {answer!r}, not a number", code="reference")
        room = max(Decimal(str(absolute_tolerance)), Decimal(str(relative_tolerance)) * abs(want))
        if abs(found - want) <= room:
            return 1.0
    return 0.0


class RegexMatch:
    """1 where `pattern` matches the response, else 0: the whole of it, or with `search` anywhere in it."""

    def __init__(self, pattern: str, *, search: bool = False, dot_all: bool = True) -> None:
        try:
            compiled = re.compile(pattern, re.DOTALL if dot_all else 0)
        except re.error as error:
            raise UsageError(f"reward.arguments.pattern = {pattern!r}: {error}", code="pattern") from None
        self._match = compiled.search if search else compiled.fullmatch

    def __call__(self, sample: Sample) -> float:
        return float(self._match(sample.text) is not None)


def final_number(text: str) -> Decimal | None:
    """The number in the last \\boxed{} of `text`, else the last number in it, else None."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return parse_number(boxed.strip().strip("$"))
    for match in reversed(list(_NUMBER.finditer(text))):
        value = parse_number(match.group())
        if value is not None:
            return value
    return None


def parse_number(text: str) -> Decimal | None:
    """`text` as an exact decimal: "1,000", "-2.5e3", "3/4", "12%" (0.12); None where it is no finite number."""
    text = text.strip().replace("−", "-")
    if not text or not _NUMBER.fullmatch(text):
        return None
    scale = Decimal(1)
    if text.endswith("%"):
        text, scale = text[:-1], Decimal("0.01")
    above, _, below = text.replace(",", "").partition("/")
    try:
        value = Decimal(above) / Decimal(below) if below else Decimal(above)
        value *= scale
    except (InvalidOperation, ZeroDivisionError, ArithmeticError):
        return None
    return value if value.is_finite() else None


def _last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…}, with braces balanced."""
    matches = list(_BOXED.finditer(text))
    if not matches:
        return None
    start, depth = matches[-1].end(), 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def _answers(sample: Sample, key: str) -> list[Any]:
    try:
        answer = sample.reference[key]
    except KeyError:
        raise VerifierError(
            f"the reference has no {key!r}, only {sorted(sample.reference)}; set reward.arguments.key or give it with the prompt",
            code="reference",
        ) from None
    return list(answer) if isinstance(answer, list | tuple) else [answer]


def _words(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(".!?")


_NORMAL: dict[Normalise, Callable[[str], str]] = {"none": str, "strip": str.strip, "words": _words}
