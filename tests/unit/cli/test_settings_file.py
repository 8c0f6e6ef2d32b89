"""The effective settings file: complete, exact, private."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.config import Settings, load_settings
from towline.errors import ConflictError, UsageError
from towline.local.changes import changed
from towline.local.effective import effective, with_made_model
from towline.local.run_directory import RunDirectory, find_run
from towline.local.services import service_specs
from towline.local.toml import settings_toml

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"

values = st.recursive(
    st.text() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def demo(**sections: dict[str, object]) -> Settings:
    tree = tomllib.loads(DEMO.read_text())
    for section, changes in sections.items():
        tree[section] = tree.get(section, {}) | changes
    return Settings.model_validate(tree)


@given(st.dictionaries(st.text(), values, max_size=4), st.text(alphabet=st.characters(codec="utf-8"), min_size=1))
def test_settings_survive_the_file_exactly(arguments, secret):
    settings = demo(rollout={"arguments": arguments}, bus={"password": secret})
    assert Settings.model_validate(tomllib.loads(settings_toml(settings))) == settings


def test_only_its_owner_can_read_the_settings_file(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.save(demo(store={"secret_key": "shh"}), DEMO)
    assert stat.S_IMODE(directory.settings_path.stat().st_mode) == 0o600
    assert directory.load().store.secret_key.get_secret_value() == "shh"


def test_the_made_models_folder_takes_the_factorys_place(tmp_path):
    directory = RunDirectory(tmp_path / "demo")
    settings = effective(demo(), DEMO, directory, demo().bus, demo().store)
    assert settings.model.factory == "sort_digits:build_model"
    made = with_made_model(settings, directory)
    assert (made.model.source, made.model.factory) == (str(directory.model_path), None)
    assert made.service.drain_seconds <= 4.0


def test_a_model_folder_beside_the_toml_comes_before_one_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("here/small", "beside/small", "here/other"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    def found(source: str) -> str:
        settings = demo(model={"source": source, "factory": None, "arguments": {}})
        made = effective(settings, tmp_path / "beside" / "run.toml", RunDirectory(tmp_path / "run"), settings.bus, settings.store)
        return made.model.source

    assert found("small") == str(tmp_path / "beside" / "small")
    assert found("other") == str(tmp_path / "here" / "other")
    assert found("org/model") == "org/model", "no folder: a Hugging Face id"


def test_what_changed_since_the_run_was_last_up_is_told():
    before = demo()
    assert changed(before, before) == []
    now = demo(
        buffer={"max_staleness": 7}, run={"steps": 999, "seed": 5}, bus={"url": "nats://127.0.0.1:1"}, rollout={"replicas": 9}
    )
    lines = changed(before, now)
    assert lines == [
        f"run.seed: {before.run.seed} -> 5",
        f"buffer.max_staleness: {before.buffer.max_staleness} -> 7",
    ], "steps, replicas and addresses are meant to change"


def test_settings_in_the_environment_dont_reach_the_services(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWLINE_RUN__STEPS", "7")
    monkeypatch.setenv("TOWLINE_MARK", "kept")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    specs = service_specs(RunDirectory(tmp_path), demo(rollout={"replicas": 2, "threads": 3}), DEMO)
    assert [spec.process for spec in specs] == ["buffer", "rollout_worker", "rollout_worker-1", "reward", "trainer", "publisher"]
    environment = specs[1].environment
    assert "TOWLINE_RUN__STEPS" not in environment
    assert environment["TOWLINE_MARK"] == "kept"
    assert environment["PYTHONPATH"].split(":") == [str(DEMO.parent), "/elsewhere"]
    assert environment["OMP_NUM_THREADS"] == "3"


def test_gateways_are_started_as_asked_and_their_tenants_are_kept(tmp_path):
    settings = demo(gateway={"replicas": 2, "tenants": {"me": {"token": "t" * 16, "concurrent": 3}}})
    assert settings.gateway.opens_doors
    assert [spec.process for spec in service_specs(RunDirectory(tmp_path), settings, DEMO)][-2:] == ["gateway", "gateway-1"]
    (tmp_path / "run.toml").write_text(settings_toml(settings))
    assert load_settings(tmp_path / "run.toml") == settings


def test_a_run_is_found_by_name_by_folder_and_by_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "runs" / "demo")
    directory.path.mkdir(parents=True)
    directory.save(demo(run={"steps": 9}), DEMO)
    for target in ("demo", "runs/demo", str(DEMO)):
        found, settings = find_run(target)
        assert found.path == directory.path
        assert settings.run.steps == 9, "the effective settings win over the file's"
    with pytest.raises(UsageError, match="no run 'other'"):
        find_run("other")


def test_two_ups_of_one_run_exclude_each_other(tmp_path):
    directory = RunDirectory(tmp_path / "demo")
    with directory.lock(), pytest.raises(ConflictError, match="towline down demo"), directory.lock():
        pass
    with directory.lock():
        pass


def test_the_demo_is_a_valid_run_file():
    assert load_settings(DEMO).run.name == "demo"
