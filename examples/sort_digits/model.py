"""The demo's model: a Qwen3 of 0.4M parameters, made from a seed, that has learned the answer's format and nothing else.

A few seconds of supervised steps teach it to write digits of the prompt and to stop. Their targets are the prompt's digits in
random order, so it has never seen a sorted answer: that is what the run must teach it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sort_digits.task import BOS, CHARACTERS, DIGITS, EOS, PAD, SPECIAL_TOKENS, draw, encode

WARM_UP_LEARNING_RATE = 1e-3
WARM_UP_BATCH = 256


def build(folder: Path, seed: int, *, layers: int = 2, hidden: int = 128, warm_up_steps: int = 60) -> str:
    """Make the model and its tokenizer and save both as a Hugging Face folder, bfloat16."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # the same sums, so the same weights, on every machine of this kind
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_config(layers, hidden)).float()
    loss = _warm_up(model, seed, warm_up_steps)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"Qwen3, {parameters / 1e6:.1f}M parameters, seed {seed}; supervised warm-up of {warm_up_steps} steps on the answer's "
        f"format only (digits in random order, loss {loss:.2f}), {time.perf_counter() - started:.0f} s"
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
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def _warm_up(model: Qwen3ForCausalLM, seed: int, steps: int) -> float:
    """Cross entropy of the answer's tokens on shuffled digits; the last step's."""
    numbers = random.Random(f"sort-digits/warm-up/{seed}")
    optimiser = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        rows = []
        for _ in range(WARM_UP_BATCH):
            digits = draw(numbers)
            rows.append([BOS, *encode(digits + ">" + "".join(numbers.sample(digits, DIGITS))), EOS])
        tokens = torch.tensor(rows)
        logits = model(input_ids=tokens[:, :-1]).logits[:, DIGITS + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, DIGITS + 2 :].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item()
