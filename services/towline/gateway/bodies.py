"""The request bodies, checked once: SGLang's /generate, OpenAI's completions and chat. Unknown fields are refused by name.

A field of theirs that Towline can't serve is accepted with the value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from towline.bus.topology import MAX_ATOMIC_MESSAGES
from towline.gateway.answers import ApiError, invalid
from towline.gateway.routing import Constraint
from towline.gateway.tool_calls import arguments_object

LARGEST_TOKEN = (1 << 31) - 1
LARGEST_SEED = (1 << 63) - 1
MOST_STOPS = 16


def _only(*values: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"only {' or '.join(str(one).lower() for one in values)} is supported")
        return value

    return check


def _sampled_alone(value: int) -> int:
    if value != 0:
        raise ValueError("the engines tell the sampled token's logprob alone, no other tokens': leave it out, or give 0")
    return value


def _kept(value: Any) -> Any:
    """As a record can keep it: MessagePack's integers have 64 bits."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"can't be kept: {error}") from None
    return value


NoPenalty = Annotated[float, AfterValidator(_only(0.0))]
One = Annotated[float, AfterValidator(_only(1.0))]
Off = Annotated[bool, AfterValidator(_only(False))]
Token = Annotated[int, Field(ge=0, le=LARGEST_TOKEN)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Seed = Annotated[int, Field(ge=-LARGEST_SEED, le=LARGEST_SEED)]
Version = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=LARGEST_TOKEN)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)]
StopTokens = Annotated[list[Token], Field(max_length=1000)]
B = TypeVar("B", bound="_Body")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=False)


class WeightVersion(_Body):
    """Which policy may serve the request; see docs/design/060-gateway.md."""

    min_version: Version | None = None
    exact_version: Version | None = None

    @model_validator(mode="after")
    def _one(self) -> WeightVersion:
        if self.min_version is not None and self.exact_version is not None:
            raise ValueError("give min_version or exact_version, not both")
        return self


class _Bound(_Body):
    weight_version: WeightVersion | None = None
    stream: bool = False

    @property
    def constraint(self) -> Constraint:
        wanted = self.weight_version or WeightVersion()
        return Constraint(min_version=wanted.min_version, exact_version=wanted.exact_version)


class SglangSampling(_Body):
    max_new_tokens: Count | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_TOKEN)] = -1
    stop: Stops | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    sampling_seed: Seed | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    min_p: NoPenalty = 0.0
    frequency_penalty: NoPenalty = 0.0
    presence_penalty: NoPenalty = 0.0
    repetition_penalty: One = 1.0
    min_new_tokens: NoPenalty = 0
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    stop_regex: None = None
    logit_bias: None = None
    custom_params: None = None


class GenerateBody(_Bound):
    """SGLang's request; one of `text` and `input_ids`."""

    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    input_ids: Tokens | Annotated[list[Tokens], Field(min_length=1)] | None = None
    sampling_params: SglangSampling | Annotated[list[SglangSampling], Field(min_length=1)] = SglangSampling()
    rid: Annotated[str, Field(max_length=200)] | list[Annotated[str, Field(max_length=200)]] | None = None
    return_logprob: bool = False
    logprob_start_len: Annotated[int, AfterValidator(_only(-1))] = -1
    top_logprobs_num: Annotated[int, AfterValidator(_sampled_alone)] = 0
    token_ids_logprob: None = None
    return_text_in_logprobs: bool = False
    incremental_streaming_output: bool = False
    """Each event of a stream holds only what is new; else all so far, as SGLang does."""
    session: Annotated[str, Field(max_length=200)] | None = None
    """Requests with the same go to the same replica while it has room."""
    extra_key: Annotated[str, Field(max_length=1000)] | None = None
    """SGLang's, for its caches; Towline keeps those of different versions apart by itself."""
    priority: int | None = None
    lora_path: None = None
    image_data: None = None
    return_hidden_states: Off = False

    @model_validator(mode="after")
    def _one(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids, and not both")
        prompts = self.input_ids if self.input_ids is not None else self.text
        many = isinstance(prompts, list) and (self.text is not None or isinstance(prompts[0], list))
        if isinstance(self.sampling_params, list) and (not many or len(self.sampling_params) != len(prompts or ())):
            raise ValueError("sampling_params is a list: give as many as there are prompts")
        return self


class _OpenAI(_Bound):
    model: Annotated[str, Field(max_length=200)]
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: Stops | None = None
    seed: Seed | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: NoPenalty | None = None
    presence_penalty: NoPenalty | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_TOKEN)] = -1
    """Not OpenAI's; as are the next three."""
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    """Each choice has `token_ids`, and with the first piece `prompt_token_ids`."""
    prompt_cache_key: Annotated[str, Field(max_length=200)] | None = None
    """Requests with the same go to the same replica while it has room."""


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Off = False


class CompletionBody(_OpenAI):
    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 and 1 alike: the sampled token's. Towline's engines tell no others."""
    echo: Off = False
    best_of: Annotated[int, AfterValidator(_only(1))] | None = None
    suffix: None = None


Kept = Annotated[dict[str, Any], AfterValidator(_kept)]
Tools = Annotated[list[Kept], Field(max_length=1000)]


class ToolFunction(BaseModel):
    name: Annotated[str, Field(max_length=200)]
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True) | {
            "function": {"name": self.function.name, "arguments": arguments_object(self.function.arguments)}
        }


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1000)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and (self.role != "assistant" or not self.tool_calls):
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    def plain(self) -> dict[str, Any]:
        """As every template takes it: content is a string, calls' arguments are objects."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        return found | {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}


class TextPart(_Body):
    type: Literal["text"]
    text: str


class _Chat(_OpenAI):
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, AfterValidator(_sampled_alone)] | None = None
    response_format: TextFormat | None = None
    parallel_tool_calls: Annotated[bool, AfterValidator(_only(True))] | None = None


class ChatBody(_Chat):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Tools | None = None
    """For the chat template; the calls in the answer's text are its `tool_calls`."""
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []


class TextFormat(_Body):
    type: Literal["text"]


class SessionMessage(BaseModel):
    """One message as clients keep it: an answer comes back as it was told, whatever else stands in it."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1000)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None

    @model_validator(mode="after")
    def _kept(self) -> SessionMessage:
        _kept(self.model_dump())
        return self

    def plain(self) -> dict[str, Any]:
        found = self.model_dump(exclude_none=True) | {"role": "system" if self.role == "developer" else self.role}
        return found | ({"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {})


class SessionBody(_Body):
    """A new session. `tools` are told once, in its first prompt; `chat_template_kwargs` go to the template in every turn."""

    tools: Tools | None = None
    chat_template_kwargs: Kept = {}
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None
    """Since its last change; the longest, a day, where it's left out."""


class ClaimBody(SessionBody):
    """A new session that is bound to an admitted sample; unchanged for `ttl_seconds` it's abandoned."""

    lane: Literal["session"] = "session"
    environment: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """What the client can do; a task for another one is left to others."""
    weight_version: WeightVersion | None = None
    """For turns that don't say what they accept."""

    @property
    def constraint(self) -> Constraint:
        wanted = self.weight_version or WeightVersion()
        return Constraint(min_version=wanted.min_version, exact_version=wanted.exact_version)


class SessionChatBody(_Chat):
    """A turn: the conversation whole, as OpenAI's clients send it. One answer."""

    messages: Annotated[list[SessionMessage], Field(min_length=1, max_length=10_000)]
    tools: Tools | None = None
    tool_choice: Literal["auto"] | None = None
    n: Annotated[int, AfterValidator(_only(1))] | None = None


class FinishBody(_Body):
    """The sample that the session becomes; without a group it's one of its own. A claimed session is its task's sample."""

    reference: Kept = {}
    group: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    sample: Annotated[int, Field(ge=0, lt=MAX_ATOMIC_MESSAGES)] = 0
    group_size: Annotated[int, Field(ge=1, le=MAX_ATOMIC_MESSAGES)] = 1
    node: Annotated[int, Field(ge=0, le=LARGEST_TOKEN)] | None = None
    """Whose branch is published; the head's where it's left out."""
    reward: float | None = None
    """Where the run lets its clients judge."""
    components: Annotated[dict[Annotated[str, Field(max_length=200)], float], Field(max_length=100)] = {}

    @model_validator(mode="after")
    def _within(self) -> FinishBody:
        if self.sample >= self.group_size:
            raise ValueError("sample: samples of a group are numbered from 0 to group_size - 1")
        if self.group is None and self.group_size > 1:
            raise ValueError("group: several samples need the name that they share")
        if self.components and self.reward is None:
            raise ValueError("components: give the reward that they are parts of")
        return self


for _model in (_OpenAI, _Chat, CompletionBody, ChatMessage, ChatBody, SessionMessage, SessionChatBody):
    _model.model_rebuild()


def parse(kind: type[B], data: bytes) -> B:
    """The body; 400 in one line that names the field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refused(error) from None


def check(kind: type[B], tree: dict[str, Any]) -> B:
    """The same of a body that came by another way than JSON."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    named = [f"{_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}" for item in faults]
    more = f" (and {len(named) - 3} more)" if len(named) > 3 else ""
    return invalid("; ".join(named[:3]) + more)


def _place(location: tuple[int | str, ...]) -> str:
    path = ".".join(str(part) for part in location)
    return f"{path}: " if path else ""
