"""Logprobs as OpenAI writes them, for chats and for completions.

Those of a whole answer are built and encoded in slices, between which other calls get a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from galley.core.records import PositionLogprobs
from services.gateway.generation import ServedModel
from services.gateway.http.transport.encoding import in_slices, to_json

TokenBytes = Callable[[int], bytes]
SLICE_TOKENS = 16
"""Tokens of a slice: about 1 ms, if each has 20 logprobs."""


async def chat_logprobs_json(
    tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], model: ServedModel
) -> bytes:
    """Return the JSON of `chat_logprobs`."""

    def entries(at: slice) -> bytes:
        return to_json(chat_logprobs(tokens[at], logprobs[at], model.tokenizer.token_bytes))[1:-1]

    return b"[%b]" % b",".join(await in_slices(len(tokens), SLICE_TOKENS, entries, model.turn))


async def completion_logprobs_json(
    tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], model: ServedModel
) -> bytes:
    """Return the JSON of `completion_logprobs`."""
    offset = 0

    def lists(at: slice) -> dict[str, bytes]:
        nonlocal offset
        part = completion_logprobs(tokens[at], logprobs[at], model.tokenizer.token_bytes, offset)
        offset += sum(map(len, part["tokens"]))
        return {name: to_json(entries)[1:-1] for name, entries in part.items()}

    parts = await in_slices(len(tokens), SLICE_TOKENS, lists, model.turn)
    joined = (b'"%b":[%b]' % (name.encode(), b",".join(one[name] for one in parts)) for name in parts[0])
    return b"{%b}" % b",".join(joined)


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[PositionLogprobs], token_bytes: TokenBytes
) -> list[dict[str, Any]]:
    """Return an entry for each token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return [
        {**entry(token, at.logprob), "top_logprobs": [entry(*top) for top in at.top]}
        for token, at in zip(tokens, logprobs, strict=True)
    ]


def completion_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[PositionLogprobs],
    token_bytes: TokenBytes,
    offset: int = 0,
) -> dict[str, Any]:
    """Return the lists of all tokens; `offset` is that of the first in the text of the answer."""

    def text(token: int) -> str:
        return token_bytes(token).decode(errors="replace")

    def top(token: int, at: PositionLogprobs) -> dict[str, float]:
        """Return the likeliest texts, and that of the token. Of tokens with one text the likeliest counts."""
        by_text: dict[str, float] = {}
        for other, logprob in (*at.top, (token, at.logprob)):
            by_text.setdefault(text(other), logprob)
        return by_text

    texts, offsets = [text(token) for token in tokens], []
    for one in texts:
        offsets.append(offset)
        offset += len(one)
    return {
        "tokens": texts,
        "token_logprobs": [at.logprob for at in logprobs],
        "top_logprobs": [*map(top, tokens, logprobs)],
        "text_offset": offsets,
    }
