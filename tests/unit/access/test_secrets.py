"""Secrets come by reference, and are printed nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from towline.access.credentials import bus_users
from towline.access.tenants import write_tenant
from towline.bus.login import login
from towline.cli.main import app
from towline.config import BusSettings, StoreSettings, load_settings
from towline.errors import UsageError

TOML = """
[run]
name = "a-run"
[model]
source = "model"
[prompts]
source = "mine:prompts"
[sampling]
max_tokens = 6
[reward]
function = "mine:reward"
"""


def test_a_password_and_keys_may_stand_in_files(tmp_path: Path) -> None:
    for name, text in (("password", "hush-one\n"), ("access", "hush-two\n"), ("secret", "  hush-three\n")):
        (tmp_path / name).write_text(text)
    bus = BusSettings(user="u", password_file=str(tmp_path / "password"))
    store = StoreSettings(access_key_file=str(tmp_path / "access"), secret_key_file=str(tmp_path / "secret"))
    assert login(bus) == {"user": "u", "password": "hush-one"}
    assert store.keys == ("hush-two", "hush-three")
    (tmp_path / "password").write_text("hush-four")
    assert login(bus)["password"] == "hush-four"  # what is replaced counts at the next connection
    assert "hush" not in f"{bus!r}{store!r}{bus.model_dump()}{store.model_dump_json()}"


def test_references_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    (tmp_path / "run-secret").write_text("hush")
    monkeypatch.setenv("TOWLINE_BUS__USER", "me")
    monkeypatch.setenv("TOWLINE_BUS__PASSWORD_FILE", str(tmp_path / "run-secret"))
    monkeypatch.setenv("TOWLINE_STORE__KEYS_FOLDER", "/run/secrets")
    settings = load_settings(path)
    assert settings.bus.secret == "hush"
    assert settings.store.keys_folder == "/run/secrets"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (BusSettings(user="u", password_file="/nowhere/p"), r"bus\.password_file = '/nowhere/p': No such file"),
        (BusSettings(nkey_seed_file="/nowhere/n"), r"bus\.nkey_seed_file = '/nowhere/n': No such file"),
        (BusSettings(keys_folder="/nowhere", role="buffer"), r"bus\.keys_folder = '/nowhere/buffer\.nk': No such file"),
        (BusSettings(credentials_file="/nowhere/c"), r"bus\.credentials_file = '/nowhere/c': No such file"),
        (BusSettings(url="tls://host", tls_ca="/nowhere/ca"), r"bus\.tls_ca.*/nowhere/ca.*No such file"),
    ],
)
def test_a_file_that_is_not_there_is_one_line_with_the_settings_name(settings: BusSettings, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        login(settings)


def test_an_empty_file_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        login(BusSettings(nkey_seed_file=str(tmp_path / "empty")))


@pytest.mark.parametrize("text", [b"garbage", b"SUAC", b"\xff\xfe\x00"])
def test_a_seed_that_is_none_is_one_line_that_names_the_file_and_never_its_text(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "buffer.nk"
    path.write_bytes(text)
    for settings in (BusSettings(keys_folder=str(tmp_path), role="buffer"), BusSettings(nkey_seed_file=str(path))):
        with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
            login(settings)
        assert "garbage" not in caught.value.message
    with pytest.raises(UsageError, match="delete it, and a new one is made"):
        bus_users(tmp_path, ["buffer"])
    path.unlink()
    bus_users(tmp_path, ["buffer"])
    assert login(BusSettings(keys_folder=str(tmp_path), role="buffer"))["nkeys_seed_str"] == path.read_text().strip()


def test_a_signers_seed_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "operator.seed").write_text("garbage")
    with pytest.raises(UsageError, match=r"operator\.seed: no nkey seed in it; bring back the right one"):
        write_tenant(tmp_path, "towline", ["one"])


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    written = []
    for names in (["one", "two"], ["one", "two", "one"]):
        runs = [argument for name in names for argument in ("--run", name)]
        assert CliRunner().invoke(app, ["access", "nats", *runs, "--out", str(tmp_path)]).exit_code == 0
        written.append((tmp_path / "nats.conf").read_text())
    assert written[0] == written[1]


def test_a_token_file_that_holds_something_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "buffer.creds"
    for text in ("nonsense\n", "-----BEGIN NATS USER JWT-----\neyJ0\n"):  # the second was cut off
        path.write_text(text)
        for settings in (BusSettings(keys_folder=str(tmp_path), role="buffer"), BusSettings(credentials_file=str(path))):
            with pytest.raises(UsageError, match=r"buffer\.creds' holds no user's token with its seed"):
                login(settings)


@pytest.mark.parametrize(
    ("kind", "given", "line"),
    [
        (BusSettings, {"user": "u", "token": "t"}, "user and token: say in one way who comes"),
        (BusSettings, {"nkey_seed_file": "a", "credentials_file": "b"}, "nkey_seed_file and credentials_file"),
        (BusSettings, {"user": "u", "password": "p", "password_file": "f"}, "either password or password_file"),
        (BusSettings, {"tls_cert": "c"}, "tls_cert and tls_key go together"),
        (StoreSettings, {"access_key_file": "a"}, "go together"),
        (StoreSettings, {"access_key_file": "a", "secret_key_file": "b", "access_key": "c"}, "either by value or by file"),
    ],
)
def test_two_ways_at_once_are_refused(kind: type[BusSettings] | type[StoreSettings], given: dict[str, str], line: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(line)):
        kind.model_validate(given)


def test_a_seed_is_never_shown(tmp_path: Path) -> None:
    bus_users(tmp_path, ["buffer"])
    settings = BusSettings(keys_folder=str(tmp_path), role="buffer")
    assert settings.seed.startswith("SU")
    assert settings.seed not in f"{settings!r} {settings.model_dump_json()}"
