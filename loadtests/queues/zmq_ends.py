"""ZMQ: PUSH and PULL, a line and not a queue that lasts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from towline.loadtest.ends import Plan


class ZmqSource:
    def __init__(self, plan: Plan) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = plan.window

    async def open(self) -> None:
        self._socket.connect(os.environ["QUEUES_ZMQ"])

    async def send(self, number: int, payload: bytes) -> None:
        """It's on the line: ZMQ tells nobody that it arrived."""
        await self._socket.send(payload, copy=False)

    async def close(self) -> None:
        self._socket.close(linger=5000)
        self._context.term()


class ZmqSink:
    def __init__(self, plan: Plan) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = plan.window

    async def open(self) -> None:
        self._socket.bind(os.environ["QUEUES_ZMQ"])

    async def receive(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._socket.recv()

    async def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
