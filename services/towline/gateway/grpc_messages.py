"""The messages of rollout.proto and the gateway's own forms of them. Requests are checked by the same model as HTTP's."""

from __future__ import annotations

from typing import Any

from towline.gateway.answers import invalid
from towline.gateway.bodies import GenerateBody, check
from towline.gateway.jobs import Choice, Job
from towline.gateway.samples import SampleFinish
from towline.pb import rollout_pb2 as pb

_FINISH: dict[SampleFinish | None, pb.FinishReason.ValueType] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "superseded": pb.FINISH_REASON_SUPERSEDED,
}
_THEIRS = {"seed": "sampling_seed", "keep_stop": "no_stop_trim"}
"""What /generate calls some fields."""


def body_of(request: pb.GenerateRequest) -> GenerateBody:
    """400 (an ApiError) where HTTP's /generate would refuse it."""
    kinds = {prompt.WhichOneof("kind") for prompt in request.prompts}
    if len(kinds) != 1 or None in kinds:
        raise invalid("prompts: give at least one, each with tokens, or each with text")
    params: dict[str, Any] = {
        _THEIRS.get(field.name, field.name): list(value) if field.name.startswith("stop") else value
        for field, value in request.sampling.ListFields()
    }
    tree: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
    if kinds == {"tokens"}:
        tree["input_ids"] = [list(prompt.tokens.ids) for prompt in request.prompts]
    else:
        tree["text"] = [prompt.text for prompt in request.prompts]
    if (bound := request.weight_version.WhichOneof("bound")) is not None:
        tree["weight_version"] = {bound: getattr(request.weight_version, bound)}
    if request.session:
        tree["session"] = request.session
    return check(GenerateBody, tree)


def identity(request: pb.GenerateRequest) -> bytes:
    """What an idempotency key stands for: everything but how long the caller would wait."""
    same = pb.GenerateRequest()
    same.CopyFrom(request)
    same.ClearField("wait_seconds")
    return same.SerializeToString(deterministic=True)


def sample_of(choice: Choice, job: Job, *, start: int = 0, text_start: int = 0) -> pb.Sample:
    """All of it, or what stands from token `start` and character `text_start` on."""
    first, last = choice.versions
    found = pb.Sample(
        index=choice.index, id=f"{job.name}-{choice.index}", start=start, tokens=choice.sample.tokens[start : choice.seen],
        logprobs=choice.sample.logprobs[start : choice.seen], finish=_FINISH[choice.finish], seed=choice.ask.seed,
        prompt_tokens=len(choice.ask.prompt), weight_version_start=first, weight_version_end=last,
        spans=[
            pb.VersionSpan(start=max(span.start, start), end=span.end, version=span.version, cut=span.cut)
            for span in choice.spans
            if span.end > start
        ],
    )  # fmt: skip
    if choice.wording.tokenizer is not None:
        found.text = choice.text[text_start:]
    if isinstance(choice.matched, int):
        found.matched_token = choice.matched
    elif choice.matched is not None:
        found.matched_stop = choice.matched
    return found


class News:
    """A stream's events: of each sample what hasn't been told."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._told: dict[int, tuple[int, int]] = {}

    def event(self, moved: list[Choice]) -> pb.GenerateEvent:
        event = pb.GenerateEvent()
        for choice in moved:
            start, text_start = self._told.get(choice.index, (0, 0))
            event.samples.append(sample_of(choice, self._job, start=start, text_start=text_start))
            self._told[choice.index] = (choice.seen, len(choice.text))
        return event
