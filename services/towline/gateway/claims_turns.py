"""What a task means for its session's turns: its sampling is theirs, its seed gives each of them one, its tokens bound them."""

from __future__ import annotations

from typing import Any

import xxhash

from towline.config import Settings
from towline.contract.task import Task
from towline.gateway.answers import invalid
from towline.gateway.bodies import LARGEST_SEED, SessionChatBody
from towline.gateway.plans import Planner
from towline.gateway.session_store import Held, conflict
from towline.session.tree import Place, Session


def claimed(held: Held, planner: Planner, settings: Settings) -> dict[str, Any]:
    """What a claim's client is told. It may block."""
    task = held.content.task
    assert task is not None
    prompt = task.prompt_tokens.tolist()
    return {
        "id": held.id, "expires_at": held.entry.expires_at, "base_url": f"/sessions/{held.id}/v1", "model": settings.run.name,
        "prompt": prompt, "prompt_text": planner.text(prompt),
        "reference": {key: task.reference[key] for key in settings.gateway.sessions.show if key in task.reference},
        "sampling": {
            "max_tokens": task.sampling.max_tokens, "temperature": task.sampling.temperature, "top_p": task.sampling.top_p,
            "top_k": task.sampling.top_k,
        },
        **task_of(held),
    }  # fmt: skip


def task_of(held: Held) -> dict[str, Any]:
    """The task that a session is bound to, without what only the reward may see; nothing of one that isn't bound."""
    task, claim = held.content.task, held.content.claim
    if task is None or claim is None:
        return {}
    return {
        "task": {
            "task_sequence": claim.task_sequence, "lane": task.lane, "environment": task.environment, "group": task.group,
            "sample": task.sample, "group_size": task.group_size, "attempt": task.attempt, "seed": task.seed,
            "not_before_depth": task.not_before_depth, "deadline": task.deadline,
        }
    }  # fmt: skip


def bind(body: SessionChatBody, task: Task) -> None:
    """The task's sampling in place of what the body leaves out; 400 where it asks for another: a sample has one."""
    sampling = task.sampling
    for name, given in (
        ("temperature", body.temperature),
        ("top_p", body.top_p),
        ("top_k", None if body.top_k <= 0 else body.top_k),
    ):
        own = getattr(sampling, name)
        if given not in (None, own):
            raise invalid(f"{name}: the session's task samples at {own:g}; leave it out")
    body.temperature, body.top_p, body.top_k = sampling.temperature, sampling.top_p, sampling.top_k or -1


def left_of(session: Session, place: Place, head: int, task: Task, body: SessionChatBody, context: int) -> None:
    """Bound the turn at `place` by the tokens that are left of the task's and, where the body names no number, of the `context`;
    and give it its seed. 409 where none is left.

    `head` is the session's before: a turn that stands there is repeated with the seed that it had, and after a rollback the next
    try gets another one.
    """
    used = sum(len(session.nodes[number].tokens) for number in session.path(place.node) if session.nodes[number].kind == "policy")
    left = task.sampling.max_tokens - used
    if left < 1:
        raise conflict(f"the session has sampled the {task.sampling.max_tokens} tokens that its task has: finish it")
    room = context - len(place.prompt)
    if room < 1:
        raise conflict(f"the session has reached the context of {context} tokens: finish it")
    most = body.max_completion_tokens or body.max_tokens or room
    body.max_tokens, body.max_completion_tokens = min(left, most), None
    if body.seed is None:
        tries = [number for number, node in enumerate(session.nodes) if node.parent == place.node and node.kind == "policy"]
        count = len(tries) - (head in tries)
        body.seed = xxhash.xxh3_64_intdigest(f"{task.seed}/{place.node}/{count}".encode()) & LARGEST_SEED
