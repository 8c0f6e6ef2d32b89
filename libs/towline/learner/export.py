"""The base model as the run publishes it: a Hugging Face folder whose floating weights are in the publish dtype.

Trainer, publisher and replicas then start from the very same bytes, and depth 0 is exactly what the first batch was sampled from.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from towline.errors import UnavailableError, UsageError
from towline.learner.torch_model import PUBLISH_DTYPES, safetensors_files

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def locate(source: str, revision: str | None) -> tuple[Path, str | None]:
    """The folder that `source` names, and the commit where it is a Hugging Face id (downloaded into the usual cache).

    `UsageError` where it is neither; `UnavailableError` where the hub can't be reached.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"model.source = {source!r}: the folder has no config.json", code="model_missing")
        return folder, None
    if folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise UsageError(f"model.source = {source!r}: no such folder", code="model_missing")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        path = Path(
            snapshot_download(
                source,
                revision=revision,
                etag_timeout=20.0,
                allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"],
            )
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UsageError(f"model.source = {source!r}: neither a folder nor a model on the hub", code="model_missing") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        line = str(error).strip().splitlines()[0]
        raise UnavailableError(
            f"model.source = {source!r}: there is no folder {folder.resolve()}, "
            f"and as a Hugging Face id it can't be downloaded: {line}",
            code="model_download",
        ) from error
    if not _COMMIT.fullmatch(path.name):
        raise UnavailableError(f"model.source = {source!r}: the hub named no commit", code="model_download")
    return path, path.name


def convert_folder(source: Path, target: Path, publish_dtype: str) -> None:
    """Write `source`'s model into the folder `target`: the same files and tensor names, floating ones in `publish_dtype`."""
    dtype = PUBLISH_DTYPES[publish_dtype]
    target.mkdir(parents=True, exist_ok=True)
    total = 0
    for path in safetensors_files(source):
        with safe_open(path, "pt") as file:
            tensors = {name: _converted(file.get_tensor(name), dtype) for name in file.keys()}  # noqa: SIM118
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        save_file(tensors, target / path.name, metadata={"format": "pt"})
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES:
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = publish_dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["metadata"] = {**content.get("metadata", {}), "total_size": total}
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
