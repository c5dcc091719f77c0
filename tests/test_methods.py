"""Every merge method has its rows in all rooms, so that a new one that lacks one is found out before it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import get_args

from algm_deploy.evaluation import flops
from algm_deploy.merging import KINDS
from algm_deploy.parity.merges import MERGES
from algm_deploy.recipe.plan import METHODS, Merge, MergePlan, Method, method_settings
from algm_deploy.report import plans


def test_every_method_has_its_rows() -> None:
    assert set(METHODS) == set(get_args(Method)) == set(plans.WORDS)


def test_every_merge_has_its_rows() -> None:
    merges = {row.merge for name, row in METHODS.items() if name != "algm"} | {"clap", "gbm"}
    assert merges == set(get_args(Merge)) == set(KINDS) == set(flops.COSTS) == set(MERGES)


def test_a_setting_is_read_by_one_method() -> None:
    readers = Counter(setting for row in METHODS.values() for setting in row.settings)
    assert set(readers.values()) == {1}
    assert set(readers) == set(method_settings()) <= {item.name for item in fields(MergePlan)}
    assert {row.counts_in for row in METHODS.values()} - {""} <= set(readers)
