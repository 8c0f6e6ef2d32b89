"""The web view of a run: its files under /ui/, what they show under /ui/api/. It only reads, and only while somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from towline.errors import MissingError, TowlineError, UsageError
from towline.gateway import ui_query
from towline.gateway.answers import ApiError, invalid, unavailable
from towline.gateway.tenants import Tenants, names_this_machine
from towline.gateway.ui_files import HEADERS, Files, unless_known
from towline.view import overview
from towline.view.browsing import Browser
from towline.view.feed import Feed
from towline.view.reading import Reading

_FIRST_READ_SECONDS = 2.0
"""The first question waits so long for something to have been read."""
_AGAIN_SECONDS = 5.0
_log = structlog.get_logger("towline.gateway")

Answer = Callable[[Mapping[str, str], Request], Awaitable[Any]]


class Ui:
    """`run` it beside the server. `tenants`: whose tokens open it; where nobody needs one, only this machine's names do."""

    def __init__(self, feed: Feed, tenants: Tenants, *, token_needed: bool) -> None:
        self.reading = Reading(feed)
        self._browser = Browser(self.reading)
        self._tenants, self._token_needed = tenants, token_needed
        self._files = Files()
        self._cached: dict[str, tuple[object, bytes]] = {}

    async def run(self) -> None:
        """For ever, whatever happens: requests are served beside it."""
        while True:
            try:
                await self.reading.run()
                await asyncio.Event().wait()  # a bundle is read once
            except Exception as error:  # noqa: BLE001 — a fault of ours: it's said, and ends no gateway
                _log.error("ui_failed", exc_info=error)
                self.reading.problem = f"{type(error).__name__}: see the log"
                self.reading.begun.set()
                await asyncio.sleep(_AGAIN_SECONDS)

    def routes(self) -> list[Route]:
        answers: dict[str, Answer] = {
            "overview": self._overview, "curves": self._curves, "versions": self._versions, "replicas": self._replicas,
            "trajectories": self._trajectories, "trajectories/{sample}": self._trajectory, "dead": self._letters,
            "dead/{letter}": self._letter,
        }  # fmt: skip
        return [
            Route("/", _moved("ui/"), methods=["GET"]),
            Route("/ui", _moved("ui/"), methods=["GET"]),
            *(Route(f"/ui/api/{path}", self._api(answer), methods=["GET"]) for path, answer in answers.items()),
            Route("/ui/{name:path}", self._file, methods=["GET"]),
        ]

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name.startswith("api/"):
            return _fault(ApiError(404, "not_found", f"{request.url.path}: no such question"))
        return self._files.answer(request, name or "index.html")

    def _api(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            try:
                self._admit(request)
                await self._begun()
                found = await answer(request.query_params, request)
            except ApiError as error:
                return _fault(error)
            except MissingError as error:
                return _fault(ApiError(404, "not_found", error.message))
            except UsageError as error:
                return _fault(invalid(error.message))
            except TowlineError as error:
                _log.warning("ui_unanswered", route=request.url.path, reason=error.message)
                return _fault(unavailable(error.message))
            data = found if isinstance(found, bytes) else msgspec.json.encode(found)
            return unless_known(request, data, {"Content-Type": "application/json", "Cache-Control": "no-cache, private"})

        return respond

    def _admit(self, request: Request) -> None:
        """Its token; where none is needed, a name of this machine: a page elsewhere whose name was pointed here has another."""
        self._tenants.of(request.headers.get("authorization", ""))
        if not self._token_needed and not names_this_machine(request.headers.get("host", "")):
            raise ApiError(403, "permission_error", "without gateway.tenants the view answers to localhost alone: open it there")

    async def _begun(self) -> None:
        self.reading.asked()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_READ_SECONDS):
                await self.reading.begun.wait()

    def _once(self, name: str, make: Callable[[], Any]) -> bytes:
        """Made once for what was read, however many look."""
        mark = (self.reading.revision, self.reading.problem, self.reading.feed.source.log.next_number)
        known = self._cached.get(name)
        if known is None or known[0] != mark:
            self._cached[name] = known = (mark, msgspec.json.encode(make()))
        return known[1]

    async def _overview(self, query: Mapping[str, str], request: Request) -> bytes:
        return self._once("overview", lambda: overview.overview(self.reading))

    async def _curves(self, query: Mapping[str, str], request: Request) -> bytes:
        return self._once("curves", lambda: overview.curves(self.reading))

    async def _replicas(self, query: Mapping[str, str], request: Request) -> bytes:
        return self._once("replicas", lambda: overview.replicas(self.reading))

    async def _versions(self, query: Mapping[str, str], request: Request) -> Any:
        return overview.versions(self.reading, before=ui_query.whole(query, "before"), limit=ui_query.limit(query, 50))

    async def _trajectories(self, query: Mapping[str, str], request: Request) -> Any:
        wanted = ui_query.sample_filter(query)
        return await self._browser.trajectories(
            wanted, environment=query.get("environment") or None, limit=ui_query.limit(query, 50)
        )

    async def _trajectory(self, query: Mapping[str, str], request: Request) -> Any:
        return await self._browser.trajectory(*ui_query.sample_named(request.path_params["sample"]))

    async def _letters(self, query: Mapping[str, str], request: Request) -> Any:
        return self._browser.letters(
            before=ui_query.whole(query, "before"), stage=query.get("stage") or None, limit=ui_query.limit(query, 50)
        )

    async def _letter(self, query: Mapping[str, str], request: Request) -> Any:
        number = ui_query.whole(request.path_params, "letter")
        return await self._browser.letter(number or 0)


def standing_alone(feed: Feed) -> tuple[Starlette, Ui]:
    """The view by itself, for loopback; its `run` is the caller's."""
    ui = Ui(feed, Tenants({}), token_needed=False)
    return Starlette(routes=ui.routes()), ui


def _fault(error: ApiError) -> Response:
    response = error.response()
    response.headers.update({**HEADERS, "Cache-Control": "no-store"})
    return response


def _moved(where: str) -> Callable[[Request], Awaitable[Response]]:
    """Relative, so that it holds behind a proxy's prefix."""

    async def respond(request: Request) -> Response:
        return RedirectResponse(where, 307, HEADERS)

    return respond
