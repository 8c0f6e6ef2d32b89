"""A fault in the configuration is one line that names the key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.config import import_object, load_settings
from towline.errors import UsageError

GOOD = """
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


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "[buffer]\ngroup_sise = 4\n", r"buffer\.group_sise: unknown key"),
        (GOOD + "[bufer]\ngroup_size = 4\n", r"bufer: unknown key"),
        (GOOD.replace('"a-run"', '"A run"'), r"run\.name: use 1 to 32 of a-z"),
        (GOOD.replace("max_tokens = 6", ""), r"sampling\.max_tokens: missing"),
        (GOOD + "[buffer]\ngroup_size = 1001\n", r"buffer\.group_size: .*1000"),
        (GOOD + "[buffer]\nmax_staleness = 'x'\n", r"buffer\.max_staleness: .*integer"),
        (GOOD.replace('source = "model"', ""), "give either source or factory"),
        (GOOD.replace('"mine:reward"', '"mine.reward"'), r"reward\.function: .*module:name"),
        (GOOD + "[[", "run.toml: "),
        ("run = 3\n", r"run"),
    ],
)
def test_a_fault_is_one_line_that_names_the_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load_settings(write(tmp_path, text))
    assert "\n" not in caught.value.message
    assert caught.value.exit_status == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: no such file"):
        load_settings(tmp_path / "nowhere.toml")


def test_tables_within_sections_are_set_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_GATEWAY__SESSIONS__MAX_TURNS", "9")
    overrides = {"gateway.sessions.claim_seconds": 20, "gateway.tenants.me.token": "t" * 20}
    mine = load_settings(write(tmp_path, GOOD), overrides).gateway
    assert (mine.sessions.max_turns, mine.sessions.claim_seconds, mine.tenants["me"].secret) == (9, 20, "t" * 20)
    with pytest.raises(UsageError, match=r"gateway\.sessions\.nothing: unknown key"):
        load_settings(write(tmp_path, GOOD), {"gateway.sessions.nothing": 1})


def test_the_environment_and_overrides_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_BUFFER__GROUP_SIZE", "4")
    monkeypatch.setenv("TOWLINE_BUS__URL", "nats://127.0.0.1:4222")
    settings = load_settings(write(tmp_path, GOOD), {"run.steps": 7, "buffer.max_staleness": 2})
    assert (settings.buffer.group_size, settings.run.steps, settings.buffer.max_staleness) == (4, 7, 2)
    assert settings.bus.url == "nats://127.0.0.1:4222"


def test_secrets_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_STORE__SECRET_KEY", "hush-hush")
    settings = load_settings(write(tmp_path, GOOD))
    assert "hush-hush" not in repr(settings)
    assert settings.store.secret_key.get_secret_value() == "hush-hush"


def test_a_module_beside_the_file_is_importable_and_a_wrong_path_is_named(tmp_path: Path) -> None:
    load_settings(write(tmp_path, GOOD))
    (tmp_path / "beside_the_file.py").write_text("def reward(sample): return 1.0\n")
    assert import_object("beside_the_file:reward", "reward.function")(None) == 1.0
    with pytest.raises(UsageError, match=r"reward.function = 'beside_the_file:rewrd': module 'beside_the_file' has no 'rewrd'"):
        import_object("beside_the_file:rewrd", "reward.function")
    with pytest.raises(UsageError, match="no module 'nowhere_at_all'"):
        import_object("nowhere_at_all:reward", "reward.function")
