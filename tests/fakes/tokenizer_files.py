"""A tokenizer whose token ids are the bytes of UTF-8."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only users and assistants speak here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
)
TOOLS_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or () %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "<|assistant|>"
)
"""Of a model that writes calls as Hermes does."""


def write(
    directory: Path, template: str = TEMPLATE, added: Sequence[str] = (), control: Sequence[str] = ()
) -> None:
    """Write the files. Tokens `added` are text, as most marks of reasoning are; tokens `control` are not."""
    fast = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_chars().items()}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    fast.add_tokens(list(added))
    fast.add_special_tokens(list(control))
    fast.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_chars() -> dict[int, str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
