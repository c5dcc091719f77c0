"""What tuning found, in the terminal, as one self-contained HTML page, and as a section of a bundle's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from algm_deploy import __version__
from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.store import Bundle
from algm_deploy.report.gallery import Example, data_url
from algm_deploy.report.plots import Series, histogram, scatter
from algm_deploy.report.tables import html_table, text_table
from algm_deploy.tuning.findings import Counts, Finding, Page, Plot

_STYLE = Path(__file__).with_name("page.css")


def finding_text(finding: Finding) -> str:
    """Sentences and tables for a terminal."""
    tables = [f"{table.caption}\n{text_table(table.header, table.rows)}" for table in finding.page.tables]
    return "\n\n".join(("\n".join(finding.page.lines), *tables))


def write_finding(finding: Finding, name: str, target: Path, examples: Sequence[Example] = ()) -> Path:
    """Writes the page about a finding on the network called `name`; `examples` show photos at its thresholds."""
    title = f"{escape(name)}: {escape(finding.title)}"
    body = "".join((*page_html(finding.page), *examples_html(examples)))
    with write_atomically(target) as path:
        path.write_text(
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'\">"
            f"<title>{title}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>"
            f'<header><p class="kind">Tuning</p><h1>{title}</h1></header><main>{body}</main>'
            f"<footer>algm-deploy {__version__}</footer></body></html>\n",
            encoding="utf-8",
        )
    return target


def tuning_section(bundle: Bundle, examples: Sequence[Example] = ()) -> Iterator[str]:
    """What `tune` found on a bundle, from its manifest; pictures where there are photos to show."""
    for title, record in bundle.section("tuning").items():
        yield f"<h3>{escape(title)}</h3>"
        yield from page_html(Page.from_record(record))
    yield from examples_html(examples)


def page_html(page: Page) -> Iterator[str]:
    """Sentences, plots and tables."""
    yield from (f"<p>{escape(line)}</p>" for line in page.lines)
    drawings = [_figure(_drawn(plot), plot.caption) for plot in page.plots]
    drawings += [_figure(_counted(counts), counts.caption) for counts in page.counts]
    yield f'<div class="plots">{"".join(drawings)}</div>'
    yield from (html_table(table.header, table.rows, table.caption) for table in page.tables)


def examples_html(examples: Sequence[Example]) -> Iterator[str]:
    """Photos in rows, each at several thresholds."""
    if examples:
        yield (
            "<h3>What merges</h3><p>Each token has the mean colour of its patches; light lines surround neighbouring "
            "patches that share a token.</p>"
        )
    for example in examples:
        figures = "".join(
            f'<figure><img src="{data_url(panel)}" alt="{escape(panel.title)}"><figcaption>'
            f"<b>{escape(panel.title)}</b> {escape(panel.subtitle)}</figcaption></figure>"
            for panel in example.panels
        )
        yield f'<div class="pictures">{figures}</div>'


def _drawn(plot: Plot) -> str:
    return scatter(plot.x_label, plot.y_label, [Series(name, tuple(points)) for name, points in plot.series.items()])


def _counted(counts: Counts) -> str:
    return histogram(counts.edges, counts.windows, counts.means)


def _figure(drawing: str, caption: str) -> str:
    return f'<figure class="plotted">{drawing}<figcaption>{escape(caption)}</figcaption></figure>'
