"""The same words in tables, pages and messages."""

from __future__ import annotations

import pytest

from algm_deploy.wording import either, without_merging


@pytest.mark.parametrize(("names", "said"), [(["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")])
def test_one_of_several(names: list[str], said: str) -> None:
    assert either(names) == said


@pytest.mark.parametrize(
    ("variant", "said"),
    [("dense", "without merging"), ("dense_cudnn", "without merging (dense, cuDNN attention)")],
)
def test_what_a_gain_is_against(variant: str, said: str) -> None:
    assert without_merging(variant) == said
