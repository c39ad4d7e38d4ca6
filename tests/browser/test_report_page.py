"""The pages of `txl report` and `txl compare` in a real browser, in narrow and wide windows, with light and dark
colours."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.browser import check_contrast, find_chromium, started, visit
from tests.helpers.made_runs import make_run
from txl_dist.report.compare import write_comparison
from txl_dist.report.report import write_report

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH and $CHROMIUM is not set"),
]
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM is not None
    with started(CHROMIUM) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        make_run(folder / "a", max_steps=1000),
        make_run(folder / "b-at-twice-the-rate", seed=2, lr=4e-3, num_ranks=16),
    ]
    write_report(runs[0])
    write_comparison(runs, out=folder / "compare.html")
    empty = folder / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text('{"kind": "event", "event": "start", "step": 0}\n', encoding="utf-8")
    write_report(empty)
    return {"report": runs[0] / "report.html", "compare": folder / "compare.html", "empty": empty / "report.html"}


TEXT_OUTSIDE = """svg => {
    const frame = svg.getBoundingClientRect()
    const isOutside = box => box.top < frame.top - 1 || box.bottom > frame.bottom + 1 || box.left < frame.left - 1 ||
        box.right > frame.right + 1
    const outside = [...svg.querySelectorAll('text')].filter(it => isOutside(it.getBoundingClientRect()))
    return outside.map(it => it.textContent)
}"""
"""Labels of a picture that are cut off."""


def pixels_of(element: Any) -> np.ndarray:
    """What is seen of it: (height, width, 3) from 0 to 255."""
    return np.asarray(Image.open(io.BytesIO(element.screenshot())).convert("RGB")).astype(int)


def colours_of(pixels: np.ndarray) -> np.ndarray:
    """How many pixels each colour has."""
    return np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)[1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "compare", "empty"])
def test_a_page_opens_without_an_error_or_a_request_and_fits(
    browser: Any, pages: dict[str, Path], name: str, width: int
) -> None:
    with visit(browser, pages[name], width=width) as seen:
        for details in seen.page.query_selector_all("details"):
            details.evaluate("element => element.open = true")
        seen.page.wait_for_timeout(200)
        assert seen.errors == []
        assert seen.requests == [pages[name].resolve().as_uri()]
        assert seen.page.title() != "struck"
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        levels = seen.page.eval_on_selector_all("h1,h2,h3,h4,h5,h6", "all => all.map(one => Number(one.tagName[1]))")
        assert levels[0] == 1
        assert all(levels[i + 1] - levels[i] <= 1 for i in range(len(levels) - 1))
        ids = seen.page.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "num_pictures"), [("report", 21), ("compare", 7)])
def test_no_picture_is_empty_and_each_is_as_wide_as_the_page_lets_it(
    browser: Any, pages: dict[str, Path], name: str, num_pictures: int, width: int, dark: bool
) -> None:
    with visit(browser, pages[name], width=width, dark=dark) as seen:
        pictures = seen.page.query_selector_all("figure svg")
        assert len(pictures) == num_pictures
        for element in pictures:
            box = element.bounding_box()
            assert box["width"] >= (0.85 * width if width < 500 else 0.35 * width)
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            pixels = pixels_of(element)
            colours = colours_of(pixels)
            assert len(colours) > 40
            assert colours.max() < 0.985 * colours.sum()
            assert (pixels[1, 1].max() < 60) == dark  # the page's own ground shows through
            labels = element.evaluate(
                "svg => [...svg.querySelectorAll('text')].map(t => [getComputedStyle(t).fill, "
                "t.getBoundingClientRect().height])"
            )
            assert len(labels) > 5
            assert element.evaluate(TEXT_OUTSIDE) == []
            for fill, height in labels:
                lightness = max(int(part) for part in fill[4:-1].split(","))
                assert lightness > 200 if dark else lightness < 60
                assert height >= 8  # pixels: still to be read on a phone


def test_a_chart_is_drawn_where_its_axis_is_not(browser: Any, pages: dict[str, Path]) -> None:
    """An empty chart would have axes and labels too: the colours of the lines must be there."""
    with visit(browser, pages["report"], width=1280) as seen:
        for element in seen.page.query_selector_all("figure svg"):
            coloured = np.ptp(pixels_of(element), axis=2) > 60
            assert coloured.sum() > 60, element.get_attribute("aria-label")


LINES_OF_TEXT = """cells => cells.map(cell => {
    const range = document.createRange()
    range.selectNodeContents(cell)
    return [cell.innerText, new Set([...range.getClientRects()].map(box => Math.round(box.top))).size]
})"""


@pytest.mark.parametrize("name", ["report", "compare"])
def test_no_number_is_broken_on_a_phone(browser: Any, pages: dict[str, Path], name: str) -> None:
    with visit(browser, pages[name], width=390) as seen:
        for details in seen.page.query_selector_all("details"):
            details.evaluate("element => element.open = true")
        cells = seen.page.eval_on_selector_all("td.number", LINES_OF_TEXT)
        assert len(cells) > 10
        assert [text for text, num_lines in cells if num_lines != 1] == []
        if name == "report":  # the check sees what it forbids: words do break
            assert any(num_lines > 1 for _, num_lines in seen.page.eval_on_selector_all("td.long", LINES_OF_TEXT))


def test_wide_tables_scroll_inside_their_own_frame(browser: Any, pages: dict[str, Path]) -> None:
    with visit(browser, pages["compare"], width=200) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 200
        frames = seen.page.query_selector_all(".scroll")
        assert len(frames) == 2
        assert frames[0].evaluate("frame => frame.scrollWidth > frame.clientWidth")
        for frame in frames:
            assert frame.bounding_box()["width"] <= 200
            assert frame.get_attribute("tabindex") == "0"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_and_their_text_can_be_seen(browser: Any, pages: dict[str, Path], width: int, dark: bool) -> None:
    with visit(browser, pages["report"], width=width, dark=dark) as seen:
        assert seen.page.locator(".fact").count() > 10
        check_contrast(seen.page, ".fact", text=".fact dt, .fact dd, .fact .note")


def test_the_page_is_whole_without_scripts(browser: Any, pages: dict[str, Path]) -> None:
    with visit(browser, pages["report"], width=390, javascript=False) as seen:
        assert len(seen.page.query_selector_all("figure svg")) == 21
        assert not seen.page.is_visible("td:has-text('training waited') >> nth=0")
        seen.page.click("details > summary:has-text('events')")
        assert seen.page.is_visible("td:has-text('training waited') >> nth=0")


def test_printing_is_black_on_white_whatever_the_screen(browser: Any, pages: dict[str, Path]) -> None:
    with visit(browser, pages["report"], width=1280, dark=True) as seen:
        seen.page.emulate_media(media="print", color_scheme="dark")
        ground, ink = seen.page.evaluate(
            "(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))"
        )
        assert (ground, ink) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
        assert seen.page.pdf().startswith(b"%PDF")
        assert seen.requests == [pages["report"].resolve().as_uri()]


def test_the_checks_see_what_they_forbid(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<h1>bad</h1><div style='width: 600px'>wide</div><img src='http://192.0.2.1/x.png'>"
        "<script>fetch('http://192.0.2.1/y').catch(() => 0); nothing()</script><figure><svg></svg></figure>",
        encoding="utf-8",
    )
    with visit(browser, page, width=390) as seen:
        seen.page.wait_for_timeout(200)
        assert {"http://192.0.2.1/x.png", "http://192.0.2.1/y"} <= set(seen.requests)
        assert any("nothing is not defined" in error for error in seen.errors)
        assert seen.page.evaluate("document.documentElement.scrollWidth") > 390
        assert len(colours_of(pixels_of(seen.page.query_selector("svg")))) == 1
