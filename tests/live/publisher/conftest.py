"""The publisher's tests run on both kinds of store."""

from __future__ import annotations

from live.store.conftest import objects, store_settings

__all__ = ["objects", "store_settings"]
