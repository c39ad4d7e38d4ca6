"""The page of `txl serve` in a real browser: a conversation with a model, in a narrow and a wide window."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.browser import Visit, check_contrast, find_chromium, started, visit
from tests.helpers.language import random_model
from tests.helpers.served import Served, served

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH and $CHROMIUM is not set"),
]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM is not None
    with started(CHROMIUM) as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(random_model()) as running:
        yield running


def fill(page: Any, **settings: object) -> None:
    if not page.locator("details").evaluate("it => it.open"):
        page.click("summary")
    for name, value in settings.items():
        page.fill(f"[name={name}]", str(value))


def turn(seen: Visit, prompt: str) -> str:
    """Go on with a prompt; the text so far, prompts among it."""
    page = seen.page
    page.fill("#prompt", prompt)
    page.click("#go")
    page.locator("#go:not([disabled])").wait_for()
    assert re.search(r"^\d+ tokens in [\d.]+ s, [\d.e+]+ tokens/s; ended: ", page.text_content("#state"))
    return str(page.text_content("#talk"))


@pytest.mark.parametrize("width", [390, 1280])
def test_a_conversation_goes_on_from_its_memory_and_asks_nobody_but_its_server(
    browser: Any, server: Served, width: int
) -> None:
    with visit(browser, server.url, width=width) as seen:
        page = seen.page
        page.get_by_text("tiny", exact=True).wait_for()
        section = server.service.model.network.section
        assert re.fullmatch(
            rf"[\d,]+ parameters, {section.num_layers} layers?, width {section.width}, {section.num_heads} heads?, "
            r"memory of [\d,]+ tokens, vocabulary of [\d,]+, (adaptive|plain) softmax",
            page.text_content("#facts"),
        )
        fill(page, **GREEDY)
        first = turn(seen, "the cat")
        told = server.complete("the cat", **GREEDY, keep_memory=True).json["choices"][0]
        assert first == "the cat" + told["text"]
        more = server.complete(" and", **GREEDY, memory=told["memory"]["id"]).json["choices"][0]["text"]
        assert turn(seen, " and") == f"{first} and{more}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.click("#anew")
        assert page.text_content("#talk") == ""
        assert turn(seen, "the cat") == first
        assert not seen.errors
        assert all(request.startswith((server.url, "data:")) for request in seen.requests)


def test_a_tokens_colour_tells_how_unlikely_it_was_and_a_click_or_key_what_else_was_likely(
    browser: Any, server: Served
) -> None:
    with visit(browser, server.url, width=390) as seen:
        page = seen.page
        fill(page, max_tokens=20, temperature=1, top_k=0, seed=5)
        turn(seen, "the cat")
        settings = {"max_tokens": 20, "temperature": 1, "top_k": 0, "seed": 5, "logprobs": 5}
        told = server.complete("the cat", **settings).json["choices"][0]["logprobs"]["token_logprobs"]
        shades = page.locator(".token").evaluate_all("all => all.map(it => +it.style.getPropertyValue('--surprise'))")
        assert shades
        if len(shades) == len(told):  # else some tokens make one character together
            assert shades == pytest.approx([min(1, -p / 0.6931 / 10) for p in told], abs=2e-3)
        token = page.locator(".token").first
        token.click()
        tables = page.locator("#likeliest table").all()  # one for each token of the character
        assert tables
        for table in tables:
            rows = table.locator("tr").all_text_contents()
            assert len(rows) in (5, 6)
            shares = [float(re.search(r"([\d.e-]+) %$", row)[1]) for row in rows]  # type: ignore[index]
            assert shares == sorted(shares, reverse=True)
            assert table.locator(".chosen").count() == 1
        token.press("Enter")
        assert page.locator("#likeliest").is_hidden()
        assert not seen.errors


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_chips_fields_and_tokens_can_be_seen(browser: Any, server: Served, width: int, dark: bool) -> None:
    with visit(browser, server.url, width=width, dark=dark) as seen:
        page = seen.page
        fill(page, max_tokens=40, temperature=1, top_k=0, seed=5)
        turn(seen, "the cat")
        check_contrast(page, ".legend span, textarea, input, #anew", text=".legend, .legend span, .token, label, .soft")
        assert page.locator(".legend span").evaluate_all("all => new Set(all.map(it => it.offsetHeight)).size") == 1
        assert page.locator("#talk").evaluate("talk => talk.scrollWidth <= talk.clientWidth")


def test_a_turn_that_is_stopped_is_struck_out_and_its_prompt_comes_back(browser: Any) -> None:
    with (
        served(random_model(), max_tokens=20_000) as server,
        visit(browser, server.url, width=390) as seen,
    ):
        page = seen.page
        fill(page, max_tokens=20_000, temperature=0)  # which ends no text here
        page.fill("#prompt", "the cat")
        page.click("#go")
        page.locator(".token").nth(20).wait_for()
        page.click("#stop")
        page.locator("#go:not([disabled])").wait_for()
        assert "does not remember the struck-out text" in page.text_content("#state")
        assert page.locator("#talk > :not(.lost)").count() == 0
        assert page.input_value("#prompt") == "the cat"
        server.wait_until_idle()


def test_what_the_server_refuses_is_told_and_a_key_lets_in(browser: Any) -> None:
    with served(random_model(), api_key="secret") as server, visit(browser, server.url, width=390) as seen:
        page = seen.page
        page.get_by_text("this server requires an API key").wait_for()
        page.fill("#prompt", "the cat")
        fill(page, **GREEDY, key="secret")
        assert turn(seen, "the cat").startswith("the cat")
        fill(page, top_k=3, max_tokens=10_000_000)
        page.fill("#prompt", "more")
        page.click("#go")
        page.get_by_text("this server allows at most").wait_for()
        assert "bad" in page.get_attribute("#state", "class")
        assert page.input_value("#prompt") == "more"
