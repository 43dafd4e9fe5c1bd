"""The page at /docs, by a plain client and in a browser."""

from __future__ import annotations

import asyncio
import re

from tests.fakes.browser import Browser
from tests.fakes.http_client import HttpClient, http_client
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.callers import KeyFile

FILES = ("", "/swagger-ui.css", "/swagger-ui-bundle.js", "/start.js")


async def test_the_page_needs_no_key_and_no_other_host(world: World) -> None:
    gateway = await world.gateway(http_port=0, api_keys_file=KeyFile().write(world))
    async with http_client(gateway.http) as client:
        for name in FILES:
            response = await client.raw.get(f"/docs{name}")
            assert response.status_code == 200, name
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert "http" not in policy
        page = (await client.raw.get("/docs")).text
        assert not re.search(r"(src|href)=\"(?!/docs/|data:)", page)
        assert (await client.raw.get("/docs/other.js")).status_code == 401


async def test_operations_are_described_with_the_errors_that_they_have(client: HttpClient) -> None:
    described = (await client.raw.get("/openapi.json")).json()
    operations = [one for path in described["paths"].values() for one in path.values()]
    assert len(operations) == 20
    for operation in operations:
        assert "422" not in operation["responses"]
        content = operation["responses"]["400"]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
    assert not {"HTTPValidationError", "ValidationError"} & described["components"]["schemas"].keys()


async def test_no_reflection_closes_the_page(world: World) -> None:
    gateway = await world.gateway(http_port=0, reflection=False)
    async with http_client(gateway.http) as client:
        for path in ("/openapi.json", *(f"/docs{name}" for name in FILES)):
            assert (await client.raw.get(path)).status_code == 404


async def test_unknown_files_are_not_found(client: HttpClient) -> None:
    for name in ("redoc.standalone.js", "..%2f__init__.py", "x"):
        assert (await client.raw.get(f"/docs/{name}")).status_code == 404


async def test_a_browser_shows_all_operations(browser: Browser, gateway: Gateway) -> None:
    def show() -> list[str]:
        browser.open(f"http://{gateway.http}/docs")
        browser.until("document.querySelectorAll('.opblock').length > 10")
        return browser.texts(".opblock-summary-path")

    shown = await asyncio.to_thread(show)
    # Swagger UI allows a line to break before each slash.
    assert "/v1/responses/{response_id}" in {text.replace("\u200b", "") for text in shown}
    assert browser.complaints == []
    requests = [url for url in browser.requests if not url.startswith("data:")]
    assert all(url.startswith(f"http://{gateway.http}/") for url in requests)
