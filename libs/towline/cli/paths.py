"""Paths on the command line: an output that can't be written is refused before the work, any other fault of one is one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from towline.errors import UsageError

_OF_THE_SYSTEM = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
"""What no code can be at fault for: permissions, and room."""


def to_write(path: Path | None) -> Path | None:
    """For `typer.Option(callback=…)`: where the command will write; folders may be missing, as far as it makes them."""
    return None if path is None else _checked(path, of_a_file=False)


def file_to_write(path: Path | None) -> Path | None:
    """The same of a file: no folder may stand there."""
    return None if path is None else _checked(path, of_a_file=True)


def _checked(path: Path, *, of_a_file: bool) -> Path:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long a name, a null byte
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{str(path)!r}: {reason}; name another place", code="output") from None
    if of_a_file and path.is_dir():
        raise UsageError(f"{path} is a folder; name the file to write", code="output")
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        if place == path.absolute():
            return path  # a file stands there: the command says what it does with it
        raise UsageError(f"{path}: {place} is a file, and no folder; name another place", code="output")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: you may not write into {place}; name another place", code="output")
    return path


def fault_of(error: OSError, words: Iterable[str] | None = None) -> str | None:
    """What to say of an error about a path that the user named in `words` (the command line), or of permissions or room; None
    where it's another's fault, and a traceback may help."""
    if error.filename is None:
        return f"{_reason(error)}; make some, and try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else str(error.filename)
    if error.errno not in _OF_THE_SYSTEM and not _named(path, sys.argv[1:] if words is None else words):
        return None
    return f"{path}: {_reason(error)}; correct the path"


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file stands where a folder is wanted"
    return error.strerror or type(error).__name__


def _named(path: str, words: Iterable[str]) -> bool:
    """Whether `path` is what a word says, or `option=` says, or lies in it, above it, or beside it, as a temporary file does."""
    failed = Path(os.path.abspath(path))
    for word in words:
        for text in (word, word.partition("=")[2], word.rpartition("=")[2]):
            if not text or text.startswith("-"):
                continue
            given = Path(os.path.abspath(text.removeprefix("file://")))
            if failed.is_relative_to(given) or given.is_relative_to(failed) or failed.parent == given.parent:
                return True
    return False
