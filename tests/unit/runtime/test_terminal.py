"""What a name or a reason says is shown, never obeyed, by a terminal."""

from __future__ import annotations

import io
import unicodedata

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from towline.runtime.console import PlainConsole
from towline.runtime.terminal import say, visible

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f\u202eb[/bold][link=http://x]:skull:"
SHOWN = "a␛]0;owned␇␛[2J\ufffd31m␍␡\ufffdb[/bold][link=http://x]:skull:"


def test_no_control_character_of_any_kind_is_left():
    every = "".join(map(chr, range(0x3000)))
    left = [character for character in visible(every) if unicodedata.category(character) == "Cc"]
    assert left == []
    assert visible(HOSTILE) == SHOWN
    assert visible("zwölf 字 🦜 '" + chr(0x2028)) == "zwölf 字 🦜 '" + chr(0x2028)


def test_a_line_stays_one_line(capsys):
    say("w\nforged 1.0  reward 1.000")
    say(HOSTILE, error=True)
    printed = capsys.readouterr()
    assert printed.out == "w␊forged 1.0  reward 1.000\n"
    assert printed.err == SHOWN + "\n"


@pytest.mark.parametrize("wrap", [lambda text: text, Text, lambda text: Panel(Text(text), title=Text(text)), "table"])
def test_a_rich_console_shows_texts_as_they_are_wherever_they_stand(wrap, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    console = PlainConsole()
    console.file = io.StringIO()
    if wrap == "table":
        table = Table("name")
        table.add_row(HOSTILE)
        console.print(table)
    else:
        console.print(wrap(HOSTILE))
    printed = console.file.getvalue()
    assert "a␛]0;owned" in printed
    assert "␛[2J\ufffd31m" in printed
    assert "b[/bold][link=http://x]:s" in printed
    assert not set(printed) & set("\x1b\x07\x9b\x7f\r\u202e")


def test_a_style_and_a_live_picture_keep_their_own_sequences(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = PlainConsole()
    console.file = io.StringIO()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        live.update(Text("red\x1b[2J", style="red"), refresh=True)
    printed = console.file.getvalue()
    assert "\x1b[?1049h" in printed  # the other screen, as `towline top` asks for
    assert "\x1b[31mred␛[2J\x1b[0m" in printed
