"""The example's model: a small Qwen3 with a ChatML template, made from a seed, that knows how a call looks and copies carelessly.

Its supervised warm-up shows calls and answers in which a digit is wrong with probability `sloppiness`. To copy with care, the sum
into the call and the result into the answer, is what the agents' sessions must teach it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from task import CALL, CLOSES, END, END_CALL, ID, OPENS, START, TOKENS, question, spell
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LEARNING_RATE, BATCH = 2e-3, 128
PAD = 0
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build(
    folder: Path, seed: int, *, layers: int = 2, hidden: int = 64, warm_up_steps: int = 300, sloppiness: float = 0.25
) -> str:
    """Write the model and its tokenizer into `folder`; a line that says how it came about."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # the same sums, so the same weights, on every machine of this kind
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(TOKENS), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=96,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=END, pad_token_id=PAD,
        )
    ).float()  # fmt: skip
    loss = _warm_up(model, random.Random(f"agent/warm-up/{seed}"), warm_up_steps, sloppiness)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"Qwen3, {parameters / 1e6:.1f}M parameters, seed {seed}; supervised warm-up of {warm_up_steps} steps on calls and "
        f"answers whose digits are wrong with probability {sloppiness:g} (loss {loss:.2f}), {time.perf_counter() - started:.0f} s"
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, and one for each of the template's and the call's fixed parts. Only ChatML's marks are special."""
    made = Tokenizer(models.WordLevel(dict(ID), unk_token=TOKENS[PAD]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[:3]])
    made.add_tokens([AddedToken(token, normalized=False) for token in TOKENS if len(token) > 1 and token not in TOKENS[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=TOKENS[PAD], eos_token=TOKENS[END], chat_template=TEMPLATE, model_max_length=96
    )


def _warm_up(model: Qwen3ForCausalLM, numbers: random.Random, steps: int, sloppiness: float) -> float:
    """Cross entropy of the policy's tokens; the last step's."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        rows = [_row(numbers, sloppiness) for _ in range(BATCH)]
        width = max(len(tokens) for tokens, _ in rows)
        tokens = torch.tensor([tokens + [PAD] * (width - len(tokens)) for tokens, _ in rows])
        mask = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], dtype=torch.bool)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item()


def _row(numbers: random.Random, sloppiness: float) -> tuple[list[int], list[int]]:
    """A whole conversation's tokens, and 1 for each that the policy would choose."""
    text, value = question(numbers)

    def sloppily(digits: str) -> list[int]:
        return spell("".join(numbers.choice("0123456789") if numbers.random() < sloppiness else digit for digit in digits))

    left, right = text.split("+")
    asks = [START, ID["assistant\n"]]
    call = [ID[OPENS], ID[CALL], *sloppily(left), ID["+"], *sloppily(right), ID[END_CALL], ID[CLOSES], END]
    turns = [
        ([START, ID["user\n"], *spell(text), END, ID["\n"], *asks], 0),
        (call, 1),
        ([ID["\n"], START, ID["tool\n"], *spell(value), END, ID["\n"], *asks], 0),
        ([*sloppily(value), END], 1),
    ]
    return [token for tokens, _ in turns for token in tokens], [mine for tokens, mine in turns for _ in tokens]
