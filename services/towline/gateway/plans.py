"""From a checked body to the samples that are to be drawn: prompts as tokens, sampling, seeds. It may block."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import xxhash

from towline.config import Settings
from towline.contract.task import SamplingParams
from towline.gateway.answers import ApiError, invalid
from towline.gateway.bodies import ChatBody, CompletionBody, GenerateBody, SessionChatBody, SglangSampling
from towline.gateway.jobs import Choice, Wording
from towline.gateway.model import Model
from towline.gateway.routing import Constraint
from towline.gateway.samples import Ask, Sample
from towline.gateway.tool_calls import Reader, form_of, tool_names, written
from towline.session.boundary import Boundary
from towline.session.families import boundary_of
from towline.session.spelling import Tokenizer

MOST_BOUNDARIES = 64
"""Proven ones that are kept, by their template variables; those of longer ones are proved each time."""
MOST_KEPT_CHARACTERS = 4096
_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request wants: `n` samples of each prompt, under the prompt's own sampling and wording."""

    prompts: list[list[int]]
    samplings: list[SamplingParams]
    wordings: list[Wording]
    n: int
    constraint: Constraint
    seed: int
    session: str | None
    model: str = ""

    def choices(self, prompts: list[list[int]], seed: int, wait_seconds: float, samples: list[Sample]) -> list[Choice]:
        """In the order of the answer. `samples`: what stands of each already, or nothing at all."""
        found = []
        for index in range(len(prompts) * self.n):
            at = index // self.n
            ask = Ask(
                prompt=prompts[at], sampling=self.samplings[at], seed=choice_seed(seed, index), constraint=self.constraint,
                wait_seconds=wait_seconds, session=self.session,
            )  # fmt: skip
            found.append(Choice(index, ask, samples[index] if samples else Sample(), self.wordings[at]))
        return found


def choice_seed(seed: int, index: int) -> int:
    """The first choice has the request's own seed."""
    return seed if index == 0 else xxhash.xxh3_64_intdigest(f"{seed}/{index}".encode()) & _SEED_BITS


class Planner:
    """Makes plans for one run."""

    def __init__(self, settings: Settings, model: Model) -> None:
        self._settings, self._model = settings, model
        own = settings.sampling.stop_token_ids
        self._stops = model.stop_token_ids if own is None else own
        self._boundaries: dict[str, Boundary] = {}

    def generate(self, body: GenerateBody) -> Plan:
        prompts = self._prompts(body.input_ids if body.input_ids is not None else body.text)
        params = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
        if len({(one.n, one.sampling_seed) for one in params}) > 1:
            raise invalid("sampling_params: n and sampling_seed must be the same for all prompts of a request")
        return self._plan(
            prompts, [self._sampling(one, one.max_new_tokens, prompt) for one, prompt in zip(params, prompts, strict=True)],
            [self._wording(one) for one in params], params[0].n, body.constraint, params[0].sampling_seed, body.session,
        )  # fmt: skip

    def completion(self, body: CompletionBody, constraint: Constraint) -> Plan:
        return self._openai(body, self._prompts(body.prompt), body.max_tokens, constraint)

    def chat(self, body: ChatBody, constraint: Constraint) -> Plan:
        messages = [message.plain() for message in body.messages]
        tools = body.callable_tools
        prompt = self._model.render(messages, body.chat_template_kwargs | ({"tools": tools} if tools else {}))
        if not prompt:
            raise invalid("messages: the chat template made an empty prompt of them")
        return self._showing_calls(self._openai(body, [prompt], _most(body), constraint), tools)

    def calls(self, tools: Sequence[Any] | None) -> Reader | None:
        """What finds tool calls in an answer's text; None where no tools were told, or the family's form isn't known."""
        form = form_of(self._model.tokenizer) if tools else None
        return None if form is None else Reader(form, tool_names(tools))

    def otherwise(self, text: str, tools: Sequence[Any] | None) -> dict[str, Any]:
        """How else a client may write an answer: the calls in its text taken out, with or without the text. For sessions, which
        compare what comes back. Empty where there are none."""
        form = form_of(self._model.tokenizer)
        parsed = None if form is None else form.parse(text, tool_names(tools))
        if parsed is None:
            return {}
        calls, raw = written(parsed, ""), {"role": "assistant", "content": text}
        return {"otherwise": [raw, raw | {"tool_calls": calls}, raw | {"content": parsed.content, "tool_calls": calls}]}

    def turn(
        self, body: SessionChatBody, prompt: list[int], constraint: Constraint, session: str, tools: Sequence[Any] | None = None
    ) -> Plan:
        """Of a session: `prompt` is the path that stands, token by token; `tools` were told in it."""
        plan = self._openai(body, [prompt], _most(body), constraint)
        return replace(self._showing_calls(plan, tools), session=session)

    def _showing_calls(self, plan: Plan, tools: Sequence[Any] | None) -> Plan:
        if (reader := self.calls(tools)) is None:
            return plan
        named = {self._model.token(mark): mark for mark in reader.form.kept}
        kept = {token: mark for token, mark in named.items() if token is not None}
        return replace(plan, wordings=[replace(wording, kept=kept) for wording in plan.wordings])

    def text(self, tokens: list[int]) -> str | None:
        """The tokens' text, special ones too; None where the model has no tokenizer."""
        tokenizer = self._model.tokenizer
        return None if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=False))

    def boundary(self, variables: Mapping[str, Any]) -> Boundary:
        """The model's, for sessions with these template variables; `UsageError` where there can be none."""
        self._model.encode("")
        key = json.dumps(variables, sort_keys=True)
        if (found := self._boundaries.get(key)) is None:
            found = boundary_of(cast(Tokenizer, self._model.tokenizer), self._stops, variables)
            if len(self._boundaries) >= MOST_BOUNDARIES:
                self._boundaries.clear()
            if len(key) <= MOST_KEPT_CHARACTERS:
                self._boundaries[key] = found
        return found

    def _openai(
        self,
        body: CompletionBody | ChatBody | SessionChatBody,
        prompts: list[list[int]],
        most: int | None,
        constraint: Constraint,
    ) -> Plan:
        params = SglangSampling(
            temperature=1.0 if body.temperature is None else body.temperature, top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k, stop=body.stop, stop_token_ids=body.stop_token_ids, ignore_eos=body.ignore_eos,
        )  # fmt: skip
        wording = self._wording(params)
        if wording.tokenizer is None:
            self._model.encode("")  # says what is missing
        return self._plan(
            prompts, [self._sampling(params, most, prompt) for prompt in prompts], [wording] * len(prompts), body.n or 1,
            constraint, body.seed, body.prompt_cache_key,
        )  # fmt: skip

    def _plan(
        self,
        prompts: list[list[int]],
        samplings: list[SamplingParams],
        wordings: list[Wording],
        n: int,
        constraint: Constraint,
        seed: int | None,
        session: str | None,
    ) -> Plan:
        most = self._settings.gateway.max_choices
        if len(prompts) * n > most:
            raise invalid(
                f"{len(prompts)} prompts with {n} samples each are over gateway.max_choices = {most}; send less at a time"
            )
        chosen = secrets.randbits(63) if seed is None else seed
        return Plan(
            prompts=prompts, samplings=samplings, wordings=wordings, n=n, constraint=constraint, seed=chosen, session=session
        )

    def _prompts(self, given: Any) -> list[list[int]]:
        if isinstance(given, str):
            given = [given]
        if isinstance(given[0], int):
            given = [given]
        found = [self._model.encode(one) if isinstance(one, str) else list(one) for one in given]
        if not all(found):
            raise invalid("an empty prompt: give at least one token")
        return found

    def _sampling(self, params: SglangSampling, wanted: int | None, prompt: list[int]) -> SamplingParams:
        settings, most = self._settings, self._settings.gateway.max_tokens
        room = settings.rollout.max_context_tokens - len(prompt)
        if room < 1:
            raise invalid(
                f"a prompt of {len(prompt)} tokens leaves no room in rollout.max_context_tokens = "
                f"{settings.rollout.max_context_tokens}"
            )
        count = min(settings.sampling.max_tokens, room) if wanted is None else wanted
        if count > room:
            raise invalid(
                f"{len(prompt)} tokens and up to {count} more are over the context of {settings.rollout.max_context_tokens}"
            )
        if most and count > most:
            raise invalid(f"{count} tokens are over gateway.max_tokens = {most}")
        stops = () if params.ignore_eos else self._stops
        return SamplingParams(
            max_tokens=count, temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0),
            stop_token_ids=tuple(dict.fromkeys((*stops, *(params.stop_token_ids or ())))),
        )  # fmt: skip

    def _wording(self, params: SglangSampling) -> Wording:
        stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
        if stops and self._model.tokenizer is None:
            self._model.encode("")
        return Wording(
            tokenizer=self._model.tokenizer, stops=stops, skip_special_tokens=params.skip_special_tokens,
            keep_stop=params.no_stop_trim,
        )  # fmt: skip


def _most(body: ChatBody | SessionChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("give max_completion_tokens or max_tokens, not both")
    return body.max_completion_tokens or body.max_tokens


def bound_model(name: str, run: str, constraint: Constraint) -> Constraint:
    """`model` is the run's name, or RUN@VERSION, which is the same as `exact_version`; 404 for another."""
    if name == run:
        return constraint
    base, _, version = name.rpartition("@")
    if base != run or not version.isascii() or not version.isdigit() or len(version) > 18:
        raise ApiError(404, "model_not_found", f"model {name[:100]!r}: use {run!r}, or '{run}@VERSION' for exactly that version")
    if constraint.target is not None and constraint.exact_version != int(version):
        raise invalid(f"model {name!r} and weight_version name different versions: give one of them")
    return Constraint(exact_version=int(version))


Make = Callable[[], Plan]
