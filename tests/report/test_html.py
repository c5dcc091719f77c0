"""Templates: they escape every value, refuse a missing one, and write tables as readers want them."""

from __future__ import annotations

import re

import pytest
from jinja2 import UndefinedError

from algm_deploy.report.html import TEMPLATES, render

PARTS = TEMPLATES.get_template("parts.jinja").module


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="plot"):
        render("scatter.jinja")


@pytest.mark.parametrize("template", [name for name in TEMPLATES.list_templates() if name.endswith(".jinja")])
def test_nothing_switches_escaping_off(template: str) -> None:
    source, _, _ = TEMPLATES.loader.get_source(TEMPLATES, template)  # type: ignore[union-attr]
    assert not re.search(r"autoescape|\|\s*safe\b|Markup", source)


def test_numbers_lose_the_digits_that_rounding_adds() -> None:
    assert TEMPLATES.from_string("{{ a }} {{ b }} {{ c }}").render(a=0.1 + 0.2, b=20.0, c=1013) == "0.3 20 1013"


def test_cells_are_escaped_aligned_and_coloured() -> None:
    rows = [("a<b>", "12.50 (-1.25)", "passed"), ('"c"', "-", "FAILED")]
    html = PARTS.table(("name", "mIoU %", "result"), rows, "x & y")
    assert '<p class="caption">x &amp; y</p>' in html
    assert '<th>name</th><th class="n">mIoU %</th><th>result</th>' in html
    assert '<td>a&lt;b&gt;</td><td class="n">12.50 (-1.25)</td><td class="good">passed</td>' in html
    assert '<td>&#34;c&#34;</td><td class="n">-</td><td class="bad">FAILED</td>' in html
    assert "--columns:3" in html
    assert "caption" not in PARTS.table(("a",), [("1",)])


def test_commands_in_a_text_stand_out() -> None:
    assert PARTS.with_code("type `a <b>` & `c`") == "type <code>a &lt;b&gt;</code> &amp; <code>c</code>"
    assert PARTS.with_code("nothing") == "nothing"
