"""Any interleaving keeps one lineage, and every retained version comes back to its digest: on files, and less of it on S3."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from towline.config import StoreSettings
from towline.store.objects import ObjectStore, open_store

from .machine import StoreMachine


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # shrinking takes minutes, and the steps that are printed say enough,
    )


def test_any_interleaving_on_files(tmp_path: Path) -> None:
    class OnFiles(StoreMachine):
        def open_objects(self) -> tuple[ObjectStore, str]:
            self.folder = Path(tempfile.mkdtemp(dir=tmp_path))
            return open_store(StoreSettings(url=self.folder.as_uri())), "run"

        def teardown(self) -> None:
            super().teardown()
            shutil.rmtree(self.folder)

    run_state_machine_as_test(OnFiles, settings=_settings(25, 25))


def test_any_interleaving_on_s3(s3_settings: StoreSettings) -> None:
    objects = open_store(s3_settings)

    class OnS3(StoreMachine):
        def open_objects(self) -> tuple[ObjectStore, str]:
            return objects, f"t-{secrets.token_hex(6)}"

    run_state_machine_as_test(OnS3, settings=_settings(4, 15))
