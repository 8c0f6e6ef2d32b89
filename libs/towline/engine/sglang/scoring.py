"""The logprobs of given tokens, asked of a server: the probe's."""

from __future__ import annotations

from towline.engine.sglang.client import SglangClient
from towline.errors import EngineError, UnavailableError


async def score(client: SglangClient, tokens: list[int], *, vocabulary: int, salt: str) -> list[float]:
    """log-softmax at temperature 1 of tokens[1:]. `salt` keeps it from a cache of other weights."""
    final = vocabulary - 1
    try:
        answer = await client.generate_once(
            {
                "input_ids": tokens, "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [final],
                "extra_key": salt, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            }
        )  # fmt: skip
    except UnavailableError as error:
        raise EngineError(error.message, code="engine_unreachable") from error
    meta = answer["meta_info"]
    rows, finals = meta["input_token_logprobs"][1:], meta["input_token_ids_logprobs"][1:]
    # SGLang scores the vocabulary's last token as token 0 (it takes it for padding), so that one is asked for by name.
    scored = [extra[0] if token == final else row for token, row, extra in zip(tokens[1:], rows, finals, strict=True)]
    if [int(row[1]) for row in scored] != tokens[1:]:
        raise EngineError("SGLang scored other tokens than the probe's", code="engine_answer")
    return [float(row[0]) for row in scored]
