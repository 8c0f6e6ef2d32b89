"""The synthetic model's words: 32,000 of them, one a token, and a chat template of the ChatML kind, so that the gateway has what
it has in earnest: text to tokenise and to decode, a template to render, a boundary to prove."""

from __future__ import annotations

import json
from itertools import product
from string import ascii_lowercase

from towline.loadtest.task import VOCABULARY

END, START = "<|im_end|>", "<|im_start|>"
_PLAIN = ("<unk>", "\n", "system", "user", "assistant", "tool", ".", ",", " ")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words() -> list[str]:
    """By token ID; a word begins with its space."""
    made = (f" {''.join(letters)}" for letters in product(ascii_lowercase, repeat=4))
    return [END, START, *_PLAIN, *(next(made) for _ in range(VOCABULARY - 2 - len(_PLAIN)))]


def model_files() -> dict[str, bytes]:
    """What an anchor holds beside weights and config.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[a-z]+|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (END, START)])
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": END}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
