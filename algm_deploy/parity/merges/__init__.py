"""What parity holds merges to: one module and one row a merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from algm_deploy.models.vit import Tokens
from algm_deploy.parity.decisions import Ints
from algm_deploy.parity.merges.clap import CLAP
from algm_deploy.parity.merges.common import MergeParity, out_of_order, stacked
from algm_deploy.parity.merges.cts import CTS
from algm_deploy.parity.merges.dtop import DTOP
from algm_deploy.parity.merges.elvit import ELVIT
from algm_deploy.parity.merges.evit import EVIT
from algm_deploy.parity.merges.g2tm import G2TM
from algm_deploy.parity.merges.gbm import GBM
from algm_deploy.parity.merges.mpm import MPM
from algm_deploy.parity.merges.tome import TOME
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import Merge, MergePlan

MERGES: dict[Merge, MergeParity[Any]] = {
    "clap": CLAP,
    "gbm": GBM,
    "tome": TOME,
    "elvit": ELVIT,
    "evit": EVIT,
    "g2tm": G2TM,
    "mpm": MPM,
    "cts": CTS,
    "dtop": DTOP,
}


def merge_at(plan: MergePlan, stage: int) -> MergeParity[Any]:
    """The row of the merge of that index."""
    return MERGES[plan.merge_in(plan.layers[stage])]


def torch_maps(entering: Sequence[Tokens], stage: int, plan: MergePlan, network: Network) -> list[Ints]:
    """The maps (N,) PyTorch decides on for images that decide together, given the tokens that enter the merge."""
    return list(merge_at(plan, stage).decided(plan, plan.layers[stage], network, stacked(entering)).numpy())


def on_grounds(tokens: Tokens, choice: Ints, grounds: Ints, stage: int, plan: MergePlan, network: Network) -> Ints:
    """`choice` (N,) on the tokens of one image, its second decision, if it has one, made on the first of `grounds`."""
    found: Ints = merge_at(plan, stage).on_grounds(plan, plan.layers[stage], network, tokens, choice, grounds)
    return found


def differing(before: Ints, ours: Ints, other: Ints, stage: int, plan: MergePlan, network: Network) -> tuple[int, int]:
    """How many decisions of one merge differ between two token maps (N,) after it, and how many there are.

    `before` is the map before the merge. Merged windows, and tokens that stay, in another order count once for each
    that would have to be moved.
    """
    merge, place = merge_at(plan, stage), (plan, plan.layers[stage], network)
    (a, order_a), (b, order_b) = (merge.decisions(*place, before, after) for after in (ours, other))
    count = int((a != b).sum()) + out_of_order(order_a, order_b)
    return max(count, int(not np.array_equal(ours, other))), len(a)
