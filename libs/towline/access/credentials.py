"""Secrets on disk: a file for each, that its owner alone reads. What exists stays, unless new ones are asked for.

FOLDER/ROLE.nk           an nkey's seed, for the bus
       ROLE.s3-access    an S3 access key's id
       ROLE.s3-secret    and its secret
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nkeys

from towline.config_servers import ACCESS_KEY, SECRET_KEY, SEED, read_secret
from towline.errors import UsageError
from towline.runtime.files import write_private

_SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An S3 identity's keys."""

    access: str
    secret: str


def seed_path(folder: Path, role: str) -> Path:
    return folder / f"{role}{SEED}"


def access_key_path(folder: Path, role: str) -> Path:
    return folder / f"{role}{ACCESS_KEY}"


def secret_key_path(folder: Path, role: str) -> Path:
    return folder / f"{role}{SECRET_KEY}"


def private_folder(folder: Path) -> None:
    """Made where it's missing, its owner's alone. `UsageError` where none can be made there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise UsageError(f"--out {folder}: there is a file of that name; give a folder", code="output") from None
    except OSError as error:
        raise UsageError(f"--out {folder}: no folder can be made there ({error.strerror})", code="output") from None


def bus_users(folder: Path, names: Iterable[str], *, anew: bool = False) -> dict[str, str]:
    """Role -> its public nkey; seeds are made where they're missing, all of them with `anew`."""
    private_folder(folder)
    users = {}
    for role in names:
        path = seed_path(folder, role)
        if anew or not path.is_file():
            write_private(path, new_seed(nkeys.PREFIX_BYTE_USER))
        users[role] = public_key(path)
    return users


def store_keys(folder: Path, names: Iterable[str], *, anew: bool = False) -> dict[str, KeyPair]:
    """Role -> its S3 keys, made in the same way."""
    private_folder(folder)
    found = {}
    for role in names:
        access, secret = access_key_path(folder, role), secret_key_path(folder, role)
        if anew or not (access.is_file() and secret.is_file()):
            write_private(access, secrets.token_hex(10).upper())
            write_private(secret, secrets.token_hex(20))
        found[role] = KeyPair(read_secret(str(access), "--out"), read_secret(str(secret), "--out"))
    return found


def new_seed(kind: int) -> str:
    """An nkey's seed; `kind` is one of nkeys' PREFIX_BYTE_…"""
    return bytes(nkeys.encode_seed(secrets.token_bytes(_SEED_BYTES), kind)).decode()


def public_key(path: Path) -> str:
    """Of the seed in the file. `UsageError` where it holds none."""
    try:
        pair = nkeys.from_seed(bytearray(path.read_text().strip().encode()))
    except (OSError, nkeys.NkeysError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"{path}: no nkey seed in it ({reason}); delete it, and a new one is made", code="nkey") from None
    return bytes(pair.public_key).decode()
