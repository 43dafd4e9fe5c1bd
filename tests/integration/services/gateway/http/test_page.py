"""The page at `/`, in a real browser."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from galley.core.admission.attempts import STREAM_BYTES, Attempt
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.browser import Browser
from tests.fakes.http_client import HttpClient, http_client
from tests.fakes.link import Link
from tests.fakes.processes import gateway_process
from tests.fakes.relay import Relay
from tests.fakes.truth import SEED
from tests.fakes.world import ID_SECRET, PROMPT, Gateway, World
from tests.integration.services.gateway.callers import ALICE, KeyFile

REFUSED = "net::ERR_CONNECTION_REFUSED"
VIOLATIONS = "axe.run().then(({violations}) => violations.map(v => [v.id, v.impact, v.nodes[0].html]))"
RESET = "net::ERR_CONNECTION_RESET"
LOST = "net::ERR_INCOMPLETE_CHUNKED_ENCODING"
# Makes the page draw this seed, and its keys at random as before.
DRAWN_SEED = """
seed => {
  const real = crypto.getRandomValues.bind(crypto);
  crypto.getRandomValues = (numbers) => numbers instanceof Uint32Array ? numbers.fill(seed) : real(numbers);
}
""".strip()


class Page:
    """The page in the browser; calls run in a thread, as the gateway runs in this one."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.origin = f"http://{address}/"
        self.browser = browser

    async def open(self) -> None:
        await self.run(self.browser.open, self.origin)

    async def run(self, call: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.to_thread(call, *given)

    async def value(self, expression: str) -> Any:
        return await self.run(self.browser.value, expression)

    async def until(self, expression: str) -> None:
        await self.run(self.browser.until, expression)

    async def text(self, selector: str) -> str:
        return "".join(await self.run(self.browser.texts, selector))

    async def click(self, selector: str) -> None:
        await self.run(self.browser.click, selector)

    async def set(self, **fields: str) -> None:
        """Set fields of the settings."""
        for name, value in fields.items():
            await self.value(
                f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})"
                f"(document.querySelector('#settings').elements[{json.dumps(name)}])"
            )

    async def send(self, text: str = PROMPT) -> None:
        await self.run(self.browser.fill, "#prompt", text)
        await self.run(self.browser.press, "Enter")

    async def has_tokens(self, count: int) -> None:
        await self.until(f"Number(document.querySelector('.answer:last-child dd')?.textContent) >= {count}")

    async def says(self, text: str) -> None:
        await self.until(f"document.querySelector('#status').textContent.startsWith({json.dumps(text)})")


@asynccontextmanager
async def opened(browser: Browser, address: str, *expected: str) -> AsyncIterator[Page]:
    """Open the page; at the end it must have asked no other host, and logged no error but those expected."""
    page = Page(browser, address)
    await page.open()
    await page.until("document.querySelector('#model').textContent === 'tiny'")
    yield page
    assert [url for url in browser.requests if not url.startswith(page.origin)] == []
    # A page before may still have asked its own gateway, which is gone.
    own = [one for one in browser.complaints if "http://127.0.0.1:" not in one or page.origin in one]
    assert [one for one in own if not any(text in one for text in expected)] == []


@pytest.fixture
async def page(browser: Browser, gateway: Gateway) -> AsyncIterator[Page]:
    async with opened(browser, gateway.http) as page:
        await page.set(seed=str(SEED), mode="fixed", k="3", max_tokens="40")
        yield page


async def test_tokens_are_streamed_with_origin_and_probability(
    world: World, page: Page, client: HttpClient
) -> None:
    world.target.gate.close_after(2)
    await page.send()
    await page.has_tokens(6)
    assert await page.value("document.querySelector('#stop').disabled") is False
    world.target.gate.open()
    await page.says("Answer complete: 40 tokens")
    whole = await client.chat(seed=SEED, max_tokens=40, ignore_eos=False, return_token_ids=True)
    [choice] = whole["choices"]
    assert await page.text(".tokens") == choice["message"]["content"]
    drafted = await page.value("document.querySelectorAll('.tokens .of-draft').length")
    assert 20 <= drafted <= 30
    await page.run(page.browser.point_at, ".tokens .of-draft")
    tip = await page.text("#tip")
    assert "proposed by the draft" in tip
    assert "logprob" in tip
    assert len(tip.splitlines()) == 5
    await page.value("document.querySelector('.tokens').focus()")
    for _ in range(2):
        await page.run(page.browser.press, "ArrowRight")
    assert (await page.text("#tip")).startswith("Token 1,")


async def test_a_conversation_has_turns(world: World, page: Page) -> None:
    for turn in (1, 2):
        await page.send(f"Turn {turn}.")
        await page.until(f"document.querySelectorAll('.compare:enabled').length === {turn}")
    second = await page.text("article:nth-of-type(2) .tokens")
    first = await page.text("article:nth-of-type(1) .tokens")
    async with http_client(page.origin.removeprefix("http://").rstrip("/")) as client:
        turns = [("user", "Turn 1."), ("assistant", first), ("user", "Turn 2.")]
        messages = [{"role": role, "content": content} for role, content in turns]
        same = await client.chat(messages=messages, max_tokens=40, ignore_eos=False)
    assert same["choices"][0]["message"]["content"] == second
    await page.click("#clear")
    assert await page.text("#turns") == ""


async def test_an_answer_is_stopped_and_kept(world: World, page: Page, gateway: Gateway) -> None:
    world.target.gate.close_after(2)
    await page.send()
    await page.has_tokens(6)
    await page.click("#stop")
    await page.says("Answer stopped: ")
    assert await page.text(".note") == "Stopped."
    world.target.gate.open()
    await gateway.idle()
    await page.send("And?")
    await page.says("Answer complete")


async def test_a_seed_gives_the_same_tokens_without_speculation(world: World, page: Page) -> None:
    await page.value(f"({DRAWN_SEED})({SEED})")  # with others the answer may end at once
    world.draft.spoil_rate = 0.5
    await page.set(seed="")
    await page.click("[name=lock]")
    await page.send()
    await page.says("Answer complete")
    await page.click(".compare")
    await page.until("document.querySelector('.verdict').textContent !== ''")
    assert re.fullmatch(
        r"All \d+ tokens are equal\. Measured speed-up: [\d.]+×\.", await page.text(".verdict")
    )
    assert await page.value("document.querySelectorAll('.answer:last-child .of-draft').length") == 0
    assert await page.value("document.querySelectorAll('.answer:first-child .of-draft').length") > 0
    seed = await page.value("document.querySelector('#settings').elements.seed.value")
    assert f"Seed {seed} " in await page.text("article .faint")


async def test_an_answer_that_differs_is_marked(world: World, page: Page) -> None:
    def spoil(result: pb.VerifyResult) -> None:
        if result.position == len(PROMPT) + 2 + 5:
            result.tokens[0] = ord("#")

    world.target.spoil = spoil
    await page.set(mode="off")
    await page.send()
    await page.says("Answer complete")
    world.target.spoil = lambda result: None
    await page.click(".compare")
    await page.until("document.querySelector('.verdict').textContent.startsWith('Equal up to token 5.')")
    marked = await page.run(page.browser.texts, ".differs")
    assert len(marked) == 2
    assert marked[0] == "#"
    assert await page.text(".answer:last-child h2") == "With speculation"


async def test_a_stream_goes_on_after_its_gateway_was_killed(
    browser: Browser, world: World, tmp_path: Path, client: HttpClient
) -> None:
    secret = {"GALLEY_GATEWAY_ID_SECRET": ID_SECRET}
    flags = {"http-port": "0"}
    whole = await client.chat(ignore_eos=False, max_tokens=400)
    world.target.gate.close_after(3)
    async with AsyncExitStack() as stack:
        async with gateway_process(world, tmp_path / "1", secret, flags, end=signal.SIGKILL) as killed:
            page = await stack.enter_async_context(opened(browser, killed["http"], REFUSED, LOST))
            await page.set(seed=str(SEED), mode="fixed", k="3", max_tokens="400")
            await page.send()
            await page.has_tokens(9)
        await page.says("The gateway cannot be reached. Trying again")
        flags = {"http-port": killed["http"].rpartition(":")[2]}
        async with gateway_process(world, tmp_path / "2", secret, flags):
            await page.says("Connected again")
            world.target.gate.open()
            await page.says(f"Answer complete: {whole['usage']['completion_tokens']} tokens")
            assert await page.text(".tokens") == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("tokens", [0, 6], ids=["before the first event", "after some tokens"])
async def test_a_stream_goes_on_after_its_link_broke(
    browser: Browser, world: World, gateway: Gateway, client: HttpClient, tokens: int
) -> None:
    link = Link()
    whole = await client.chat(ignore_eos=False, max_tokens=400)
    calls = len(world.target.calls)
    world.target.gate.close_after(2 if tokens else 0)
    async with Relay(gateway.http, link) as relay, opened(browser, relay.address, RESET) as page:
        await page.set(seed=str(SEED), mode="fixed", k="3", max_tokens="400")
        link.cut(requests=False, responses=not tokens)
        await page.send()
        await world.target.called(calls + 1)
        await page.has_tokens(tokens)
        link.reset()
        link.mend()
        if tokens:  # else the browser itself may send the request again, unseen by the page
            await page.says("Connected again")
        world.target.gate.open()
        await page.says(f"Answer complete: {whole['usage']['completion_tokens']} tokens")
        assert await page.text(".tokens") == whole["choices"][0]["message"]["content"]
    [session] = {call.slice.session_id for call in world.target.calls[calls:]}
    if tokens:
        assert await _is_owned_by_call(world, session, 2)


async def _is_owned_by_call(world: World, session_id: str, number: int) -> bool:
    async with Redis.from_url(world.redis_url) as store:
        nonce = await store.hget(f"galley:sessions:default:{{{session_id}}}", "nonce")
    assert isinstance(nonce, bytes)
    precedes = [Attempt(nonce[:STREAM_BYTES], at).precedes(nonce) for at in (number - 1, number)]
    return precedes == [True, False]


async def test_errors_are_shown_in_plain_words(browser: Browser, world: World) -> None:
    gateway = await world.gateway(http_port=0, api_keys_file=KeyFile().write(world))
    page = Page(browser, gateway.http)
    await page.open()
    await page.says("The API key is missing or wrong. Enter it in the settings.")
    await page.set(key=ALICE)
    await page.until("document.querySelector('#model').textContent === 'tiny'")
    await page.set(max_tokens="1000000")
    await page.send()
    await page.says("max_tokens: must be in [1, 65535]")
    assert await page.value("document.querySelector('#prompt').value") == PROMPT
    stored = await page.value("[localStorage.length, sessionStorage.length, document.cookie]")
    assert stored == [0, 1, ""]
    await page.value("sessionStorage.clear()")


async def test_rounds_are_drawn_in_time(world: World, page: Page) -> None:
    await page.click("[name=logprobs]")
    await page.send()
    await page.says("Answer complete: 40 tokens")
    figures = await page.run(page.browser.texts, ".figures dd")
    assert figures[3:5] == [str(len(world.target.calls)), "100 %"]
    assert re.fullmatch(r"≤ [23]\.\d\d×", figures[5])
    await page.click(".small")
    assert await page.value("document.activeElement.id") == "tab-rounds"
    assert not await page.value("document.querySelector('#chat').checkVisibility()")
    rows = await page.run(page.browser.texts, "tbody tr")
    assert len(rows) == len(world.target.calls)
    assert await page.text("td.text") == await page.text(".tokens")
    parts = await page.value(
        "[...new Set([...document.querySelectorAll('.strip rect')].map(e => e.classList[0]))]"
    )
    assert {"compute"} <= set(parts) <= {"draft", "queue", "compute", "wire"}
    widest = await page.value(
        "Math.max(...[...document.querySelectorAll('td .chart')].map(e => e.getBBox().width))"
    )
    scale = await page.value("document.querySelector('td .chart').viewBox.baseVal.width")
    assert widest == pytest.approx(scale, rel=1e-3)


async def test_markup_in_an_answer_stays_text(world: World, page: Page) -> None:
    markup = iter(b"<img src=x onerror=alert(1)>" * 2)
    world.target.spoil = lambda result: result.tokens.__setitem__(0, next(markup))
    await page.set(mode="off", max_tokens="28")
    await page.send("<b>bold</b>")
    await page.says("Answer complete")
    assert await page.text(".tokens") == "<img src=x onerror=alert(1)>"
    assert await page.text(".user") == "<b>bold</b>"
    assert await page.value("document.querySelectorAll('#turns img, #turns b').length") == 0


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
async def test_the_page_is_accessible(world: World, page: Page, scheme: str, width: int) -> None:
    axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    browser = page.browser
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    await page.run(lambda: browser.send("Emulation.setDeviceMetricsOverride", **screen))
    await page.run(browser.in_scheme, scheme)
    try:
        await page.send()
        await page.says("Answer complete")
        await page.click(".compare")
        await page.until("document.querySelector('.verdict').textContent !== ''")
        await page.value(axe)
        for tab in ("chat", "rounds"):
            await page.click(f"#tab-{tab}")
            assert await page.value(VIOLATIONS) == []
            assert await page.value("document.documentElement.scrollWidth") <= width
    finally:
        await page.run(lambda: browser.send("Emulation.clearDeviceMetricsOverride"))


async def test_the_pages_files_need_no_key_and_forbid_other_hosts(world: World) -> None:
    gateway = await world.gateway(http_port=0, api_keys_file=KeyFile().write(world))
    async with http_client(gateway.http) as client:
        for path in ("/", "/page/main.js", "/page/page.css"):
            response = await client.raw.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "frame-ancestors 'none'" in policy
            assert "http" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-cache"
            again = await client.raw.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/files.py", "/page/__init__.py", "/page/..%2fapp.py", "/page/"):
            assert (await client.raw.get(path)).status_code in {401, 404}


async def test_no_page_removes_it(world: World) -> None:
    gateway = await world.gateway(http_port=0, page=False)
    async with http_client(gateway.http) as client:
        for path in ("/", "/page/main.js"):
            assert (await client.raw.get(path)).status_code == 404
