"""Answers as SGLang and OpenAI write them, with the versions that served each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from towline.errors import MissingError
from towline.gateway.bodies import ChatBody, CompletionBody, GenerateBody, SessionChatBody
from towline.gateway.jobs import Choice, Job
from towline.gateway.tool_calls import Reader
from towline.store.lineage import Lineage


def spans_of(choice: Choice, start: int = 0) -> list[list[Any]]:
    """[start, end, version, cut] of the tokens from `start` on, counted from the sample's first."""
    return [[max(span.start, start), span.end, span.version, span.cut] for span in choice.spans if span.end > start]


def bounds(choices: Iterable[Choice], lineage: Lineage) -> dict[str, int | None]:
    """The version with the least depth that a choice began with, and the one with the greatest that one ended with."""
    starts, ends = zip(*(choice.versions for choice in choices), strict=True)

    def depth(version: int) -> tuple[int, int]:
        try:
            return lineage.depth(version), version
        except MissingError:  # newer than what was read of the LOG
            return version, version

    return {
        "weight_version_start": min((one for one in starts if one is not None), key=depth, default=None),
        "weight_version_end": max((one for one in ends if one is not None), key=depth, default=None),
    }


def generated(choice: Choice, job: Job, body: GenerateBody, *, start: int = 0, text_start: int = 0) -> dict[str, Any]:
    """SGLang's answer for one sample: all of it, or what stands from token `start` and character `text_start` on."""
    first, last = choice.versions
    rid = body.rid[choice.index] if isinstance(body.rid, list) and choice.index < len(body.rid) else body.rid
    meta: dict[str, Any] = {
        "id": rid if isinstance(rid, str) else f"{job.name}-{choice.index}",
        "finish_reason": _sglang_finish(choice),
        "prompt_tokens": len(choice.ask.prompt),
        "completion_tokens": choice.seen,
        "cached_tokens": 0,
        "weight_version": None if first is None else str(first),
        "weight_version_start": first,
        "weight_version_end": last,
        "weight_versions": [{"version": str(span.version), "start": span.start, "end": span.end} for span in choice.spans],
        "spans": spans_of(choice, start),
        "seed": choice.ask.seed,
    }
    if body.return_logprob:
        decode = choice.wording.tokenizer.decode if body.return_text_in_logprobs and choice.wording.tokenizer else None
        meta["output_token_logprobs"] = [
            [logprob, token, decode([token], skip_special_tokens=False) if decode else None]
            for token, logprob in zip(choice.sample.tokens[start : choice.seen], choice.sample.logprobs[start:], strict=False)
        ]
        meta["input_token_logprobs"] = []
    answer: dict[str, Any] = {"output_ids": choice.sample.tokens[start : choice.seen], "meta_info": meta}
    if choice.wording.tokenizer is not None:
        answer["text"] = choice.text[text_start:]
    return answer


def _sglang_finish(choice: Choice) -> dict[str, Any] | None:
    match choice.finish:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": choice.matched}
        case "length":
            return {"type": "length", "length": choice.ask.sampling.max_tokens}
        case _:
            message = "superseded: the replicas left the versions that the request accepts"
            return {"type": "abort", "message": message, "status_code": 409, "err_type": "superseded"}


def usage(job: Job) -> dict[str, int]:
    asks = {id(choice.ask.prompt): len(choice.ask.prompt) for choice in job.choices}
    prompt, completion = sum(asks.values()), job.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class OpenAIFormat:
    """The answer to one request, whole or as a stream's pieces; `chat` or completion. `calls` finds tool calls in the text."""

    def __init__(
        self, body: CompletionBody | ChatBody | SessionChatBody, job: Job, lineage: Lineage, calls: Reader | None = None
    ) -> None:
        self._body, self._job, self._lineage, self._calls = body, job, lineage, calls
        self._chat = not isinstance(body, CompletionBody)
        self._told: dict[int, tuple[int, int]] = {}
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        choices = []
        for choice in self._job.choices:
            said: dict[str, Any] = {"text": choice.text}
            if self._chat:
                said = {"message": {**self.message(choice), "refusal": None}}
            choices.append({"index": choice.index, **said, **self._common(choice, 0, 0)})
        return {**self._head(kind), "choices": choices, "usage": usage(self._job), **bounds(self._job.choices, self._lineage)}

    def pieces(self, moved: list[Choice]) -> list[dict[str, Any]]:
        """The stream's next events."""
        found = []
        for choice in moved:
            start, text_start = self._told.get(choice.index, (-1, 0))
            if self._chat and start < 0:
                found.append(self._piece(choice, {"role": "assistant", "content": ""}, None, 0, 0))
            text = self._told_text(choice)
            new = text[text_start:]
            delta: dict[str, Any] = {"content": new} if new or choice.finish is None else {}
            if choice.finish is not None and (called := self.message(choice).get("tool_calls")):
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(called)]
            found.append(self._piece(choice, delta, new, max(start, 0), text_start))
            self._told[choice.index] = (choice.seen, len(text))
        return found

    def message(self, choice: Choice) -> dict[str, Any]:
        """What the choice says, as a message."""
        if self._calls is None:
            return {"role": "assistant", "content": choice.text}
        return self._calls.message(choice.text, f"{self._job.name}/{choice.index}")

    def _told_text(self, choice: Choice) -> str:
        """What of the text a stream has told by now: nothing that may turn out to be a call."""
        if self._calls is None:
            return choice.text
        if choice.finish is None:
            return choice.text[: self._calls.form.plain_until(choice.text)]
        return self.message(choice)["content"] or ""

    async def keep(self) -> None:
        """Awaited before the end of an answer is told."""

    def last_piece(self) -> dict[str, Any] | None:
        """The usage, where it was asked for."""
        if not self._with_usage:
            return None
        return {
            **self._head(self._stream_kind),
            "choices": [],
            "usage": usage(self._job),
            **bounds(self._job.choices, self._lineage),
        }

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _piece(self, choice: Choice, delta: dict[str, Any], text: str | None, start: int, text_start: int) -> dict[str, Any]:
        head = self._head(self._stream_kind)
        if text is None:  # the role alone
            common: dict[str, Any] = {"finish_reason": None, "logprobs": None}
        else:
            common = self._common(choice, start, text_start)
        said = {"delta": delta} if self._chat else {"text": text or ""}
        piece = {**head, "choices": [{"index": choice.index, **said, **common}], **bounds([choice], self._lineage)}
        if self._with_usage:
            piece["usage"] = None
        return piece

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.name, "object": kind, "created": self._job.created, "model": self._body.model}

    def _common(self, choice: Choice, start: int, text_start: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "finish_reason": self._finish(choice),
            "logprobs": self._logprobs(choice, start, text_start),
            "weight_version_spans": spans_of(choice, start),
        }
        if self._body.return_token_ids:
            found["token_ids"] = choice.sample.tokens[start : choice.seen]
            if start == 0:
                found["prompt_token_ids"] = choice.ask.prompt
        return found

    def _finish(self, choice: Choice) -> str | None:
        called = self._calls is not None and choice.finish == "stop" and self._calls.parse(choice.text) is not None
        return "tool_calls" if called else choice.finish

    def _logprobs(self, choice: Choice, start: int, text_start: int) -> dict[str, Any] | None:
        wanted = self._body.logprobs
        if wanted is None or wanted is False:
            return None
        tokens, logprobs = choice.sample.tokens[start : choice.seen], choice.sample.logprobs[start : choice.seen]
        words = [choice.wording.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        if self._chat:
            content = [
                {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
                for word, logprob in zip(words, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, at = [], text_start
        for word in words:
            offsets.append(at)
            at += len(word)
        return {"tokens": words, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
