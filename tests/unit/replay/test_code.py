"""A bundle is data: code that it names is run only where its reader named it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from towline.bundle.folder import BundleSource
from towline.bundle.source import BusSource, Source
from towline.config import Settings
from towline.errors import UsageError
from towline.replay.code import check_code


def settings(**trainer: object) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "small"},
            "model": {"source": "a/model"},
            "prompts": {"source": "mine:prompts"},
            "sampling": {"max_tokens": 4},
            "reward": {"function": "mine:reward"},
            "trainer": trainer,
        }
    )


def bundle() -> BundleSource:
    nothing = cast(Any, None)
    return BundleSource(Path("given"), cast(Any, _Manifest), settings(), nothing, nothing)


class _Manifest:
    run = "small"


@pytest.mark.parametrize("key", ["loss", "advantage", "correction"])
def test_an_import_path_in_a_bundle_is_refused_with_the_two_ways_to_allow_it(key: str) -> None:
    with pytest.raises(UsageError, match=f"trainer.{key} = .*--code.*--set trainer.{key}=subprocess:Popen") as refused:
        check_code(bundle(), settings(**{key: "subprocess:Popen"}), {}, None)
    assert refused.value.code == "bundle_code"


def test_a_folder_of_code_allows_its_own_modules_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "package").mkdir()
    check_code(bundle(), settings(loss="mine:Loss", advantage="package.deep:advantage"), {}, tmp_path)
    with pytest.raises(UsageError, match="subprocess"):
        check_code(bundle(), settings(loss="subprocess:Popen"), {}, tmp_path)


def test_names_of_towlines_own_and_what_the_reader_names_are_free() -> None:
    check_code(bundle(), settings(loss="gspo", advantage="rloo", correction="tis"), {}, None)
    check_code(bundle(), settings(loss="towline.learner.losses.grpo:GRPO"), {}, None)
    check_code(bundle(), settings(loss="mine:Loss"), {"trainer.loss": "mine:Loss"}, None)


def test_a_run_of_ones_own_names_what_it_likes() -> None:
    check_code(cast(Source, BusSource.__new__(BusSource)), settings(loss="mine:Loss"), {}, None)
