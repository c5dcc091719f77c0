"""Brings manifests of schema 1 into today's types; what was written once stays readable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Table = dict[str, Any]

_TOKENS = re.compile(r"tokens_after_(.+)_(mean|min|max)")
_PROVIDERS = {"cpu": "onnxruntime-cpu", "cuda": "onnxruntime-cuda"}
_KEPT = (
    *("environment", "recipe", "files", "replacing", "signature", "preprocessing_sha256", "unused_checkpoint_keys"),
    *("position_embedding_resized_from", "variant"),
)


def upgraded(old: Table) -> Table:
    """A manifest of schema 1 as one of schema 2.

    Sections were tables by a key that began with the runtime; merges stood in the names of figures (`clap`, or `gbm_11`
    among several of a kind).

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    merges = _merges(old)
    return {
        "schema": 2,
        **{key: old[key] for key in _KEPT if key in old},
        "not_run": [_not_run(key, reason) for key, reason in old.get("not_run", {}).items()],
        "parity": [_parity(key, one) for key, one in old.get("parity", {}).items()],
        "evaluations": [_evaluation(key, one, merges) for key, one in old.get("evaluation", {}).items()],
        "speeds": [_speed(key, one, merges) for key, one in old.get("speed", {}).items()],
        "engines": [_engine(key, one) for key, one in old.get("engines", {}).items()],
        "optimized_graphs": [_graph(key, one) for key, one in old.get("onnxruntime", {}).items()],
        "rebuilds": [{"runtime": key, **one} for key, one in old.get("rebuilds", {}).items()],
        "tunings": [_tuning(key, one) for key, one in old.get("tuning", {}).items()],
    }


def _merges(old: Table) -> dict[str, str]:
    """Names of merges then -> now, from the signature, whose names they are now."""
    names = old["signature"]["merges"] if "signature" in old else []
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


def _speed(key: str, old: Table, merges: Mapping[str, str]) -> Table:
    new = {"runtime": key.partition(" ")[0], **_without(_with_tokens(old, merges))}
    if not new.get("merge_efficiency_by_round", True):
        del new["merge_efficiency_by_round"]
    if by_picture := new.get("by_picture"):
        prefix = "tokens_after_"
        tokens = {merges[n.removeprefix(prefix)]: c for n, c in by_picture.items() if n.startswith(prefix)}
        new["by_picture"] = {"latency_ms_p50": by_picture["latency_ms_p50"], "tokens_by_merge": tokens}
    return new


def _engine(key: str, old: Table) -> Table:
    return {"runtime": key, **_without(old, "facts"), **old["facts"]}


def _graph(key: str, old: Table) -> Table:
    return {"runtime": _PROVIDERS[key], "rewrites": _without(old, "stretches"), "segments": old.get("stretches", 0)}


def _tuning(key: str, old: Table) -> Table:
    pictured = old["pictured"] and [old["pictured"]["name"], old["pictured"]["values"]]
    return {"title": key, "page": old["page"], "pictured": pictured, "figures": _without(old, "page", "pictured")}


def _with_tokens(old: Table, merges: Mapping[str, str]) -> Table:
    """The table with its `tokens_after_NAME_mean`, `_min` and `_max` as a list, a merge each."""
    found: dict[str, Table] = {}
    for key, value in old.items():
        if match := _TOKENS.fullmatch(key):
            found.setdefault(merges[match[1]], {})[match[2]] = value
    kept = {key: value for key, value in old.items() if not _TOKENS.fullmatch(key)}
    return {**kept, "tokens": [{"merge": name, **figures} for name, figures in found.items()]}
