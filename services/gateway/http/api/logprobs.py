"""Logprobs as OpenAI writes them, for chats and for completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from galley.core.records import PositionLogprobs

TokenBytes = Callable[[int], bytes]


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

    texts, offsets = [text(token) for token in tokens], []
    for one in texts:
        offsets.append(offset)
        offset += len(one)
    return {
        "tokens": texts,
        "token_logprobs": [at.logprob for at in logprobs],
        "top_logprobs": [{text(token): value for token, value in at.top} for at in logprobs],
        "text_offset": offsets,
    }
