"""HTML from `templates/`: every value is escaped, and a name that is missing is an error."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from algm_deploy import __version__
from algm_deploy.report.tables import numeric_columns


def render(template: str, **values: Any) -> str:
    """The HTML that a template makes of these values. Pages extend `base.jinja`; `parts.jinja` has what they share.

    Bytes of a file's name that are no UTF-8 stand in it as escapes, as they do in a terminal.

    Raises:
        UndefinedError: the template asks for a value that was not given.
    """
    page = TEMPLATES.get_template(template).render(values)
    return page.encode("utf-8", "backslashreplace").decode()


def _shortened(value: Any) -> Any:
    """Numbers without the digits that rounding adds: 0.3 for 0.30000000000000004."""
    return f"{value:.6g}" if isinstance(value, float) else value


TEMPLATES = Environment(
    loader=PackageLoader("algm_deploy.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    finalize=_shortened,
)
TEMPLATES.globals |= {"version": __version__, "numeric_columns": numeric_columns}
