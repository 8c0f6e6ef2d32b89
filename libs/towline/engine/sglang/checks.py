"""What a server must prove before it serves: that its logprobs are of the kind that trajectories carry."""

from __future__ import annotations

from typing import Any

from towline.engine.sglang.client import SglangClient
from towline.errors import EngineError, UsageError

_TEMPERATURE = 0.5
_TOP = 3
_TOLERANCE = 0.02
"""Relative, on gaps between logprobs: bfloat16 kernels differ between prefill and decoding."""


async def check_logprob_kind(client: SglangClient, vocabulary: int) -> None:
    """`UsageError` where the server's logprobs aren't those after temperature and before top-k.

    At temperature 0.5 the gaps between the most likely tokens' logprobs must be twice those of temperature 1, which the
    prompt's logprobs show; with top-k 3 those three mustn't hold the whole mass.
    """
    prompts = [[seed * 7919 % vocabulary, (seed * 104729 + 1) % vocabulary] for seed in range(1, 9)]
    for prompt in prompts:
        sampled = await client.generate_once(
            {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 1, "temperature": _TEMPERATURE, "top_k": _TOP, "ignore_eos": True},
                "return_logprob": True,
                "top_logprobs_num": _TOP,
            }
        )
        token = int(sampled["output_ids"][0])
        behaviour = _ordered(sampled["meta_info"]["output_top_logprobs"][0])
        scored = await client.generate_once(
            {
                "input_ids": [*prompt, token],
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": _TOP,
            }
        )
        plain = _ordered(scored["meta_info"]["input_top_logprobs"][len(prompt)])
        gap = plain[0][0] - plain[-1][0]
        if [token for _, token in plain] != [token for _, token in behaviour] or gap < 0.1:
            continue  # nearly even: this prompt can't tell
        found = (behaviour[0][0] - behaviour[-1][0]) / gap
        if abs(found * _TEMPERATURE - 1) > _TOLERANCE:
            raise UsageError(
                f"the SGLang server's logprobs at temperature {_TEMPERATURE} are those of temperature {1 / found:.2f}; start it "
                "with SGLANG_RETURN_ORIGINAL_LOGPROB=0",
                code="logprob_kind",
            )
        mass = sum(2.718281828459045**logprob for logprob, _ in behaviour)
        if mass < 0.999:
            return
    raise EngineError("the SGLang server's logprob kind can't be told: no prompt of eight has a clear order", code="logprob_kind")


def _ordered(row: list[list[Any]]) -> list[tuple[float, int]]:
    return [(float(logprob), int(token)) for logprob, token, *_ in row]
