"""Names of losses and their like are checked before a run starts, without loading what they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from towline.config import Settings, load_settings
from towline.errors import UsageError
from towline.learner.names import check_names
from towline.learner.registry import ADVANTAGES, CORRECTIONS, LOSSES
from unit.learner.conftest import settings_for


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"loss": "gpro"}, r"trainer\.loss = 'gpro': use grpo, dr_grpo"),
        ({"advantage": "mean"}, r"trainer\.advantage = 'mean': use group_normalised"),
        ({"correction": "tiss"}, r"trainer\.correction = 'tiss': use none, tis"),
        ({"loss": "nowhere_at_all:Loss"}, "no module 'nowhere_at_all'; install it"),
        ({"loss": "nowhere_at_all.losses:Loss"}, "no module 'nowhere_at_all.losses'"),
        ({"loss": "my_losses:Absent"}, "module 'my_losses' has no 'Absent'"),
        ({"loss": "my_losses:"}, "as module:name"),
        ({"correction": "half_written:Weigh"}, "can't be read"),
    ],
)
def test_a_name_that_stands_for_nothing_is_one_line(
    trainer: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=message):
        check_names(settings_for(tmp_path, **trainer))


@pytest.mark.parametrize("name", ["Mine", "alias", "Late", "made", "anything"])
def test_whatever_a_module_binds_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules(tmp_path, monkeypatch)
    module = "open_module" if name == "anything" else "my_losses"
    check_names(settings_for(tmp_path, loss=f"{module}:{name}"))


def test_every_built_in_name_passes(tmp_path: Path) -> None:
    for loss in LOSSES:
        check_names(settings_for(tmp_path, loss=loss))
    for correction in CORRECTIONS:
        check_names(settings_for(tmp_path, correction=correction))
    for advantage in ADVANTAGES:
        check_names(settings_for(tmp_path, advantage=advantage))


def test_torch_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules(tmp_path, monkeypatch)
    code = (
        "import sys; from towline.learner.names import _check_path; _check_path('trainer.loss', 'my_losses:Mine'); "
        "print('torch' in sys.modules or 'my_losses' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_an_import_path_of_the_wrong_form_says_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "x"\n[model]\nsource = "m"\n[prompts]\nsource = "my_task.prompts"\n[sampling]\nmax_tokens = 4\n'
        '[reward]\nfunction = "my_task:reward"\n'
    )
    with pytest.raises(UsageError, match=r"prompts\.source: write an import path as module:name"):
        load_settings(path)


@pytest.mark.parametrize("correction", ["tis", "icepop", "mask", "sequence_mask"])
def test_samples_over_the_bound_are_kept_with_a_correction_alone(tmp_path: Path, correction: str) -> None:
    def settings(**trainer: Any) -> Settings:
        tree = settings_for(tmp_path, **trainer).model_dump()
        tree["buffer"] |= {"over_stale": "keep", "max_staleness": 1}
        return Settings.model_validate(tree)

    check_names(settings(correction=correction))
    settings(loss="decoupled_ppo")
    with pytest.raises(ValueError, match=r"set trainer\.correction \(tis, icepop, mask, sequence_mask or module:name\)"):
        settings()


def modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_losses.py").write_text(
        "import torch\nfrom math import floor as alias\n\nclass Mine: ...\n\n"
        "try:\n    class Late: ...\nexcept ImportError:\n    Late = None\n\nmade, _ = object(), 1\n"
    )
    (folder / "open_module.py").write_text("def __getattr__(name): return object\n")
    (folder / "half_written.py").write_text("class Weigh(\n")
    monkeypatch.syspath_prepend(str(folder))
