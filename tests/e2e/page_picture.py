"""`make page-picture`: the page of a stack with the default model, as docs/images/page.png."""

from __future__ import annotations

import asyncio
import io
import tempfile
from pathlib import Path

from PIL import Image

from galley.stack.stack import Stack, StackOptions
from tests.fakes.browser import Browser, find_browser

PATH = Path(__file__).parents[2] / "docs" / "images" / "page.png"
_PROMPT = """Write this sentence again, word for word:

The old lighthouse stands on a cliff above the sea, and every evening the keeper climbs the stairs and \
lights the lamp."""
_WIDTH, _HEIGHT = 1100, 840
_PATIENCE_S = 50.0
_COMPARED = "document.querySelector('.verdict')?.textContent"


def draw(browser: Browser, url: str) -> bytes:
    """Ask, compare the answer with the one without speculation, and return the picture."""
    screen = {"width": _WIDTH, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", **screen)
    browser.open(url)
    browser.until("document.querySelector('#model').textContent")
    browser.fill("[name=temperature]", "0")
    browser.value("document.querySelector('[name=mode]').value = 'fixed'")
    browser.fill("[name=k]", "6")
    browser.fill("#prompt", _PROMPT)
    browser.press("Enter")
    browser.until("document.querySelector('.compare:enabled')", _PATIENCE_S)
    browser.click(".compare")
    browser.until(_COMPARED, _PATIENCE_S)
    browser.value("scrollTo(0, 0)")
    browser.point_at(".answer:first-child .token:nth-child(12)")
    return browser.picture(_HEIGHT)


async def main() -> None:
    path = find_browser()
    if path is None:
        raise SystemExit("chromium is not installed")
    async with Stack(StackOptions(draft_model="none", http_port=0)) as stack:
        with tempfile.TemporaryDirectory() as profile, Browser(path, Path(profile)) as browser:
            [address] = stack.http_addresses
            drawn = await asyncio.to_thread(draw, browser, f"http://{address}/")
    Image.open(io.BytesIO(drawn)).quantize(128).save(PATH, optimize=True)


if __name__ == "__main__":
    asyncio.run(main())
