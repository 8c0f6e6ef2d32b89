"""The settings of the door for requests from outside: [gateway], its tenants and limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, model_validator

from towline.config_loading import STRICT, Count
from towline.config_servers import read_secret
from towline.config_sessions import SessionSettings
from towline.errors import UsageError

LEAST_TOKEN = 16
"""Characters of a tenant's token."""


class _Section(BaseModel):
    model_config = STRICT


class TenantSettings(_Section):
    token: SecretStr = SecretStr("")
    """The bearer token: at least 16 characters."""
    token_file: str = ""
    """A file that holds it, instead of its value here."""
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    """0: no limit."""
    concurrent: Annotated[int, Field(ge=0)] = 0
    """Requests at a time; 0: no limit."""
    sessions: Annotated[int, Field(ge=0)] = 0
    """Open sessions at a time; 0: no limit."""
    may_reward: bool = False
    """Where gateway.sessions.client_rewards allows it, this tenant's `finish` may say the reward."""

    @property
    def secret(self) -> str:
        """The token, by value or from its file. `UsageError` where the file's is too short."""
        token = read_secret(self.token_file, "gateway.tenants: token_file")
        if self.token_file and len(token) < LEAST_TOKEN:
            raise UsageError(f"{self.token_file}: a tenant's token has at least {LEAST_TOKEN} characters", code="tenant_token")
        return token or self.token.get_secret_value()

    @model_validator(mode="after")
    def _one(self) -> TenantSettings:
        token = self.token.get_secret_value()
        if bool(self.token_file) == bool(token):
            raise ValueError("give either token or token_file")
        if token and len(token) < LEAST_TOKEN:
            raise ValueError(f"use at least {LEAST_TOKEN} characters for token")
        return self


class GatewaySettings(_Section):
    host: str = "127.0.0.1"
    """Where the API listens; beyond loopback it needs tenants."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free one; it's logged and stands in the status as `api_port`."""
    tenants: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")], TenantSettings] = {}
    """Who may send requests; none: anybody who reaches it, on loopback."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Where gRPC is served beside HTTP (the extra `gateway`); 0: any free one, `grpc_port` in the status. Left out: nowhere."""
    tls_certificate: str = ""
    """PEM files, both or neither: the API is served over TLS, gRPC too."""
    tls_key: str = ""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Gateway processes that `towline up` starts."""
    ui: bool = True
    """The web view of the run under /ui, for the tenants' tokens; it reads the run only while somebody looks."""
    doors: bool = False
    """Rollout workers take requests from gateways; also where `replicas` > 0."""
    reserved_slots: Annotated[int, Field(ge=0)] = 0
    """Of each worker's slots: kept free of tasks, so that requests find room while the run trains."""
    most_slots: Annotated[int, Field(ge=0)] = 0
    """Of each worker's slots: what requests may take at a time; 0: all."""
    waiting: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait at one worker for a slot; more are refused as busy."""
    exact_hold_seconds: Annotated[float, Field(ge=0)] = 30.0
    """A worker puts off a newer version so long for running requests of an exact one."""
    chunk_tokens: Count = 16
    """Tokens that a stream brings at a time."""
    chunk_seconds: Annotated[float, Field(ge=0.5)] = 6.0
    """Silence of a replica after which its requests go on elsewhere; it gives a sign of life three times in it."""
    resume_seconds: Annotated[float, Field(ge=0)] = 30.0
    """How long a request that lost its replica waits for another one that may go on with it."""
    max_wait_seconds: Annotated[float, Field(ge=0)] = 120.0
    """The most that `Prefer: wait=N` gets."""
    max_body_bytes: Count = 4 << 20
    max_choices: Count = 64
    """Samples of one request: prompts times n."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """The most that a request may ask for; 0: what the model's context has room for."""
    sessions: SessionSettings = SessionSettings()

    @property
    def opens_doors(self) -> bool:
        return self.doors or self.replicas > 0

    @model_validator(mode="after")
    def _tls(self) -> GatewaySettings:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key go together: set both or neither")
        return self
