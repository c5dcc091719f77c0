"""What a tuning run found, in the terminal and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from algm_deploy import __version__
from algm_deploy.bundle import write_atomically
from algm_deploy.report.plots import Series, histogram, scatter
from algm_deploy.report.tables import html_table, merges_of, text_table
from algm_deploy.tuning.findings import Finding, Plot

_STYLE = Path(__file__).with_name("page.css")


def finding_text(finding: Finding) -> str:
    """Sentences and tables for a terminal."""
    tables = [f"{table.caption}\n{text_table(table.header, table.rows)}" for table in finding.tables]
    return "\n\n".join(("\n".join(finding.lines), *tables))


def write_finding(finding: Finding, name: str, target: Path) -> Path:
    """Writes the page about a finding on the network called `name`."""
    title = f"{escape(name)}: {escape(finding.title)}"
    with write_atomically(target) as path:
        path.write_text(
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>{title}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>"
            f'<header><p class="kind">Tuning</p><h1>{title}</h1></header><main>{"".join(_body(finding))}</main>'
            f"<footer>algm-deploy {__version__}</footer></body></html>\n",
            encoding="utf-8",
        )
    return target


def _body(finding: Finding) -> Iterator[str]:
    yield from (f"<p>{escape(line)}</p>" for line in finding.lines)
    drawings = [_figure(_drawn(plot), plot.caption) for plot in finding.plots]
    if finding.tokens is not None and (merges := merges_of(finding.tokens)):
        found = finding.tokens["token_histograms"]
        means = {merge: finding.tokens[f"tokens_after_{merge}_mean"] for merge in merges}
        drawing = histogram(found["token_edges"], found["windows_by_merge"], means)
        drawings.append(_figure(drawing, "tokens of the windows it was tuned on, at the point that is marked"))
    yield f'<div class="plots">{"".join(drawings)}</div>'
    yield from (html_table(table.header, table.rows, table.caption) for table in finding.tables)


def _drawn(plot: Plot) -> str:
    return scatter(plot.x_label, plot.y_label, [Series(name, tuple(points)) for name, points in plot.series.items()])


def _figure(drawing: str, caption: str) -> str:
    return f'<figure class="plotted">{drawing}<figcaption>{escape(caption)}</figcaption></figure>'
