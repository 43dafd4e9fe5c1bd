"""Keep control tokens that a message spells out from being read as such.

A mark after the first character of each spelling keeps the tokenizer from matching it. The normalizer
deletes the marks, after the tokenizer has matched the control tokens of the chat template and before it cuts
the text. So all other text gets the same tokens as without marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any, TypeVar, cast

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers

_T = TypeVar("_T")
MARK = "\ufdd0"
"""A code point that Unicode reserves for use inside a process. It is dropped from prompts."""


class ControlTokens:
    """The texts of a tokenizer's control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Raise ValueError for a text of one character, which no mark can break."""
        texts = sorted(texts)
        if short := [text for text in texts if len(text) == 1]:
            raise ValueError(
                f"control token {short[0]!r} cannot be kept out of messages, as it has one character; set "
                "--control-tokens-in-messages"
            )
        self._beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)
        self._firsts, self._spelled = _first_characters(texts)

    def mark(self, value: _T) -> _T:
        """Return a JSON value with a mark in each control token that one of its texts spells or begins."""
        marked: Any = value
        if isinstance(value, str):
            marked = self._mark_text(value)
        elif isinstance(value, Mapping):
            marked = {self.mark(name): self.mark(part) for name, part in value.items()}
        elif isinstance(value, Sequence):
            marked = [self.mark(part) for part in value]
        return cast("_T", marked)

    def _mark_text(self, text: str) -> str:
        if self._firsts.search(text) is None:
            return text
        text = self._spelled.sub(rf"\g<0>{MARK}", text)
        # The template may put the rest of the token behind it.
        end = text[1 - self._longest :]
        ends = (end[first.start() :] for first in self._firsts.finditer(end))
        return text + MARK if any(one in self._beginnings for one in ends) else text


def _first_characters(texts: Sequence[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what finds the first character of each text, and what does where the rest follows."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    spelled = (f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items())
    nothing = "(?!)"
    return re.compile("|".join(map(re.escape, rests)) or nothing), re.compile("|".join(spelled) or nothing)


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern that finds whether one of the texts follows: in the time of one, however many."""
    shared = commonprefix(texts)  # noqa: RUF071  # of characters, as is meant
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[len(shared) :][:1], []).append(text[len(shared) :])
    branches = "" if "" in rests else f"(?:{'|'.join(map(_any_of, rests.values()))})"
    return re.escape(shared) + branches


def separate(fast: FastTokenizer) -> tuple[FastTokenizer, ControlTokens]:
    """Return a tokenizer that deletes marks, and its control tokens. Raise as `ControlTokens`.

    The tokenizer is `fast` itself, or a copy if `fast` matches control tokens in normalized text.
    """
    special = [token for token in fast.get_added_tokens_decoder().values() if token.special]
    if any(token.normalized for token in special):
        fast = _match_unnormalized(fast)
    delete = normalizers.Replace(MARK, "")
    fast.normalizer = normalizers.Sequence([delete, fast.normalizer] if fast.normalizer else [delete])
    return fast, ControlTokens(token.content for token in special)


def _match_unnormalized(fast: FastTokenizer) -> FastTokenizer:
    """Return a copy that matches control tokens before it normalizes the text, hence with its marks."""
    content = json.loads(fast.to_str())
    for token in content["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    return FastTokenizer.from_str(json.dumps(content))
