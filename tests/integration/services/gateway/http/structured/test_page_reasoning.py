"""The page, with a model that reasons before it answers."""

from __future__ import annotations

from pathlib import Path

from galley.common.models.tokenizer import Tokenizer
from tests.fakes.browser import Browser
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.http.test_page import opened


async def test_the_next_turn_does_not_repeat_the_reasoning(
    browser: Browser, gateway: Gateway, answers: Answers, world: World, tokenizer: Path
) -> None:
    answers.write("<think>\nWhere?\n</think>\n\nThere.")
    async with opened(browser, gateway.http) as page:
        for turn in (1, 2):
            await page.send(f"Turn {turn}.")
            await page.until(f"document.querySelectorAll('.compare:enabled').length === {turn}")
        tokens = "document.querySelectorAll('article:nth-of-type(1) .token')"
        shown = await page.value(f"[...{tokens}].map(e => [e.textContent, e.index])")
    written = list(enumerate(["<think>", *"\nWhere?\n", "</think>", *"\n\nThere."]))
    assert shown == [[text, index] for index, text in written if text.isalpha() or text in "?."]
    turns = [("user", "Turn 1."), ("assistant", "There."), ("user", "Turn 2.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    part = [call.slice for call in world.target.calls if call.slice.start == 0][-1]
    assert list(part.tokens[: part.prompt_len]) == Tokenizer.load(str(tokenizer)).encode_chat(messages)
