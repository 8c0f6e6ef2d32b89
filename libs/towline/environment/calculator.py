"""A calculator as a tool: arithmetic on whole and decimal numbers, exact, by a parser of its own; nothing is ever executed.

sum = product (('+' | '-') product)*    product = factor (('*' | '/') factor)*    factor = '-' factor | number | '(' sum ')'
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from towline.environment.tool_use import ToolRefused, ToolUse

MAX_CHARACTERS, MAX_DEPTH = 500, 50
"""Without powers an expression so short has no number that is much longer than itself."""
DECIMALS = 10
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|([-+*/()]))")


class Calculator(ToolUse):
    """For `prompts.environment`; its `environment_arguments` are ToolUse's."""

    def __init__(self, tokenizer: Any, **arguments: Any) -> None:
        super().__init__(tokenizer, calculate, **arguments)


def calculate(expression: str) -> str:
    """The value, rounded to DECIMALS places where it isn't a whole number. `ToolRefused` says what is wrong with it."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolRefused(f"an expression has at most {MAX_CHARACTERS} characters")
    value = _Parser(_tokens(expression)).value()
    whole, rest = divmod(abs(round(value * 10**DECIMALS)), 10**DECIMALS)
    sign = "-" if value < 0 and (whole or rest) else ""
    return f"{sign}{whole}" + (f".{rest:0{DECIMALS}d}".rstrip("0") if rest else "")


def _tokens(expression: str) -> list[str]:
    tokens, at, end = [], 0, len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ToolRefused(f"unreadable at {expression[at:].strip()[:10]!r}")
        tokens.append(match[1] or match[2])
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._tokens):
            raise ToolRefused(f"unexpected {self._tokens[self._at]!r}")
        return value

    def _next(self, *wanted: str) -> str | None:
        """The next token, taken, if it is one of these."""
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._next("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._next("*", "/"):
            factor = self._factor()
            if sign == "/" and not factor:
                raise ToolRefused("division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolRefused(f"nested more than {MAX_DEPTH} deep")
        try:
            if self._next("-"):
                return -self._factor()
            if self._next("("):
                value = self._sum()
                if not self._next(")"):
                    raise ToolRefused("a ) is missing")
                return value
            if self._at >= len(self._tokens):
                raise ToolRefused("a number is missing at the end")
            token = self._tokens[self._at]
            if token in "+-*/()":
                raise ToolRefused(f"a number is missing before {token!r}")
            self._at += 1
            return Fraction(token)
        finally:
            self._depth -= 1
