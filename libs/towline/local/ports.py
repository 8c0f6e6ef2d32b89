"""The ports that a service took by itself, for its next start: who knows its address finds it there again."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SETTINGS = {"api_port": "TOWLINE_GATEWAY__PORT", "grpc_port": "TOWLINE_GATEWAY__GRPC_PORT"}
"""Figure of a gateway's status -> the setting that asks for that port."""


@dataclass(slots=True)
class KeptPorts:
    """Of one process. Only the figures in `wanted` are kept: those whose settings leave the port open."""

    host: str
    wanted: tuple[str, ...]
    _known: dict[str, int] = field(default_factory=dict)

    def learn(self, figures: Mapping[str, Any]) -> None:
        """What the process says first stands; it listens there already."""
        for name in self.wanted:
            if port := figures.get(name):
                self._known.setdefault(name, int(port))

    def environment(self) -> dict[str, str]:
        """For the next start. A port that somebody else took meanwhile isn't asked for again."""
        for name, port in list(self._known.items()):
            if not _is_free(self.host, port):
                del self._known[name]
        return {SETTINGS[name]: str(port) for name, port in self._known.items()}


def _is_free(host: str, port: int) -> bool:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError:
        return False
    return True
