"""Prompts to be answered: read from files, or made up by the target itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from galley.core.errors import InvalidField

if TYPE_CHECKING:
    from services.gateway.request.tokenize import Tokenizer

_MARK = "\N{BLACK SQUARE}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, up to where the answer begins; `variant` sets apart those of equal tokens."""

    workload: str
    tokens: tuple[int, ...]
    variant: int = 0

    def digest(self, seed: int) -> int:
        """A 64-bit hash by which prompts are split and seeded; equal prompts are one."""
        text = f"{seed}:{self.variant}:{','.join(map(str, self.tokens))}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def read_prompts(files: Sequence[Path], tokenizer: Tokenizer) -> list[Prompt]:
    """Each line's `prompt` as one user turn, or its `messages`; `workload` is the file's name if not said.

    Raises InvalidField naming file, line and field. Prompts that come twice are taken once.
    """
    found: dict[tuple[int, ...], Prompt] = {}
    for file in files:
        for prompt in _read_file(file, tokenizer):
            found.setdefault(prompt.tokens, prompt)
    return list(found.values())


def _read_file(file: Path, tokenizer: Tokenizer) -> list[Prompt]:
    try:
        # Not splitlines(): JSON may hold other separators of lines as they are.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise InvalidField("prompts", f"{file} cannot be read: {error}") from error
    return [
        _parsed(line, f"{file}:{number}", file.stem, tokenizer)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _parsed(line: str, where: str, workload: str, tokenizer: Tokenizer) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidField("prompts", f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise InvalidField("prompts", f"{where} is no JSON object")
    named = entry.get("workload", workload)
    if not isinstance(named, str) or not named:
        raise InvalidField("prompts", f"{where}: workload must be a name, is {named!r}")
    messages = entry.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": entry.get("prompt")}]
    return Prompt(named, _encoded(messages, where, tokenizer))


def _encoded(messages: object, where: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InvalidField("prompts", f"{where}: prompt must be text, or messages a list of role and content")
    try:
        tokens = tokenizer.encode_chat(messages)
    except InvalidField as fault:
        raise InvalidField("prompts", f"{where}: {fault.problem}") from fault
    if not tokens:
        raise InvalidField("prompts", f"{where}: prompt has no tokens")
    return tuple(tokens)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) and message[name] for name in ("role", "content")
    )


def user_turn_opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens after which a user's text begins: fed with them, the target makes up a prompt.

    Raises InvalidField where the model has no chat template or its template begins with the text.
    """
    ours = [tokenizer.encode_chat([{"role": "user", "content": mark}]) for mark in (_MARK, "a")]
    common = 0
    while common < min(map(len, ours)) and ours[0][common] == ours[1][common]:
        common += 1
    if common == 0:
        raise InvalidField("self_prompts", "the chat template says nothing before the user's text")
    return tuple(ours[0][:common])


def split(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Places of the prompts to train on and of those held out: `share` of them, one at least, by their hash.

    Raises InvalidField if there are not two prompts.
    """
    if len(prompts) < 2:
        raise InvalidField("prompts", f"at least 2 are needed, there are {len(prompts)}")
    by_hash = sorted(range(len(prompts)), key=lambda place: prompts[place].digest(seed))
    count = min(max(1, round(share * len(prompts))), len(prompts) - 1)
    return sorted(by_hash[count:]), sorted(by_hash[:count])
