"""One connection to the bus: it comes back by itself for ever, and whatever waits for an answer learns of a loss at once.

nats-py's client serves one life of the connection; this class makes the next one. So every subscription is made again, no
half-sent message of an earlier life is sent later, and a permission that the server refuses reaches the caller, whom nats-py
would leave waiting. What is in doubt raises `Unsettled`: the caller knows whether a repeat is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from towline.bus.address import without_user
from towline.bus.ending import CLOSE_SECONDS, end, put_away
from towline.bus.incoming import Receiver, parse_header_lines, without_queue
from towline.bus.login import judge, login, new_client
from towline.bus.outgoing import without_copies
from towline.bus.wire import DENIED_CODE, NO_RESPONDERS, Unsettled
from towline.config import BusSettings
from towline.errors import UnavailableError, UsageError

PING_SECONDS = 5
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.05, 2.0
LOOK_SECONDS = 1.0
"""Between two looks at a client that may have closed without a word."""
_NO_LIMIT = 1 << 30
"""For nats-py's own limits: what is in flight is bounded before it gets there (publish.py), what comes in is pulled."""

_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
_LAST_SENT = 512
"""Subjects of messages, the last ones, among which a refused one is looked for."""
_MOST_DENIED = 4096
_log = structlog.get_logger("towline.bus")


class Subscription:
    """Where messages on a subject go, over all lives of the connection."""

    def __init__(self, connection: Connection, subject: str, receive: Receiver) -> None:
        self._connection = connection
        self.subject = subject
        self.receive = receive
        self.current: Any = None

    async def deliver(self, message: Msg) -> None:
        self.receive(message)

    async def close(self) -> None:
        await self._connection.unsubscribe(self)


class Connection:
    """`open` connects or raises; from then on only `close` ends it."""

    def __init__(self, settings: BusSettings, client_name: str) -> None:
        self.settings = settings
        self.client_name = client_name
        self.address = without_user(settings.url)
        self.last_error: str | None = None
        self._inbox_root = settings.inbox_prefix or ".".join(filter(None, ("_INBOX", settings.user or settings.acts_as)))
        self._denied: set[str] = set()
        self._unanswered: deque[str] = deque(maxlen=_LAST_SENT)
        self._servers = [part.strip() for part in settings.url.split(",") if part.strip()]
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._closing = False
        self._maintainer: asyncio.Task[None] | None = None
        self._subscriptions: dict[int, Subscription] = {}
        self._listeners: set[Callable[[], None]] = set()
        self._pending: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._series: dict[str, list[Msg]] = {}
        """Of requests that many messages answer: where those go, up to the status that ends them."""
        self._count = 0
        self._inbox = self.new_inbox()
        self._replies = Subscription(self, f"{self._inbox}.*", self._on_reply)
        self._subscriptions[id(self._replies)] = self._replies

    @classmethod
    async def open(cls, settings: BusSettings, client_name: str) -> Connection:
        """Connect within `connect_timeout_seconds`. `UsageError` where the server refuses the user, else `UnavailableError`."""
        if not settings.url:
            raise UsageError("bus.url is empty; give nats://host:port", code="bus_url")
        self = cls(settings, client_name)
        deadline = asyncio.get_running_loop().time() + settings.connect_timeout_seconds
        delay = FIRST_DELAY_SECONDS
        while True:
            try:
                await self._connect()
                break
            except UnavailableError:
                if asyncio.get_running_loop().time() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        self._maintainer = asyncio.create_task(self._maintain(), name="bus-connection")
        return self

    async def close(self) -> None:
        """Send what is buffered, within two seconds, and end the connection."""
        self._closing = True
        if self._maintainer is not None:
            self._maintainer.cancel()
            await asyncio.gather(self._maintainer, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            if client.is_connected:
                with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                    await client.flush(CLOSE_SECONDS)
            await end(client)
        self._fail_pending("the bus client was closed")

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def max_payload(self) -> int:
        """Bytes of a message, headers included, as the server says."""
        if self._client is None:
            raise UnavailableError("the bus client was closed", code="bus_closed")
        return int(self._client.max_payload)

    @property
    def server_version(self) -> str:
        """The nats-server's, as it says."""
        if self._client is None:
            raise UnavailableError("the bus client was closed", code="bus_closed")
        found = self._client.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    async def wait_connected(self, seconds: float) -> None:
        """`Unsettled` after `seconds` without a connection."""
        if not self._connected.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._connected.wait()
            except TimeoutError:
                raise Unsettled(self._away()) from None

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener()` is called when the connection is lost; the answer removes it."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def new_inbox(self) -> str:
        return f"{self._inbox_root}.{secrets.token_hex(11)}"

    async def subscribe(self, subject: str, receive: Receiver) -> Subscription:
        """Hand every message on `subject` to `receive`, from now on; what comes while the connection is away is missed."""
        subscription = Subscription(self, subject, receive)
        self._subscriptions[id(subscription)] = subscription
        if self._client is not None and self.connected:
            with self._translated():
                await self._start(self._client, subscription)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.pop(id(subscription), None)
        if self.connected and subscription.current is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.current.unsubscribe()
        subscription.current = None  # it leads back here

    async def send(self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Hand a message to the connection; nobody says whether it arrived. `Unsettled` where there is no connection."""
        if self._client is None or not self.connected:
            raise Unsettled(self._away())
        self._unanswered.append(subject)
        with self._translated():
            await self._client.publish(subject, data, reply, headers)

    def raise_if_denied(self, subject: str) -> None:
        """`UsageError` where the server has refused a message on this subject: whoever sends without waiting asks here."""
        if subject in self._denied:
            raise UsageError(self._refusal("publish", subject), code=DENIED_CODE)

    async def post(
        self, subject: str, data: bytes, *, headers: dict[str, str] | None = None, series: list[Msg] | None = None
    ) -> asyncio.Future[Msg]:
        """Send a message that will be answered: the future is the answer, `Unsettled` (lost) or `UsageError` (refused).

        Whoever stops waiting cancels the future. Messages leave in the order of the calls. With a `series` answers without a
        status go there, and the future is the one that has one.
        """
        self._count += 1
        token = f"{self._count:x}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._pending[token] = (subject, future)
        if series is not None:
            self._series[token] = series
        future.add_done_callback(lambda done: self._forget(token, done))
        try:
            await self.send(subject, data, reply=f"{self._inbox}.{token}", headers=headers)
        except BaseException:
            future.cancel()
            raise
        return future

    async def request(self, subject: str, data: bytes, *, seconds: float, headers: dict[str, str] | None = None) -> Msg:
        """Send and wait for the answer. `Unsettled` after `seconds`, at a loss, or where nobody serves the subject."""
        self.raise_if_denied(subject)
        future = await self.post(subject, data, headers=headers)
        return await self.answer(future, subject, seconds)

    async def answer(self, future: asyncio.Future[Msg], subject: str, seconds: float) -> Msg:
        """The answer to a `post`, under the rules of `request`."""
        try:
            async with asyncio.timeout(seconds):  # not wait_for, which in 3.11 may swallow a cancellation
                reply = await future
        except TimeoutError:
            said = f"; the server said: {self.last_error}" if self.last_error else ""
            raise Unsettled(f"no answer on {subject} within {seconds:g} s{said}") from None
        if reply.headers and reply.headers.get("Status") == NO_RESPONDERS:
            raise Unsettled(f"nobody answers on {subject}: the stream is missing or starting", no_responders=True)
        return reply

    async def request_many(self, subject: str, data: bytes, arrived: list[Msg], *, seconds: float) -> Msg:
        """Send, and put the answers into `arrived` as they come; the status message that ends them. `Unsettled` where nothing
        more comes for `seconds`, and as for `request`; `arrived` then has what came before."""
        self.raise_if_denied(subject)
        future = await self.post(subject, data, series=arrived)
        try:
            while True:
                before = len(arrived)
                await asyncio.wait([future], timeout=seconds)
                if future.done():
                    return await self.answer(future, subject, seconds)
                if len(arrived) == before:
                    raise Unsettled(f"no more answers on {subject} within {seconds:g} s")
        finally:
            future.cancel()

    def _forget(self, token: str, done: asyncio.Future[Msg]) -> None:
        self._pending.pop(token, None)
        self._series.pop(token, None)
        if not done.cancelled():
            done.exception()  # looked at: an answer that nobody waits for any more needs no warning

    def _on_reply(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        if token in self._series and "Status" not in (message.headers or {}):
            self._series[token].append(message)
            return
        entry = self._pending.get(token)
        if entry is not None and not entry[1].done():
            entry[1].set_result(message)

    def _fail_pending(self, reason: str) -> None:
        for _, future in list(self._pending.values()):
            if not future.done():
                future.set_exception(Unsettled(reason))

    def _away(self) -> str:
        return f"the bus at {self.address} isn't there" + (f" ({self.last_error})" if self.last_error else "")

    @contextlib.contextmanager
    def _translated(self) -> Any:
        try:
            yield
        except nats.errors.BadSubjectError as error:
            raise UsageError(f"{error}", code="subject") from None
        except (nats.errors.Error, OSError) as error:
            raise Unsettled(f"{self._away()}: {error}") from None

    # Lives

    async def _connect(self) -> None:
        settings = self.settings
        self._denied.clear()
        client, known = new_client(settings), login(settings)
        client._parse_header_lines = parse_header_lines
        without_copies(client)
        try:
            async with asyncio.timeout(settings.connect_timeout_seconds):
                await client.connect(
                    self._servers, name=self.client_name, inbox_prefix=self._inbox_root.encode(), error_cb=self._on_error,
                    closed_cb=self._closed_callback(client), allow_reconnect=False, max_reconnect_attempts=1,
                    reconnect_time_wait=FIRST_DELAY_SECONDS, connect_timeout=settings.connect_timeout_seconds,
                    ping_interval=PING_SECONDS, max_outstanding_pings=2, pending_size=_NO_LIMIT,
                    **known,
                )  # fmt: skip
                without_queue(client, lambda sid: _receiver(client, sid))
                for subscription in list(self._subscriptions.values()):
                    await self._start(client, subscription)
                for _ in range(2):  # nats-py may take the answer to its first PING, when it's late, for the flush's
                    await client.flush(CLOSE_SECONDS)
                if not client.is_connected:
                    raise nats.errors.ConnectionClosedError
                if self._replies.subject in self._denied:  # no answer would ever come
                    await end(client)
                    raise UsageError(self._refusal("subscription", self._replies.subject), code=DENIED_CODE)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            reason = self.last_error if isinstance(error, nats.errors.NoServersError) and self.last_error else _one_line(error)
            await end(client)
            judge(self.address, reason)
            raise UnavailableError(
                f"the bus at {self.address} can't be reached: {reason}; start a nats-server there or correct bus.url",
                code="bus_unreachable",
            ) from None
        self._client = client
        self._lost.clear()
        self.last_error = None
        self._connected.set()

    async def _start(self, client: Client, subscription: Subscription) -> None:
        subscription.current = await client.subscribe(
            subscription.subject, cb=subscription.deliver, pending_msgs_limit=_NO_LIMIT, pending_bytes_limit=0
        )

    def _closed_callback(self, client: Client) -> Callable[[], Awaitable[None]]:
        async def closed() -> None:
            if self._client is client:
                self._note_loss()

        return closed

    def _note_loss(self) -> None:
        self._connected.clear()
        self._fail_pending(f"the connection to the bus at {self.address} was lost")
        for listener in list(self._listeners):
            listener()
        self._lost.set()

    async def _await_loss(self) -> None:
        """nats-py says that it has closed, but for one case: what it had still to send fails on the line that is dying, and ends
        its closing before the end. So its client is looked at, too."""
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._lost.wait()
            client = self._client
            if self.connected and client is not None and client.is_closed:
                _log.warning("bus_half_closed", address=self.address)
                await put_away(client)
                self._note_loss()

    async def _maintain(self) -> None:
        while True:
            await self._await_loss()
            delay = FIRST_DELAY_SECONDS
            while not self.connected:
                try:
                    await self._connect()
                except (UnavailableError, UsageError) as error:
                    self.last_error = error.message
                    await asyncio.sleep(delay * random.uniform(0.5, 1.5))
                    delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    async def _on_error(self, error: Exception) -> None:
        reason = _one_line(error)
        self.last_error = reason
        found = _DENIED.search(reason)
        if found is None:
            return
        verb, subject = found[1].lower(), self._spelt(found[2])
        told = False
        for sent_to, future in list(self._pending.values()):
            if not future.done() and (verb == "subscription" or sent_to == subject):
                future.set_exception(UsageError(self._refusal(verb, subject), code=DENIED_CODE))
                told = True
        known = subject in self._denied
        if len(self._denied) < _MOST_DENIED:
            self._denied.add(subject)
        if not (told or known):  # nobody waits for an answer that would bring the reason
            _log.error("bus_denied", reason=self._refusal(verb, subject))

    def _spelt(self, subject: str) -> str:
        """The subject as it was sent: nats-py tells it in lower case."""
        sent = [name for name, _ in self._pending.values()] + [held.subject for held in self._subscriptions.values()]
        return next((name for name in [*sent, *self._unanswered] if name.lower() == subject.lower()), subject)

    def _refusal(self, verb: str, subject: str) -> str:
        role, user = self.settings.acts_as, self.settings.user
        who = f"user {user}" if user else f"role {role}" if role else "this user"
        about = f"`towline access show {role}` tells what it may" if role else "see `towline access --help`"
        if ".STREAM.CREATE." in subject or ".STREAM.UPDATE." in subject:
            about = "streams are made by `towline init`, which comes first, and again after changed settings"
        may = "publish to" if verb == "publish" else "subscribe to"
        return f"the bus refuses {who} to {may} {subject}: {about}"


def _one_line(error: BaseException) -> str:
    return without_user(" ".join(str(error).split())) or type(error).__name__


def _receiver(client: Client, sid: int) -> Receiver | None:
    """Where messages of a subscription go: it was made with a `Subscription.deliver`."""
    found = client._subs.get(sid)
    return None if found is None else found._cb.__self__.receive
