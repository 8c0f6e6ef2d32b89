"""The calculator example's model: a small Qwen3, made from a seed, that knows how calls look and copies carelessly.

Its supervised warm-up shows calls and answers in which a digit is wrong with probability `sloppiness`. To copy with care, the sum
into the call and the result into the answer, is what the run must teach it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sums import BOS, CALL, CHARACTERS, END_CALL, END_RESULT, EOS, PAD, RESULT, SPECIAL_TOKENS, draw, encode
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LEARNING_RATE, BATCH = 2e-3, 128


def build(
    folder: Path, seed: int, *, layers: int = 2, hidden: int = 64, warm_up_steps: int = 300, sloppiness: float = 0.25
) -> str:
    """Make the model and its tokenizer and save both as a Hugging Face folder, bfloat16."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # the same sums, so the same weights, on every machine of this kind
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_config(layers, hidden)).float()
    loss = _warm_up(model, random.Random(f"calculator/warm-up/{seed}"), warm_up_steps, sloppiness)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"Qwen3, {parameters / 1e6:.1f}M parameters, seed {seed}; supervised warm-up of {warm_up_steps} steps on calls and "
        f"answers whose digits are wrong with probability {sloppiness:g} (loss {loss:.2f}), {time.perf_counter() - started:.0f} s"
    )


def _config(layers: int, hidden: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


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
    """A whole sample's tokens, and 1 for each that the policy would choose."""
    text, value = draw(numbers)

    def sloppily(digits: str) -> list[int]:
        return encode("".join(numbers.choice("0123456789") if numbers.random() < sloppiness else digit for digit in digits))

    left, right = text.split("+")
    turns = [
        ([BOS, *encode(f"{text}=")], 0),
        ([CALL, *sloppily(left), *encode("+"), *sloppily(right), END_CALL], 1),
        ([RESULT, *encode(value), END_RESULT], 0),
        ([*sloppily(value), EOS], 1),
    ]
    return [token for tokens, _ in turns for token in tokens], [mine for tokens, mine in turns for _ in tokens]
