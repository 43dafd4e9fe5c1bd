"""The page: one file, no script, nothing from elsewhere; what it holds, how it looks in a real browser."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from galley.trace.explain.explain import explain
from galley.trace.read.model import Story
from galley.trace.show.html import page
from tests.fakes import trace_scenes as scenes
from tests.fakes.browser import Browser
from tests.fakes.trace_builder import OTHER_TARGET_AT, SESSION, Scene

_ACTIVE = {"script", "img", "iframe", "object", "embed", "link", "form", "base", "audio", "video", "input"}


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def story_of(scene: Scene) -> Story:
    (story,) = scene.stories(SESSION)
    return story


@pytest.mark.parametrize("name", ["eventful", "resumed", "hostile"])
def test_nothing_in_the_page_can_run_or_be_fetched(name: str) -> None:
    seen = Seen(page(story_of(getattr(scenes, name)())))
    assert {tag for tag, _ in seen.elements}.isdisjoint(_ACTIVE)
    attributes = [(key, value or "") for _, result in seen.elements for key, value in result.items()]
    assert not [key for key, _ in attributes if key.startswith("on") or key in ("style", "src", "srcset")]
    assert all(value.startswith("#round-") for key, value in attributes if key in ("href", "xlink:href"))


def test_the_policy_forbids_all_but_the_pages_own_style() -> None:
    text = page(story_of(scenes.eventful()))
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    digest = b64encode(sha256(style.group(1).encode()).digest()).decode()
    policy = next(result["content"] for tag, result in Seen(text).elements if "http-equiv" in result)
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style.group(1)
    assert "@import" not in style.group(1)


def test_a_long_answer_makes_no_endless_page() -> None:
    scene = Scene()
    request = scene.request()
    for _ in range(4000):
        request.round()
    request.round(round_confirmed=10**9, round_accepted=10**9).end()
    text = page(scene.story())
    assert len(text) < 3_000_000
    assert "… 3,501 rounds" in text


def opened(browser: Browser, story: Story, directory: Path) -> Story:
    path = directory / "page.html"
    path.write_text(page(story), encoding="utf-8")
    browser.open(path.as_uri())
    return story


def test_a_browser_shows_rounds_tokens_and_the_sentence(browser: Browser, tmp_path: Path) -> None:
    story = opened(browser, story_of(scenes.eventful()), tmp_path)
    assert browser.texts("h1") == [f"session {SESSION}"]
    assert browser.texts(".slowest-sentence") == [explain(story).sentence]
    rounds = browser.value("document.querySelectorAll('details.round').length")
    assert rounds == len(story.rounds) == 17
    assert browser.value("document.querySelector('.slowest summary').innerText").split()[1:3] == [
        "15",
        "918",
    ]
    tokens = browser.texts(".token")
    assert len(tokens) == sum(one.confirmed for one in story.rounds)
    assert tokens[1:4] == ["The", " old", " lighthouse"]
    accepted = browser.value("document.querySelectorAll('.token.of-draft').length")
    assert accepted == sum(one.accepted for one in story.rounds)
    assert any("session.moved" in text and OTHER_TARGET_AT in text for text in browser.texts(".event"))
    assert any(scenes.NEIGHBOUR in text for text in browser.texts("dd"))
    assert browser.complaints == []
    assert browser.requests == [(tmp_path / "page.html").as_uri()]


def test_bars_are_drawn_in_proportion(browser: Browser, tmp_path: Path) -> None:
    story = opened(browser, story_of(scenes.eventful()), tmp_path)
    one = next(one for one in story.rounds if one.parts.draft_ns > 10**8)
    widths = browser.value(
        f"Object.fromEntries([...document.querySelectorAll('#round-{one.index} .bar rect')]"
        ".map(r => [r.getAttribute('class'), r.getBoundingClientRect().width]))"
    )
    assert widths["draft"] / widths["compute"] == pytest.approx(
        one.parts.draft_ns / one.parts.compute_ns, rel=0.05
    )
    colours = browser.value(
        "[...document.querySelectorAll('.legend .swatch')].map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(colours)) == len(colours) == 8


def test_parts_show_by_hover_and_by_key_and_details_open_by_key(browser: Browser, tmp_path: Path) -> None:
    opened(browser, story_of(scenes.eventful()), tmp_path)
    visible = "getComputedStyle(document.querySelector('{} .tip')).display"
    assert browser.value(visible.format("#round-3")) == "none"
    browser.point_at("#round-3 summary")
    assert browser.value(visible.format("#round-3")) == "block"
    browser.point_at("h1")
    browser.press("Tab")
    focused = browser.value("document.activeElement.closest('details').id")
    assert focused == "round-0"
    assert browser.value(visible.format("#round-0")) == "block"
    assert "computing" in browser.texts("#round-0 .tip")[0]
    browser.press("Enter")
    assert browser.value("document.querySelector('#round-0').open") is True
    assert browser.value("document.querySelector('#round-0 .detail').checkVisibility()") is True
    assert browser.value(visible.format("#round-0")) == "none"


def test_without_their_text_tokens_are_numbered_boxes(browser: Browser, tmp_path: Path) -> None:
    opened(browser, story_of(scenes.resumed()), tmp_path)
    assert browser.texts(".tokens.boxes .token") == [str(number) for number in range(12)]
    assert any("request 2 of 2 resumed at 1,360 ms" in text for text in browser.texts(".request"))


def test_hostile_words_are_only_words(browser: Browser, tmp_path: Path) -> None:
    opened(browser, story_of(scenes.hostile()), tmp_path)
    assert browser.value("document.title").startswith("Galley trace")
    assert browser.value("document.querySelectorAll('script, img').length") == 0
    assert any("<script>document.title='owned'</script>" in text for text in browser.texts(".token"))
    assert browser.complaints == []
    assert len(browser.requests) == 1


def test_unescaped_markup_cannot_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    text = page(story_of(scenes.eventful()))
    path.write_text(text.replace("<main>", f"<main>{scenes.HOSTILE}"), encoding="utf-8")
    browser.open(path.as_uri())
    assert browser.value("document.title") != "owned"
    assert browser.complaints != []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_the_light_and_in_the_dark(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """Require a WCAG contrast of at least 4.5 between text and background."""
    opened(browser, story_of(scenes.eventful()), tmp_path)
    browser.in_scheme(scheme)
    pairs = {
        "body": "body",
        ".about": "body",
        ".token.of-draft": ".token.of-draft",
        ".token.of-target": ".token.of-target",
        ".slowest-sentence": ".slowest-sentence",
        ".event": "body",
        ".summary": "body",
    }
    for text, behind in pairs.items():
        assert (
            contrast(_colour(browser, text, "color"), _colour(browser, behind, "backgroundColor")) >= 4.5
        ), text
    dark = sum(_colour(browser, "body", "backgroundColor")) < 3 * 128
    assert dark == (scheme == "dark")


def _colour(browser: Browser, selector: str, which: str) -> tuple[int, ...]:
    reported = browser.value(f"getComputedStyle(document.querySelector('{selector}')).{which}")
    return tuple(map(int, re.findall(r"\d+", reported)[:3]))


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: tuple[int, ...]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
