"""What a run that goes on finds changed in its settings: allowed, but told, since its earlier steps were made under others."""

from __future__ import annotations

from towline.config import Settings

_OF_THE_MACHINE = {"bus", "store", "service", "gateway", "telemetry"}
"""Sections that say where things run, not what the run is."""
_MEANT_TO_CHANGE = {"run.steps", "run.directory", "rollout.replicas"}


def changed(before: Settings, now: Settings) -> list[str]:
    """`section.key: old -> new` of everything that shapes the run, in the file's order.

    Both as they are effective, the model aside where it is made by a factory: the made folder stays.
    """
    lines = []
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for section, keys in new.items():
        if section in _OF_THE_MACHINE or (section == "model" and now.model.factory is not None):
            continue
        for key, value in keys.items():
            name, earlier = f"{section}.{key}", old[section].get(key)
            if name not in _MEANT_TO_CHANGE and earlier != value:
                lines.append(f"{name}: {earlier!r} -> {value!r}")
    return lines
