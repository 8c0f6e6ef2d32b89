"""Where a run's bus and store are, and as whom a process comes to them: secrets stand here by value or by reference."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, SecretStr

from towline.config_loading import STRICT, Count, Positive


class BusSettings(BaseModel):
    model_config = STRICT

    url: str = ""
    """nats://host:port[,…]; empty: `towline up` starts a server of its own."""
    user: str = ""
    password: SecretStr = SecretStr("")
    token: SecretStr = SecretStr("")
    credentials_file: str = ""
    budget_bytes: Annotated[int, Field(ge=64 << 20)] = 4 << 30
    """Storage that the run's streams reserve on the server, in all."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """Copies of each stream in a NATS cluster."""
    connect_timeout_seconds: Positive = 10.0
    max_in_flight_bytes: Count = 64 << 20


class StoreSettings(BaseModel):
    model_config = STRICT

    url: str = ""
    """s3://bucket/prefix or file:///path; empty: `towline up` starts an S3 server of its own."""
    endpoint: str = ""
    """http(s)://host:port of the S3 server; empty: AWS_ENDPOINT_URL, then Amazon's."""
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: SecretStr = SecretStr("")
    """Empty: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    timeout_seconds: Positive = 30.0
