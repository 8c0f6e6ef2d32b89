"""The gateway: one HTTP endpoint for the run's fleet. Several may run: they share nothing but the bus and the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from towline.bus.client import Bus
from towline.config import Settings
from towline.errors import MissingError, UnavailableError, UsageError
from towline.gateway.answers import unavailable
from towline.gateway.app import Api
from towline.gateway.calls import Calls
from towline.gateway.claims import Claims
from towline.gateway.claims_keeper import Keeper
from towline.gateway.desk import Desk
from towline.gateway.fleet import Fleet
from towline.gateway.idempotency import Ledger
from towline.gateway.model import load_model
from towline.gateway.plans import Planner
from towline.gateway.samples import Sampler
from towline.gateway.server import ApiServer
from towline.gateway.session_store import SessionStore
from towline.gateway.sessions import Sessions
from towline.gateway.tenants import Tenants
from towline.gateway.ui_routes import Ui
from towline.runtime.run_end import run_has_ended
from towline.runtime.service import Service
from towline.store.objects import ObjectStore
from towline.view.feed import BusFeed

if TYPE_CHECKING:
    from towline.gateway.grpc_server import GrpcServer

POLL_SECONDS = 0.25
END_POLL_SECONDS = 1.0
SWEEP_SECONDS = 3600.0


class GatewayService(Service):
    """Serves /generate and OpenAI's routes from the run's rollout workers (gateway.doors = true). Ends with the run."""

    name: ClassVar[str] = "gateway"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        mine = settings.gateway
        self._fleet = Fleet(bus, objects, settings.run.name, settings.rollout.poll_seconds)
        self._calls = Calls(bus, mine.chunk_seconds)
        self._sampler = Sampler(self._fleet, self._calls, chunk_tokens=mine.chunk_tokens, resume_seconds=mine.resume_seconds)
        self._ledger = Ledger(bus, objects, settings.run.name)
        self._model: Planner | None = None
        self._sessions = SessionStore(bus, objects, settings.run.name)
        desk, tenants = Desk(mine, self._sampler, self._ledger), Tenants(mine.tenants)
        self._claims = Claims(settings, bus=bus, store=self._sessions, fleet=self._fleet, metrics=self.metrics, replica=replica)
        sessions = Sessions(
            settings, bus=bus, store=self._sessions, claims=self._claims, desk=desk, fleet=self._fleet, planner=self._planner,
            metrics=self.metrics, replica=replica,
        )  # fmt: skip
        self._finisher = sessions.finisher
        self._keeper = Keeper(bus, self._sessions, self._claims, sessions.finisher, mine.sessions.keep_seconds)
        self.api = Api(
            settings, fleet=self._fleet, desk=desk, planner=self._planner, tenants=tenants, metrics=self.metrics,
            sessions=sessions, not_ready=self._not_ready,
        )  # fmt: skip
        app = self.api.app()
        self.ui: Ui | None = None
        if mine.ui:
            self.ui = Ui(BusFeed.of(bus, objects, settings, self._fleet.log), tenants, token_needed=bool(mine.tenants))
            app.router.routes.extend(self.ui.routes())
        self._server = ApiServer(app, mine)
        self._grpc = self._make_grpc(desk, tenants) if mine.grpc_port is not None else None

    @property
    def port(self) -> int:
        """The API's."""
        return self._server.port

    @property
    def grpc_port(self) -> int | None:
        """None where gRPC isn't served, or not yet."""
        return None if self._grpc is None else self._grpc.port

    def figures(self) -> Mapping[str, Any]:
        url = f"{'https' if self.settings.gateway.tls_key else 'http'}://{self.settings.gateway.host}:{self._server.port}"
        return {
            "api_port": self._server.port,
            "api_url": url,
            **({} if self.ui is None else {"ui_url": f"{url}/ui/"}),
            **({} if self.grpc_port is None else {"grpc_port": self.grpc_port}),
            "running": self.api.metering.running,
            "continued": self._sampler.continued,
            "trajectories": self._finisher.trajectories,
            "tokens": self._finisher.tokens,
            **({"claims_open": self._keeper.open} if self._claims.open else {}),
            "versions": {str(version): count for version, count in self._fleet.versions().items()},
        }

    async def run(self) -> None:
        async with anyio.create_task_group():
            pass  # what Starlette streams by: its first use imports it, and would hold up every request meanwhile
        await self._calls.start()
        await self._server.start()
        if self._grpc is not None:
            await self._grpc.start()
        self.log.info("api_listening", **{name: port for name, port in self.figures().items() if name.endswith("_port")})
        parts = [
            asyncio.create_task(part, name=name)
            for name, part in (
                ("fleet", self._fleet.run()), ("model", self._tell()), ("sweep", self._sweep()),
                *((("claims", self._claims.run()), ("keeper", self._keeper.run())) if self._claims.open else ()),
            )
        ]  # fmt: skip
        if self.ui is not None:
            parts.append(asyncio.create_task(self.ui.run(), name="ui"))
        ending = asyncio.create_task(self._until_end())
        try:
            done, _ = await asyncio.wait([*parts, ending], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.health.not_ready("draining")
            self._claims.drain()
            drains = max(self.settings.service.drain_seconds - 2.0, 0.5)
            await asyncio.gather(self._server.close(drains), *([self._grpc.close(drains)] if self._grpc is not None else []))
            for task in (*parts, ending):
                task.cancel()
            await asyncio.gather(*parts, ending, return_exceptions=True)
            await self._calls.close()

    def _make_grpc(self, desk: Desk, tenants: Tenants) -> GrpcServer:
        try:
            from towline.gateway.grpc_server import GrpcServer
        except ImportError as error:
            raise UsageError(
                f"gateway.grpc_port needs gRPC ({error}): pip install 'towline[gateway]', or leave it out", code="gateway_grpc"
            ) from None
        return GrpcServer(
            self.settings, fleet=self._fleet, desk=desk, planner=self._planner, tenants=tenants, metering=self.api.metering,
            not_ready=self._not_ready,
        )  # fmt: skip

    def _planner(self) -> Planner:
        if self._model is None:
            raise unavailable("the run's base model isn't in the store yet")
        return self._model

    def _not_ready(self) -> str | None:
        if self.draining.is_set():
            return "draining"
        if not self.bus.connected:
            return f"the bus is away: {self.bus.last_error}"
        if self._model is None:
            return "the run's base model isn't in the store yet"
        if not self._fleet.versions():
            return "no rollout worker serves a version"
        return None

    async def _tell(self) -> None:
        """Load the model once it's there, and say whether requests can be served."""
        while True:
            if self._model is None and 0 in self._fleet.lineage:
                with contextlib.suppress(UnavailableError, MissingError):
                    model = await asyncio.to_thread(load_model, self.objects, self._fleet.log)
                    with contextlib.suppress(UsageError):  # read now: the first request shouldn't wait for it
                        await asyncio.to_thread(model.encode, "")
                    self._model = Planner(self.settings, model)
            why = self._not_ready()
            if why is None:
                self.health.ready()
            else:
                self.health.not_ready(why)
            await asyncio.sleep(POLL_SECONDS)

    async def _until_end(self) -> None:
        while not self.draining.is_set():
            with contextlib.suppress(UnavailableError):
                if await run_has_ended(self.bus, self.settings.run.steps):
                    self.log.info("run_ended")
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_POLL_SECONDS):
                    await self.draining.wait()

    async def _sweep(self) -> None:
        """Delete what expired Idempotency-Keys and sessions left."""
        while True:
            try:
                if gone := await asyncio.to_thread(self._ledger.sweep):
                    self.log.info("idempotency_swept", objects=gone)
                if gone := await self._sessions.sweep():
                    self.log.info("sessions_swept", gone=gone)
            except UnavailableError as error:
                self.log.warning("unswept", reason=error.message)
            await asyncio.sleep(SWEEP_SECONDS)
