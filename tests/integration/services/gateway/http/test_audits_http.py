"""Audits over HTTP: the report of a session, the totals, and the seal of the page."""

from __future__ import annotations

import importlib.resources
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from galley.core.audit import AuditCounts
from tests.fakes.browser import Browser
from tests.fakes.http_client import HttpClient, http_client
from tests.fakes.truth import SEED, true_next
from tests.fakes.world import MAX_TOKENS, PROMPT_TOKENS, Gateway, World
from tests.integration.services.gateway.http.test_page import VIOLATIONS, opened

WRONG_AT = 9
"""Index of the output token that a faulty target computes otherwise."""


@pytest.fixture
async def gateway(world: World) -> Gateway:
    return await world.gateway(http_port=0, pool=world.id, audit_ratio=1e-9)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[HttpClient]:
    async with http_client(gateway.http) as client:
        yield client


def break_target(world: World) -> None:
    """Have the target compute another token at one index from now on."""

    def wrong_next(tokens: Sequence[int], seed: int = SEED, banned: AbstractSet[int] = frozenset()) -> int:
        token = true_next(tokens, seed, banned)
        return token ^ 1 if len(tokens) == len(PROMPT_TOKENS) + WRONG_AT else token

    world.target.truth = lambda _: wrong_next


async def finished(client: HttpClient, **given: Any) -> tuple[str, dict[str, Any]]:
    answer = await client.complete(return_token_ids=True, **given)
    return answer["id"].removeprefix("cmpl-"), answer


async def audited(client: HttpClient, session_id: str, query: str = "") -> dict[str, Any]:
    response = await client.raw.post(f"/v1/sessions/{session_id}/audit{query}")
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()
    return report


async def totals(client: HttpClient) -> dict[str, Any]:
    response = await client.raw.get("/v1/audit")
    assert response.status_code == 200, response.text
    counts: dict[str, Any] = response.json()
    return counts


async def test_a_sound_session_is_the_same(client: HttpClient) -> None:
    session_id, _ = await finished(client)
    assert await audited(client, session_id) == {
        "id": session_id,
        "object": "galley.audit",
        "verdict": "same",
        "output_tokens": MAX_TOKENS,
        "compared": MAX_TOKENS,
        "differing": 0,
        "differences": [],
        "system_fingerprint": "build-1",
        "deterministic": True,
    }


async def test_a_difference_is_reported_at_its_index(world: World, client: HttpClient) -> None:
    session_id, answer = await finished(client)
    token = answer["choices"][0]["token_ids"][WRONG_AT]
    break_target(world)
    report = await audited(client, session_id)
    world.expect_error("audit found an incident")
    assert (report["verdict"], report["differing"]) == ("differs", 1)
    [difference] = report["differences"]
    assert difference["index"] == WRONG_AT
    assert difference["logged_token_id"] == token
    assert difference["computed_token_id"] == token ^ 1
    assert difference["computed_logprob"] < 0


async def test_each_choice_has_an_audit_of_its_own(client: HttpClient) -> None:
    session_id, answer = await finished(client, n=2)
    assert len(answer["choices"]) == 2
    first, second = [await audited(client, session_id, f"?choice={index}") for index in (0, 1)]
    assert first["verdict"] == second["verdict"] == "same"
    assert first["id"] == session_id != second["id"]
    response = await client.raw.post(f"/v1/sessions/{session_id}/audit?choice=2")
    assert response.status_code == 404


async def test_an_audit_ends_at_its_deadline(world: World, gateway: Gateway, client: HttpClient) -> None:
    session_id, _ = await finished(client)
    world.target.gate.close()
    path, deadline = f"/v1/sessions/{session_id}/audit", {"x-galley-timeout-s": "0.1"}
    late = await client.raw.post(path, headers=deadline)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    await world.target.was_cancelled()
    world.target.gate.open()
    assert (await audited(client, session_id))["verdict"] == "same"


async def test_a_live_session_is_refused(world: World, client: HttpClient) -> None:
    world.target.gate.close_after(2)
    async with client.open("/v1/completions", {"prompt": "x", "seed": SEED, "max_tokens": 20}) as response:
        session_id = response.headers["x-galley-session-id"]
        refused = await client.raw.post(f"/v1/sessions/{session_id}/audit")
        world.target.gate.open()
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "failed_precondition"


async def test_totals_count_tokens_of_deterministic_builds(
    world: World, gateway: Gateway, client: HttpClient
) -> None:
    nothing = {"tokens": 0, "differing": 0}
    assert await totals(client) == {
        "object": "galley.audits",
        "ratio": 1e-9,
        "sessions": 0,
        "damaged": 0,
        "deterministic": nothing,
        "other": nothing,
    }
    session_id, _ = await finished(client)
    await audited(client, session_id)
    break_target(world)
    await audited(client, session_id)
    world.expect_error("audit found an incident")
    counts = await totals(client)
    assert (counts["sessions"], counts["damaged"], counts["other"]) == (2, 0, nothing)
    assert counts["deterministic"] == {"tokens": 2 * MAX_TOKENS, "differing": 1}
    same = AuditCounts(sessions=2, tokens=2 * MAX_TOKENS, differing=1)
    assert await gateway.client.audit_counts() == same


async def test_the_page_shows_a_seal_once_tokens_were_audited(
    world: World, browser: Browser, gateway: Gateway, client: HttpClient
) -> None:
    async with opened(browser, gateway.http) as page:
        session_id, _ = await finished(client)
        assert await page.value("document.querySelector('#seal').hidden") is True
        await audited(client, session_id)
        await page.open()
        await page.until("!document.querySelector('#seal').hidden")
        assert await page.text("#seal") == f"{MAX_TOKENS} tokens audited, 0 differ"
        assert await page.value("document.querySelector('#seal').classList.contains('broken')") is False
        break_target(world)
        await audited(client, session_id)
        world.expect_error("audit found an incident")
        await page.open()
        await page.until("!document.querySelector('#seal').hidden")
        assert await page.text("#seal") == f"{2 * MAX_TOKENS} tokens audited, 1 differ"
        assert await page.value("document.querySelector('#seal').classList.contains('broken')") is True


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_seal_is_accessible_on_a_small_screen(
    world: World, browser: Browser, gateway: Gateway, client: HttpClient, scheme: str
) -> None:
    session_id, _ = await finished(client)
    break_target(world)
    await audited(client, session_id)
    world.expect_error("audit found an incident")
    axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    screen = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    async with opened(browser, gateway.http) as page:
        await page.run(lambda: browser.send("Emulation.setDeviceMetricsOverride", **screen))
        await page.run(browser.in_scheme, scheme)
        try:
            await page.until("!document.querySelector('#seal').hidden")
            await page.value(axe)
            assert await page.value(VIOLATIONS) == []
            assert await page.value("document.documentElement.scrollWidth") <= 360
        finally:
            await page.run(lambda: browser.send("Emulation.clearDeviceMetricsOverride"))


async def test_a_gateway_without_audits_shows_no_seal(
    world: World, browser: Browser, gateway: Gateway, client: HttpClient
) -> None:
    session_id, _ = await finished(client)
    await audited(client, session_id)
    without = await world.gateway(http_port=0, pool=world.id, audit_ratio=0)
    async with opened(browser, without.http) as page:
        await page.until("document.querySelector('#seal').textContent !== ''")
        assert await page.value("document.querySelector('#seal').hidden") is True


async def test_a_session_that_opted_out_can_be_audited_by_hand(gateway: Gateway) -> None:
    result = await gateway.client.generate("x", max_tokens=4, seed=SEED, no_audit=True)
    assert (await gateway.client.audit(result.session_id)).verdict.value == "same"
