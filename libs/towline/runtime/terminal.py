"""Text on a terminal stays text: names, reasons and tokens come from elsewhere, and a control character in one would be obeyed.

Each is shown as a sign (␛ for escape), whether the output is a terminal or a file that is looked at on one later.
"""

from __future__ import annotations

import sys

_UNKNOWN = 0xFFFD
_TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""They change the direction of what is written after them."""
_LINE_END = 0x0A
_SIGNS = {
    **{code: 0x2400 + code for code in range(0x20)},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *_TURNING), _UNKNOWN),
}
_OF_LINES = {code: sign for code, sign in _SIGNS.items() if code != _LINE_END}


def visible(text: str, *, lines: bool = False) -> str:
    """Every control character as a sign; line ends too, unless `lines`: so one line stays one."""
    return text.translate(_OF_LINES if lines else _SIGNS)


def say(line: str, *, error: bool = False) -> None:
    """Print one line, on stderr if `error`."""
    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)
