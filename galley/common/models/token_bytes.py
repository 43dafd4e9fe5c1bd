"""The bytes that a token stands for, which may be part of a character."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer as FastTokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Look up the bytes of token ids, by the decoder of a tokenizer.json."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._special = frozenset(fast.get_added_tokens_decoder())
        self._of_char = _bytes_of_chars() if _has_byte_level(fast) else None

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that no token has."""
        text = self._fast.id_to_token(token)
        if text is None:
            return b""
        if token in self._special:
            return text.encode()
        if self._of_char is not None:
            return b"".join(self._of_char.get(char, char.encode()) for char in text)
        if (byte := _BYTE.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        return text.replace(_SPACE, " ").encode()


def _has_byte_level(fast: FastTokenizer) -> bool:
    # `fast.to_str()` writes the vocabulary, too: 0.1 s in which streams would wait.
    decoder = json.loads(fast.decoder.__getstate__()) if fast.decoder else {}
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


def _bytes_of_chars() -> dict[str, bytes]:
    """Return the bytes that byte-level BPE writes as printable characters (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {char: bytes([byte]) for char, byte in chars.items()}
