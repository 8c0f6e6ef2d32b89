"""Backends, losses, advantages and corrections by name, or by the import path of a user's own."""

from __future__ import annotations

from typing import Any

from towline.config import import_object
from towline.errors import UsageError

BACKENDS = {
    "torch": "towline.learner.torch_backend:TorchLearner",
    "megatron": "towline.learner.megatron.backend:MegatronLearner",
}
LOSSES = {
    "grpo": "towline.learner.losses.grpo:GRPO",
    "dr_grpo": "towline.learner.losses.dr_grpo:DrGRPO",
    "gspo": "towline.learner.losses.gspo:GSPO",
    "cispo": "towline.learner.losses.cispo:CISPO",
    "ppo_clip": "towline.learner.losses.ppo_clip:PPOClip",
    "decoupled_ppo": "towline.learner.losses.decoupled_ppo:DecoupledPPO",
}
ADVANTAGES = {
    "group_normalised": "towline.learner.advantages.group_normalised:group_normalised",
    "group_centred": "towline.learner.advantages.group_centred:group_centred",
    "rloo": "towline.learner.advantages.rloo:rloo",
}
CORRECTIONS = {
    "none": "towline.learner.corrections.none:NoCorrection",
    "tis": "towline.learner.corrections.tis:TruncatedImportanceSampling",
    "icepop": "towline.learner.corrections.icepop:IcePop",
    "mask": "towline.learner.corrections.icepop:TokenMask",
    "sequence_mask": "towline.learner.corrections.sequence_mask:SequenceMask",
}


def look_up(setting: str, names: dict[str, str], name: str) -> Any:
    """The object that a built-in name or `module:name` stands for; `UsageError` lists the names."""
    path = name if ":" in name else names.get(name)
    if path is None:
        raise UsageError(f"{setting} = {name!r}: use {', '.join(names)}, or an import path module:name", code="unknown_name")
    return import_object(path, setting)


def build(setting: str, names: dict[str, str], name: str, arguments: dict[str, Any]) -> Any:
    """An instance made with `arguments`; `UsageError` where the class doesn't take them."""
    cls = look_up(setting, names, name)
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{setting} = {name!r} with {setting}_arguments {arguments}: {error}", code="arguments") from error
