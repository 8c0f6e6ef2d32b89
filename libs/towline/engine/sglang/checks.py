"""What a server must prove before it serves: that its logprobs are of the kind that trajectories carry."""

from __future__ import annotations

import math
from typing import Any

import structlog

from towline.engine.sglang.client import SglangClient
from towline.errors import UsageError

_TEMPERATURE = 0.5
_TOP, _TOP_K = 20, 2
_TOLERANCE = 0.2
"""Relative, on gaps between logprobs. Another kind is off by a factor of two; kernels of prefill and decoding by far less."""
_LEAST_GAP = {"float32": 0.005, "bfloat16": 0.3, "float16": 0.1}
"""Below it, rounding may hide the difference."""
_log = structlog.get_logger("towline.engine")


async def check_logprob_kind(client: SglangClient, *, vocabulary: int, dtype: str) -> None:
    """`UsageError` where the server's logprobs aren't those after temperature and before top-k.

    At temperature 0.5 the gaps between tokens' logprobs must be twice those of temperature 1, which the prompt's logprobs
    show; and with top-k 2 those two mustn't hold the whole mass. A model that finds all tokens alike can't tell.
    """
    top = min(_TOP, vocabulary)
    for seed in range(1, 9):
        prompt = [seed * 7919 % vocabulary, (seed * 104729 + 1) % vocabulary]
        sampled = await client.generate_once(_body(prompt, top, temperature=_TEMPERATURE, top_k=_TOP_K))
        behaviour = _row(sampled["meta_info"]["output_top_logprobs"][0])
        token = int(sampled["output_ids"][0])
        scored = await client.generate_once(_body([*prompt, token], top, temperature=1.0, top_k=-1) | {"logprob_start_len": 0})
        plain = _row(scored["meta_info"]["input_top_logprobs"][len(prompt)])
        common = sorted(plain.keys() & behaviour.keys(), key=lambda token: plain[token])
        if len(common) < 2 or (gap := plain[common[-1]] - plain[common[0]]) < _LEAST_GAP[dtype]:
            continue
        found = (behaviour[common[-1]] - behaviour[common[0]]) / gap
        if abs(found * _TEMPERATURE - 1) > _TOLERANCE:
            raise UsageError(
                f"the SGLang server's logprobs at temperature {_TEMPERATURE} spread {found:.2f} times as far as those at 1, "
                f"not {1 / _TEMPERATURE:g} times; start it with SGLANG_RETURN_ORIGINAL_LOGPROB=0",
                code="logprob_kind",
            )
        if sum(math.exp(value) for value in sorted(behaviour.values())[-_TOP_K:]) < 0.999:
            return
    _log.warning("logprob_kind_unknown", reason="the model finds all tokens about as likely after eight prompts")


def _body(tokens: list[int], top: int, *, temperature: float, top_k: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": temperature, "top_k": top_k, "ignore_eos": True}
    return {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": top}


def _row(row: list[list[Any]]) -> dict[int, float]:
    return {int(token): float(logprob) for logprob, token, *_ in row}
