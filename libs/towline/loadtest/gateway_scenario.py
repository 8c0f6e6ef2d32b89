"""`[load.gateway]`: who asks the gateway, how, and how much."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class GatewayLoad(BaseModel):
    """Each part that has a number is measured by itself, one after the other, for load.measure_seconds each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = ()
    """Gateways that are there already, by their base URLs; then nothing is started here, and their processes aren't looked at."""
    model: str = ""
    """What a deployed gateway's run is called; run.name where it's left out."""
    gateways: Count = 1
    """Processes that are started here; clients are spread over them."""
    clients: Count = 32
    """The closed loop's: each sends its next request when it has the answer."""
    streamed: Share = 0.5
    """Of the requests."""
    output_tokens: Count = 128
    """`max_tokens` of a request; the engines' lengths are theirs (rollout.arguments)."""
    timeout_seconds: Positive = 60.0
    rounds: Annotated[int, Field(ge=0)] = 3
    """Of the closed loop, in turn with the engine alone where `bare`."""
    bare: bool = True
    """Beside the gateway the same requests go to a synthetic engine behind nothing but HTTP."""
    rates: tuple[Positive, ...] = ()
    """Open loop: requests a second, whatever the gateway does; latencies count from the intended time."""
    sessions: Annotated[int, Field(ge=0)] = 0
    """Clients that hold sessions of `turns`, one after the other."""
    turns: Count = 4
    claims: bool = False
    """Their sessions are claimed tasks (buffer.session_groups), and become trajectories of the run."""
    tenants: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")], Count] = {}
    """Clients of each, all at the same time. Limits are gateway.tenants'; a tenant that isn't there gets a token and no limit."""
    idle_streams: Annotated[int, Field(ge=0)] = 0
    """Open while the closed loop runs, saying nothing."""
    grpc: bool = False
    """The closed loop by gRPC's StreamGenerate too."""
