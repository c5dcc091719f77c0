"""What to type: the judgement for a terminal, or for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from algm_deploy.doctor.rules import Finding


def for_people(findings: Sequence[Finding]) -> str:
    """The findings for a terminal: facts, a table of runtimes, and what to change."""
    facts = [(one.topic, one.found) for one in findings if one.step is None and one.ok]
    steps = {(one.topic, one.step): one for one in findings if one.step}
    rows = [("runtime", "build", "execute", "")]
    for runtime in dict.fromkeys(topic for topic, _ in steps):
        build, execute = steps[runtime, "build"], steps[runtime, "execute"]
        first = next((one for one in (build, execute) if not one.ok), execute)
        rows.append((runtime, _yes(build), _yes(execute), first.found))
    lines = [*_columns(facts), "", *_columns(rows)]
    if cures := _cures(findings):
        lines += ["", "To change:", *(f"  {line}" for line in cures)]
    return "\n".join(lines)


def for_programs(findings: Sequence[Finding]) -> str:
    """The findings as a JSON array of objects, in order."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def _cures(findings: Sequence[Finding]) -> list[str]:
    """Two lines a cure: what is wrong with whom, and what to do; the same cure stands once."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for one in findings:
        if not one.ok:
            topics = wrong.setdefault((one.found, one.cure), [])
            topics += [one.topic] * (one.topic not in topics)
    return [
        line for (found, cure), topics in wrong.items() for line in (f"{', '.join(topics)}: {found}", f"    {cure}")
    ]


def _yes(finding: Finding) -> str:
    return "yes" if finding.ok else "no"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
