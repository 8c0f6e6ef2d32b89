"""One HTML file that needs nothing else: no network, no script; readable in the light, in the dark and on paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1a; --paper: #fbfaf7; --faint: #b9b6ae; --line: #e4e1d8; --mark: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e1; --paper: #191a1c; --faint: #5d5f63; --line: #303236; --mark: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.lead { margin: 0 0 1.2rem; opacity: .8; } .bad { color: var(--mark); font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1.4rem 2rem; }
figure { margin: 0; } figcaption { font-size: .86rem; opacity: .8; margin-top: .2rem; }
figure h3 { font-size: .95rem; margin: 0 0 .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; margin-bottom: 1.2rem; }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; } td.n, th.n { text-align: right; }
thead th { white-space: normal; vertical-align: bottom; }
td { overflow-wrap: anywhere; } .scroll td { overflow-wrap: normal; } td.n { white-space: nowrap; } pre { overflow-x: auto; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""


class Page:
    """Sections in the order in which they are added; every text is escaped here, charts are SVG from `charts`."""

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>' if lead else ""]
        self._open_grid = False

    def heading(self, text: str) -> None:
        self._close_grid()
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, *, bad: bool = False) -> None:
        self._close_grid()
        self._parts.append(f"<p{' class=bad' if bad else ''}>{escape(text)}</p>")

    def chart(self, title: str, svg: str, caption: str = "") -> None:
        """Charts that follow each other stand side by side where there is room."""
        if not self._open_grid:
            self._parts.append('<div class="grid">')
            self._open_grid = True
        note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        labelled = svg.replace("<svg", f'<svg role="img" aria-label="{escape(title, quote=True)}"', 1)
        self._parts.append(f"<figure><h3>{escape(title)}</h3>{labelled}{note}</figure>")

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Names and values."""
        self._close_grid()
        body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        self._parts.append(f"<table>{body}</table>")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Numbers stand on the right."""
        self._close_grid()
        rows = [tuple(row) for row in rows]
        numbers = [bool(rows) and all(_is_number(row[place]) for row in rows) for place in range(len(columns))]
        head = "".join(
            f"<th{' class=n' if right else ''}>{escape(name)}</th>" for name, right in zip(columns, numbers, strict=True)
        )
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        self._parts.append(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def html(self) -> str:
        self._close_grid()
        body = "\n".join(filter(None, self._parts))
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self._title)}</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
            f"<body>\n{body}\n</body></html>\n"
        )

    def _close_grid(self) -> None:
        if self._open_grid:
            self._parts.append("</div>")
            self._open_grid = False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if not _is_number(value):
        return f"<td>{escape(str(value))}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f'<td class="n">{text}</td>'
