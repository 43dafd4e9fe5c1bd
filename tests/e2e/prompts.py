"""Prompts of many kinds for the same-token tests: chat and plain text, short and long, prose and code."""

from __future__ import annotations

from collections.abc import Sequence

from galley.client.options import Message
from galley.common.models.tokenizer import Tokenizer

_CHATS = (
    "What is the capital of France?",
    "List the first ten prime numbers.",
    "Write a haiku about the sea.",
    "Write a Python function that reverses a string.",
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
    "Translate 'good morning, how are you?' into Spanish.",
    "Give me a recipe for pancakes.",
    "Explain in two sentences why the sky is blue.",
    "Correct this sentence: he go to school yesterday and buyed a apple.",
    "Schreibe einen kurzen Gruß auf Deutsch.",
    "What is 17 + 25? Explain step by step.",
    "Sort these words: pear, apple, orange, banana, cherry.",
    "Turn into JSON: name Anna Berg, age 31, city Oslo, job engineer.",
    "Write a polite reply to a customer whose parcel 48213 is three days late.",
    "Tell a very short story about a robot who learns to paint.",
    "Count from one to twenty in words.",
)

_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "SELECT name, price FROM products WHERE",
    "日本の首都は",
    "<html>\n<head>\n<title>Galley</title>\n",
    "A",
)

PROMPTS: tuple[str | list[Message], ...] = (
    *([Message("user", chat)] for chat in _CHATS),
    *_TEXTS,
)


def encode(tokenizer: Tokenizer, prompts: Sequence[str | list[Message]]) -> list[list[int]]:
    """The prompts as the gateway sees them."""
    return [
        tokenizer.encode(prompt)
        if isinstance(prompt, str)
        else tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in prompt])
        for prompt in prompts
    ]
