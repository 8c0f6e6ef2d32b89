"""As whom a process comes to bus and store. The role's own keys are looked up when it connects (`config_servers.py`)."""

from __future__ import annotations

from towline.config import BusSettings, Settings, StoreSettings


def as_role(settings: Settings, role: str) -> Settings:
    """The settings for the role, unless they name another one themselves."""
    return settings.model_copy(update={"bus": bus_as(settings.bus, role), "store": store_as(settings.store, role)})


def bus_as(bus: BusSettings, role: str) -> BusSettings:
    return bus.model_copy(update={"role": bus.role or role})


def store_as(store: StoreSettings, role: str) -> StoreSettings:
    return store.model_copy(update={"role": store.role or role})
