"""Brings manifests of schema 1 into today's types; what was written once stays readable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from algm_deploy.bundle.records import storable
from algm_deploy.errors import RecipeError
from algm_deploy.recipe.conversion import converted
from algm_deploy.wording import merge_titles

Table = dict[str, Any]

_TOKENS = re.compile(r"tokens_after_(.+)_(mean|min|max)")
_PROVIDERS = {"cpu": "onnxruntime-cpu", "cuda": "onnxruntime-cuda"}
_SECTIONS = ("parity", "evaluation", "speed", "engines", "onnxruntime", "rebuilds", "tuning")


def upgraded(old: Table) -> Table:
    """A manifest of schema 1 as one of schema 2, before it is checked.

    Sections were tables by a key that began with the runtime; merges stood in the names of figures (`clap`, or `gbm_11`
    among several of a kind).

    Raises:
        RecipeError: something of it cannot be read; it names the place.
    """
    signature = converted(Table, old.get("signature", {}), "signature")
    merges = _merges(converted(tuple[str, ...], signature.get("merges", ()), "signature.merges"))
    defaults = converted(dict[str, float], signature.get("defaults", {}), "signature.defaults")

    def records(section: str, upgrade: Callable[[str, Table], Table]) -> list[Table]:
        found = []
        for key, record in converted(dict[str, Table], old.get(section, {}), section).items():
            try:
                found.append(upgrade(key, record))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                said = f"{type(error).__name__} {error}"
                raise RecipeError(f"expected a record of schema 1 as {section}.{key:.100}, got {said:.100}") from error
        return found

    reasons = converted(dict[str, str], old.get("not_run", {}), "not_run")
    return {
        **{key: part for key, part in old.items() if key not in _SECTIONS},
        **({"recipe": _recipe(old["recipe"])} if "recipe" in old else {}),
        "not_run": [_not_run(key, reason) for key, reason in reasons.items()],
        "parity": records("parity", _parity),
        "evaluations": records("evaluation", lambda key, one: _evaluation(key, one, merges)),
        "speeds": records("speed", lambda key, one: _speed(key, one, merges, defaults)),
        "engines": records("engines", _engine),
        "optimized_graphs": records("onnxruntime", _graph),
        "rebuilds": records("rebuilds", lambda key, one: {"runtime": key, **one}),
        "tunings": records("tuning", _tuning),
    }


def _recipe(old: Any) -> Any:
    """GBM's rule was `gbm_mode`. What is no recipe stays as it is, for the reader to refuse."""
    plan = old.get("merging") if isinstance(old, dict) else None
    if not isinstance(plan, dict) or "gbm_mode" not in plan:
        return old
    return {**old, "merging": {"gbm" if key == "gbm_mode" else key: value for key, value in plan.items()}}


def _merges(names: tuple[str, ...]) -> dict[str, str]:
    """Names of merges then -> now, which are those of the signature."""
    kinds = [name.partition("_")[0] for name in names]
    return {kind if kinds.count(kind) == 1 else name: name for kind, name in zip(kinds, names, strict=True)}


def _without(table: Mapping[str, Any], *keys: str) -> Table:
    return {key: value for key, value in table.items() if key not in (*keys, "schema_version")}


def _not_run(key: str, reason: str) -> Table:
    step, _, runtime = key.partition(" ")
    return {"step": step, "runtime": runtime, "reason": reason}


def _parity(key: str, old: Table) -> Table:
    return {"runtime": key, **_without(old, "passed")}


def _evaluation(key: str, old: Table, merges: Mapping[str, str]) -> Table:
    derived = ("complete", "images_failed", "gflops_per_window_mean")
    histograms = old["token_histograms"]
    windows = {merges[name]: counts for name, counts in histograms["windows_by_merge"].items()}
    slices = {name: _with_tokens(part, merges) for name, part in old["slices"].items()}
    return {
        "runtime": key.partition(" ")[0],
        **_without(_with_tokens(old, merges), *derived),
        "token_histograms": {**histograms, "windows_by_merge": windows},
        "slices": slices,
    }


def _speed(key: str, old: Table, merges: Mapping[str, str], defaults: Mapping[str, float]) -> Table:
    """The key alone said at which thresholds a whole run was timed: `torch mixed dense batch 8 clap_threshold 0.9`.

    Stages were timed in calls of their own and did not add up; of them only the reading of photos stays.
    """
    runtime, _, _, _, _, *given = key.split()
    thresholds = {**defaults, **dict(zip(given[::2], map(float, given[1::2]), strict=True))}
    new = {**_without(_with_tokens(old, merges)), "runtime": runtime, "thresholds": storable(thresholds)}
    if not new.get("merge_efficiency_by_round", True):
        del new["merge_efficiency_by_round"]
    stages = new.pop("stages", {})
    new["reading"] = {name: stages[name] for name in ("decode_ms_p50", "preprocess_ms_p50") if name in stages}
    if by_picture := new.get("by_picture"):
        prefix = "tokens_after_"
        tokens = {merges[n.removeprefix(prefix)]: c for n, c in by_picture.items() if n.startswith(prefix)}
        new["by_picture"] = {"latency_ms_p50": by_picture["latency_ms_p50"], "tokens_by_merge": tokens}
    return new


def _engine(key: str, old: Table) -> Table:
    """Its plugin library was told by its own bytes; no library of today says that it was made of those."""
    new = {"runtime": key, **_without(old, "facts"), **old["facts"]}
    return {**_without(new, "plugin_hash"), "plugin_sources": new["plugin_hash"]}


def _graph(key: str, old: Table) -> Table:
    return {"runtime": _PROVIDERS[key], "rewrites": _without(old, "stretches"), "segments": old.get("stretches", 0)}


def _tuning(title: str, old: Table) -> Table:
    """Shares of attention have all their figures; of the others the page is kept, which says more than they do."""
    figures = _without(old, "page", "pictured")
    if "attention_dense_percent_by_block" in old:
        return {"kind": "attention", "title": title, **_without(figures, "plan"), **_merging(old["plan"])}
    parts = old["page"]
    counts = [
        (caption, edges, *({titles[name]: part for name, part in by_merge.items()} for by_merge in (windows, means)))
        for caption, edges, windows, means in parts["counts"]
        for titles in [merge_titles([*windows])]
    ]
    pictured = old["pictured"] and [old["pictured"]["name"], old["pictured"]["values"]]
    return {"kind": "page", "title": title, **parts, "counts": counts, "pictured": pictured, "figures": figures}


def _merging(plan: Table) -> Table:
    """Last merging block and thresholds of a plan."""
    tome = [layer for layer, r in enumerate(plan["tome_r"], 1) if r]
    read = {name: plan[f"{name}_threshold"] for name in ("clap", "gbm") if plan[f"{name}_layers"]}
    return {
        "last_merge": max((*plan["clap_layers"], *plan["gbm_layers"], *tome)),
        "thresholds": {f"{name}_threshold": value for name, value in read.items()},
    }


def _with_tokens(old: Table, merges: Mapping[str, str]) -> Table:
    """The table with its `tokens_after_NAME_mean`, `_min` and `_max` as a list, a merge each."""
    found: dict[str, Table] = {}
    for key, value in old.items():
        if match := _TOKENS.fullmatch(key):
            found.setdefault(merges[match[1]], {})[match[2]] = value
    kept = {key: value for key, value in old.items() if not _TOKENS.fullmatch(key)}
    return {**kept, "tokens": [{"merge": name, **figures} for name, figures in found.items()]}
