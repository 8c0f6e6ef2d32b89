"""As whom a process comes to bus and store: its role's own keys, where the settings name a folder of them."""

from __future__ import annotations

from pathlib import Path

from towline.access.credentials import access_key_path, secret_key_path, seed_path
from towline.config import BusSettings, Settings, StoreSettings


def as_role(settings: Settings, role: str) -> Settings:
    """The settings with the role's files filled in; what names a key itself keeps it."""
    return settings.model_copy(update={"bus": bus_as(settings.bus, role), "store": store_as(settings.store, role)})


def bus_as(bus: BusSettings, role: str) -> BusSettings:
    """The bus as the role comes to it, unless the settings name another role."""
    role = bus.role or role
    update = {"role": role}
    named = bus.nkey_seed_file or bus.credentials_file or bus.user or bus.token.get_secret_value()
    if bus.keys_folder and not named:
        update["nkey_seed_file"] = str(seed_path(Path(bus.keys_folder), role))
    return bus.model_copy(update=update)


def store_as(store: StoreSettings, role: str) -> StoreSettings:
    """The store as the role comes to it."""
    if not store.keys_folder or store.access_key_file or store.access_key:
        return store
    folder = Path(store.keys_folder)
    keys = {"access_key_file": access_key_path(folder, role), "secret_key_file": secret_key_path(folder, role)}
    return store.model_copy(update={name: str(path) for name, path in keys.items()})
