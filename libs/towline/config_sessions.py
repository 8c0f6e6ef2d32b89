"""How long the gateway's sessions stand, how large they grow, and what a client of a claimed one may see and say."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from towline.config_loading import STRICT, Count, Positive


class SessionSettings(BaseModel):
    model_config = STRICT

    environment: Annotated[str, Field(min_length=1, max_length=200)] = "agent"
    """What tasks of lane session name as their environment; a claim may ask for it by this name."""
    claim_seconds: Annotated[float, Field(gt=0, le=43200)] = 600.0
    """A claimed session that nobody changes for so long is abandoned: its sample is asked for again. A claim may ask for less."""
    max_claims: Count = 4096
    """Claimed sessions at a time, of all clients and gateways."""
    max_turns: Count = 2048
    """Turns of one session over all its branches."""
    max_tokens: Count = 1 << 20
    """Tokens of one session over all its branches, prompts included."""
    show: tuple[str, ...] = ()
    """Keys of a task's reference that a claim's answer shows; the others are for the reward alone."""
    client_rewards: bool = False
    """Whether `finish` may say the reward (a tenant needs `may_reward` besides); else it's the reward service's alone."""
    keep_seconds: Positive = 5.0
    """How often each gateway looks over the claimed sessions: whose time is over is abandoned within this."""
