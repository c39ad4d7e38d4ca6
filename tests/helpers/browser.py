"""Web pages in a headless Chromium for tests. It records every error and every request, and reaches no other
address."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Visit(NamedTuple):
    """An open page, with the errors and the requests since it was opened."""

    page: Any
    """The page, a playwright.sync_api.Page."""
    errors: list[str]
    """Console messages of type error or warning, and texts of exceptions."""
    requests: list[str]
    """Requested addresses, including that of the page itself."""


def find_chromium() -> str | None:
    """Return the path of Chromium: $CHROMIUM, or the first of its usual names on PATH. None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


CONTRASTS = """elements => {
    const parsed = colour => colour.match(/[\\d.]+/g).map(Number)
    const over = (top, ground) => {
        const [r, g, b, alpha = 1] = parsed(top)
        return [r, g, b].map((value, index) => alpha * value + (1 - alpha) * ground[index])
    }
    const groundOf = element => {
        if (!element) return [255, 255, 255]
        return over(getComputedStyle(element).backgroundColor, groundOf(element.parentElement))
    }
    const lightness = colour => {
        const linear = colour.map(value => value / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2]
    }
    const contrast = (one, other) => {
        const [low, high] = [lightness(one), lightness(other)].sort((a, b) => a - b)
        return (high + .05) / (low + .05)
    }
    return elements.map(element => {
        const style = getComputedStyle(element), outside = groundOf(element.parentElement), inside = groundOf(element)
        return [contrast(over(style.color, inside), inside), contrast(over(style.borderTopColor, outside), outside)]
    })
}"""
"""JavaScript that returns for each element the contrast of its text with its background, and of its border with its
surroundings (WCAG 2.1)."""


def check_contrast(page: Any, frames: str, *, text: str) -> None:
    """Check WCAG 2.1, AA: a contrast of 3 between these borders and the page, and of 4.5 between text and ground."""
    for _, border in page.locator(frames).evaluate_all(CONTRASTS):
        assert border >= 3
    for ink, _ in page.locator(text).evaluate_all(CONTRASTS):
        assert ink >= 4.5


@contextmanager
def started(executable: str) -> Iterator[Any]:
    """Yield a browser, which several visits can use."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visit(
    browser: Any, place: Path | str, *, width: int, dark: bool = False, javascript: bool = True
) -> Iterator[Visit]:
    """Open a file, or the first page of a server, in a window of a width in pixels. Requests to other addresses are
    aborted."""
    address = place if isinstance(place, str) else place.resolve().as_uri()
    own = f"{address}/" if isinstance(place, str) else address
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        java_script_enabled=javascript,
    )
    page = context.new_page()
    seen = Visit(page, [], [])
    page.on(
        "console", lambda message: seen.errors.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    context.route("**/*", lambda route: route.continue_() if route.request.url.startswith(own) else route.abort())
    page.goto(address, wait_until="load")
    yield seen
    context.close()
