"""A number that an option takes is a number: neither nan, which passes every bound, nor an infinity."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """For `typer.Option(callback=…)` beside a bound."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} isn't a number to work with: give a finite one")
    return value
