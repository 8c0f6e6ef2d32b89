"""What an epoch's bits depend on beside its batches, recorded by the trainer as RUN/fingerprints/EPOCH.json, create-only.

`environment` must be the same for the same bits: versions, threads, instruction set. `settings` are what the epoch trained with;
a restart may change them, so each epoch has its own. Nothing here imports torch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import msgspec

from towline.config import Settings
from towline.contract.codec import SCHEMA
from towline.errors import CorruptError, MissingError
from towline.store import keys
from towline.store.objects import ObjectStore, settle

PACKAGES = ("torch", "transformers", "numpy", "safetensors")
BACKEND_PACKAGES = {"megatron": ("megatron-core",)}
"""Beside those, with this backend."""
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""They choose kernels."""
SECTIONS = ("run", "model", "sampling", "buffer", "trainer")
"""Of the settings: what the learner and its rows depend on is in these."""
LAYOUT = ("backend", "dp", "tp", "pp", "sequence_parallel", "distributed_optimizer", "parallel")
"""Keys of `trainer` that say how its ranks split model and batch."""
_VECTOR_FLAGS = ("sse4", "avx", "fma", "amx", "asimd", "sve")


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Of one epoch."""

    schema: int = SCHEMA
    epoch: int
    environment: dict[str, str]
    seed: int
    world: int
    layout_digest: str
    settings: dict[str, dict[str, Any]]
    """Section -> its values, without secrets: none of `SECTIONS` has any."""

    def apply(self, settings: Settings) -> Settings:
        """`settings` with what this epoch trained with in their place."""
        tree = settings.model_dump()
        tree.update({section: {**tree[section], **values} for section, values in self.settings.items() if section in tree})
        return Settings.model_validate(tree)


_decoder = msgspec.json.Decoder(Fingerprint)


def environment(device: str, backend: str = "torch") -> dict[str, str]:
    """This process's: call it once the learner is made, since that sets the number of threads.

    What torch says of itself is there where the learner has loaded torch; another one's bits don't depend on it.
    """
    found = {package: _version(package) for package in (*PACKAGES, *BACKEND_PACKAGES.get(backend, ()))}
    found |= {"device": device, "instructions": _instructions(), "machine": platform.machine()}
    if (torch := sys.modules.get("torch")) is not None:
        found |= {
            "threads": str(torch.get_num_threads()),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        }
        if device.startswith("cuda"):
            found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def of_settings(settings: Settings, epoch: int, layout_digest: str) -> Fingerprint:
    """The fingerprint of an epoch that this process opened."""
    tree = settings.model_dump(mode="json", include=set(SECTIONS))
    tree["run"].pop("directory")
    tree["model"] = {"publish_dtype": settings.model.publish_dtype}  # the rest names files of this machine
    return Fingerprint(
        epoch=epoch,
        environment=environment(settings.trainer.device, settings.trainer.backend),
        seed=settings.run.seed,
        world=settings.trainer.ranks,
        layout_digest=layout_digest,
        settings=tree,
    )


def record(objects: ObjectStore, run: str, fingerprint: Fingerprint) -> None:
    """Store it; an epoch is one process's, so whatever stands there already is its own."""
    settle(objects, keys.fingerprint(run, fingerprint.epoch), msgspec.json.encode(fingerprint))


def read(objects: ObjectStore, run: str, epoch: int) -> Fingerprint | None:
    """The epoch's; None where none was recorded."""
    key = keys.fingerprint(run, epoch)
    try:
        found = _decoder.decode(objects.get(key))
    except MissingError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{objects.url}: {key} can't be read: {error}", code="fingerprint") from error
    if found.schema != SCHEMA or found.epoch != epoch:
        raise CorruptError(f"{objects.url}: {key} says schema {found.schema}, epoch {found.epoch}", code="fingerprint")
    return found


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Name -> (recorded, here) of what isn't the same; "-" where one of them hasn't it."""
    names = sorted(set(recorded) | set(here))
    pairs = {name: (recorded.get(name, "-"), here.get(name, "-")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _version(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        return "-"


def _instructions() -> str:
    """The vector instruction sets, which math libraries choose kernels by; empty where the system doesn't list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted({flag for flag in flags.split() if flag.startswith(_VECTOR_FLAGS)}))
    return ""
