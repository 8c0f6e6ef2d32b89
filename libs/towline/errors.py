"""Every error that Towline raises on purpose, grouped by what the caller should do about it.

The class says what to do, `code` says what happened. Codes are stable strings that dashboards and scripts match on: new
ones are added, none is renamed or reused. The command line prints one line, `code: message`, and exits with `exit_status`.
"""

from __future__ import annotations


class TowlineError(Exception):
    """The root. `message` is one line that names the thing and the way out."""

    default_code = "error"
    exit_status = 1

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code

    def __str__(self) -> str:
        return self.message


class UsageError(TowlineError):
    """Fix the call or the configuration; repeating it changes nothing."""

    default_code = "usage"
    exit_status = 2


class UnavailableError(TowlineError):
    """A server, a peer or an object isn't there (yet): repeat with a back-off, up to a limit."""

    default_code = "unavailable"


class FullError(UnavailableError):
    """A stream or a disk has no room: keep what you have, wait, send it again."""

    default_code = "full"


class MissingError(TowlineError):
    """The named thing doesn't exist."""

    default_code = "missing"


class ConflictError(TowlineError):
    """Another writer was first: read what stands and decide again."""

    default_code = "conflict"


class FencedError(ConflictError):
    """A newer writer has taken over for good: stop this process (exit status 75; come back as standby)."""

    default_code = "fenced"
    exit_status = 75


class CorruptError(TowlineError):
    """Bytes aren't what their digest or their format says: never use them; report, and take another copy."""

    default_code = "corrupt"


class MalformedError(CorruptError):
    """A message that no reader may act on. `data` keeps it whole for the dead-letter stream."""

    default_code = "malformed"

    def __init__(self, message: str, *, code: str | None = None, data: bytes = b"") -> None:
        super().__init__(message, code=code)
        self.data = data


class InvariantError(TowlineError):
    """A promise of the protocol is broken: stop, and let a person look."""

    default_code = "invariant"


class EngineError(TowlineError):
    """The engine failed; the worker decides between a retry, a restart and a failure record."""

    default_code = "engine"


class VerifierError(TowlineError):
    """A reward function failed, ran over its time or returned no reward: try again a few times, then drop the group."""

    default_code = "verifier"
