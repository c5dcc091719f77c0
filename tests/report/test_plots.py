"""Plots: every value drawn where its axis says, nothing outside the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from algm_deploy.report.html import render
from algm_deploy.report.plots import Histogram, Scatter, Series

CURVE = Series("measured", ((20.17, 66.63, "tau 0.9319"), (37.44, 70.87, "dense"), (26.9, 69.69, "tau 0.98")))


def scatter(x_label: str, y_label: str, series: list[Series]) -> str:
    return render("scatter.jinja", plot=Scatter("caption", x_label, y_label, series))


def histogram(edges: list[float], counts: dict[str, list[int]], means: dict[str, float]) -> str:
    return render("histogram.jinja", plot=Histogram("caption", edges, counts, means))


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg[: svg.index("</svg>") + len("</svg>")])  # noqa: S314 - written by the code above


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter("text")]


@pytest.mark.parametrize(
    "series",
    [
        [CURVE],
        [Series("one point", ((5.0, 50.0, "a"),))],
        [Series("equal values", ((1.0, 7.0, "a"), (2.0, 7.0, "b")))],
        [CURVE, Series("published", ((26.3, 46.4, "ALGM"),), hollow=True)],
        [Series("small", ((1e-4, 1e5, "a"), (3e-4, 2e5, "b")))],
        [Series("zero", ((0.0, 0.0, "a"),))],
    ],
    ids=lambda series: series[0].name,
)
def test_everything_lies_inside_the_picture(series: list[Series]) -> None:
    svg = scatter("GMACs", "mIoU %", series)
    root = drawn(svg)
    assert "nan" not in svg
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for circle in root.iter("circle"):
        x, y = numbers(circle, "cx", "cy")
        assert 54 <= x <= width - 14
        assert 12 <= y <= height - 46
    for line in root.iter("line"):
        assert all(0 <= value <= max(width, height) for value in numbers(line, "x1", "y1", "x2", "y2"))
    ticks = [text for text in texts(root) if re.fullmatch(r"-?[\d.e+-]+", text)]
    assert 4 <= len(ticks) <= 16


def test_points_lie_where_their_ticks_say() -> None:
    root = drawn(scatter("GMACs", "mIoU %", [CURVE]))
    labels = {element.text: numbers(element, "x", "y") for element in root.iter("text")}
    (x20, _), (x30, _) = labels["20"], labels["30"]
    (_, y66), (_, y70) = labels["66"], labels["70"]
    points = [numbers(circle, "cx", "cy") for circle in root.iter("circle")]
    expected = sorted((x, y) for x, y, _ in CURVE.points)
    for (x, y), (value_x, value_y) in zip(points, expected, strict=True):
        assert x20 + (value_x - 20) / 10 * (x30 - x20) == pytest.approx(x, abs=0.2)
        assert y66 - 5 + (value_y - 66) / 4 * (y70 - y66) == pytest.approx(y, abs=0.2)
    assert {"tau 0.9319", "tau 0.98", "dense", "GMACs", "mIoU %"} <= set(labels)


def test_marks_of_every_shape_lie_at_their_points() -> None:
    """Polygons are moved to their point: each shape stands where the circle of a series alone would."""
    points = ((25.0, 60.0, "a"), (26.0, 61.0, "b"))
    root = drawn(scatter("x", "y", [Series(str(index), points) for index in range(4)]))
    circles = [numbers(circle, "cx", "cy") for circle in root.iter("circle")]
    moved = [re.findall(r"[\d.]+", polygon.attrib["transform"]) for polygon in root.iter("polygon")]
    assert [list(map(float, place)) for place in moved] == 3 * circles
    assert len({polygon.attrib["points"] for polygon in root.iter("polygon")}) == 3


@pytest.mark.parametrize("rising", [True, False])
def test_labels_keep_clear_of_the_line(rising: bool) -> None:
    heights = (60.0, 65.0, 70.0) if rising else (70.0, 65.0, 60.0)
    root = drawn(scatter("x", "y", [Series("s", tuple((float(i), y, f"p{i}") for i, y in enumerate(heights)))]))
    points = [numbers(circle, "cx", "cy") for circle in root.iter("circle")]
    (x0, y0), (x1, y1) = points[0], points[-1]
    for element in root.iter("text"):
        if (element.text or "").startswith("p"):
            index = int(str(element.text)[1:])
            x, y = numbers(element, "x", "y")
            on_line = y0 + (x - x0) / (x1 - x0) * (y1 - y0)
            assert (y < on_line) == (y < points[index][1]), element.text


def test_several_series_differ_in_shape_and_have_a_legend() -> None:
    svg = scatter("x", "y", [CURVE, Series("paper's <own>", ((25.0, 60.0, "a"),), hollow=True)])
    root = drawn(svg)
    assert len(list(root.iter("circle"))) == 3
    (square,) = root.iter("polygon")
    assert square.attrib["fill"] == "#fff"
    assert len(list(root.iter("polyline"))) == 1  # figures of others are not connected
    assert "paper&#39;s &lt;own&gt;" in svg
    assert '<ul class="legend">' in svg
    assert "legend" not in scatter("x", "y", [CURVE])


def test_bars_are_as_high_as_their_counts_and_as_wide_as_their_bins() -> None:
    edges = [0.0, 256.0, 512.0, 768.0, 1024.0]
    root = drawn(histogram(edges, {"CLAP": [0, 2, 8, 4], "GBM": [1, 0, 0, 0]}, {"CLAP": 640.0, "GBM": 100.0}))
    bars = [numbers(rect, "x", "y", "width", "height") for rect in root.iter("rect")]
    assert len(bars) == 4  # empty bins draw nothing
    heights = [bar[3] for bar in bars]
    assert heights[0] / heights[1] == pytest.approx(2 / 8, abs=0.01)
    assert heights[2] / heights[1] == pytest.approx(4 / 8, abs=0.01)
    assert heights[3] == heights[1] == 96
    start, end = numbers(next(root.iter("line")), "x1", "x2")
    assert all(width == pytest.approx((end - start) / 4 - 1, abs=0.2) for _, _, width, _ in bars)
    assert {"8", "1", "mean 640", "mean 100", "after CLAP", "after GBM", "tokens of a window"} <= set(texts(root))
    means = [numbers(line, "x1")[0] for line in root.iter("line") if "stroke-dasharray" in line.attrib]
    assert means == pytest.approx([start + share * (end - start) for share in (640 / 1024, 100 / 1024)], abs=0.1)


def test_a_histogram_without_windows_is_empty_but_drawn() -> None:
    root = drawn(histogram([0.0, 512.0, 1024.0], {"CLAP": [0, 0]}, {}))
    assert list(root.iter("rect")) == []
    assert "after CLAP" in texts(root)
