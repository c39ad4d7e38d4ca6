"""Charts: thinning loses nothing visible, and a page contains no foreign content."""

import re
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest

from txl_dist.report.figures import (
    COLOURS,
    NUM_BINS,
    Chart,
    Line,
    Mark,
    draw,
    thinned,
)


def chart(y: np.ndarray, *, label: str = "", name: str = "test") -> Chart:
    return Chart(name, [Line(label, np.arange(float(len(y))), y)], "step", "loss, nats")


def test_thinning_keeps_the_extremes_and_the_mean_of_every_bin() -> None:
    y = np.random.default_rng(1).normal(size=100_003)
    y[[70_001, 31_337]] = 50.0, -40.0
    thin = thinned(np.arange(float(len(y))), y)
    assert len(thin.x) == NUM_BINS
    assert (thin.high.max(), thin.low.min()) == (50.0, -40.0)
    assert abs(thin.x[thin.high.argmax()] - 70_001) < len(y) / NUM_BINS
    assert (thin.low <= thin.mean).all()
    assert (thin.mean <= thin.high).all()
    assert np.isclose(thin.mean.mean(), y.mean(), atol=1e-3)


def test_few_points_stay_as_they_are_in_order_of_x() -> None:
    thin = thinned(np.array([3.0, 1.0, 2.0, np.nan, 4.0]), np.array([30.0, 10.0, np.nan, 5.0, 40.0]))
    assert thin.x.tolist() == [1.0, 3.0, 4.0]
    assert thin.mean.tolist() == thin.low.tolist() == thin.high.tolist() == [10.0, 30.0, 40.0]


def test_many_points_at_one_place_are_one_bin() -> None:
    thin = thinned(np.ones(10_000), np.arange(10_000.0))
    assert (thin.x.tolist(), thin.low.tolist(), thin.high.tolist()) == ([1.0], [0.0], [9999.0])


def test_the_spike_of_one_step_in_a_million_is_drawn() -> None:
    y = np.ones(1_000_000)
    flat = draw(chart(y), alt="")
    y[654_321] = 1.0001
    assert draw(chart(y), alt="") != flat


def test_the_same_numbers_give_the_same_bytes_whatever_the_users_settings() -> None:
    y = np.random.default_rng(2).normal(size=5000)
    first = draw(chart(y), marks=[Mark(100.0, True), Mark(200.0, False)], alt="a")
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path", "lines.linestyle": ":", "axes.xmargin": 0.3}):
        assert draw(chart(y), marks=[Mark(100.0, True), Mark(200.0, False)], alt="a") == first
        assert matplotlib.rcParams["font.size"] == 20


def test_a_picture_is_small_valid_and_refers_to_itself_alone() -> None:
    svg = draw(chart(np.random.default_rng(3).normal(size=200_000)), alt='a "b" <c>')
    root = ET.fromstring(svg)
    assert root.attrib["aria-label"] == 'a "b" <c>'
    assert len(svg) < 60_000
    addresses = set(re.findall(r"https?://[^\"'\s]+", svg))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg)) <= {(one, "") for one in ids} | {
        ("", one) for one in ids
    }


def test_ids_of_two_pictures_of_a_page_differ() -> None:
    y = np.arange(30.0)
    ids = [set(re.findall(r' id="([^"]+)"', draw(chart(y, name=name), alt=""))) for name in ("one", "two")]
    assert ids[0]
    assert ids[0].isdisjoint(ids[1])


@pytest.mark.parametrize("label", ["</svg><script>alert(1)</script>", "$x^{$", "-->", "a & b", "\u00e9\u4e2d"])
def test_labels_are_text_whatever_they_hold(label: str) -> None:
    y = np.arange(5.0)
    lines = [Line(label, y, y), Line("other", y, -y)]
    svg = draw(Chart("test", lines, "step", "loss"), alt="")
    texts = [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert label in texts


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-1.0, 5.0], [1e-30, 1e30], [2.0, 2.0000001]])
def test_odd_ranges_can_be_drawn(values: list[float]) -> None:
    for is_log in (False, True):
        svg = draw(chart(np.array(values))._replace(is_log=is_log), marks=[Mark(0.0, True)], alt="")
        paths = [element.get("d", "") for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
        assert any(paths)
        assert not any("nan" in path or "inf" in path for path in paths)


def luminance(colour: str) -> float:
    """Relative luminance, from 0 for black to 1 for white (WCAG 2); two differ in contrast by (a + .05) / (b + .05)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_lines_stand_out_from_light_and_from_dark_ground() -> None:
    light, dark = luminance("#ffffff"), luminance("#14171a")
    for colour in COLOURS:
        assert (light + 0.05) / (luminance(colour) + 0.05) > 3
        assert (luminance(colour) + 0.05) / (dark + 0.05) > 3
