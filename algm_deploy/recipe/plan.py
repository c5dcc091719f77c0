"""What a merge plan is: where and how a network merges tokens, and a row of `METHODS` for each method that does."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import ClassVar, Literal

from algm_deploy.errors import PlanError, RecipeError
from algm_deploy.recipe.network import Network, Size

Semantics = Literal["code", "paper"]
Batching = Literal["per_image", "batch_min"]
TokenOrder = Literal["published", "raster"]
ClapRule = Literal["threshold", "budget"]
GbmRule = Literal["adaptive", "fixed", "budget"]
Method = Literal["algm", "tome", "tome_blockwise", "elvit", "evit", "g2tm", "mpm", "cts", "dtop"]
Merge = Literal["clap", "gbm", "tome", "elvit", "evit", "g2tm", "mpm", "cts", "dtop"]
Part = Literal["", "attention", "mlp", "end", "start"]
Compared = Literal["tokens", "keys", "cls", "policy", "auxiliary"]
BetweenGroups = Literal["unmerge", "remerge"]


class MergeMethod:
    """What is asked of a merge method: a subclass and an entry of `METHODS` each, whose settings stand in `MergePlan`.

    Other rooms have a row for each too: the modules of `merging.py`, its multiply-adds in `evaluation/flops.py`, what
    parity holds it to in `parity/merges/`, its words in `report/plans.py`.

    `merge` is the operator that merges, by which merges are named, where there is one alone. `settings` are those that
    no other method reads. `counts_in`: the setting by which it merges as many tokens in every picture, such as
    `tome_r`; empty where pictures differ. `unstoppable`: why no threshold stops it, for people; empty where one does.
    `parts`: those of a block that it merges tokens for, `end` where it merges after the block and `start` before it, or
    the one empty part where it merges between attention and MLP. `compares`: tokens, or the keys of attention that
    counts patches, the attention of cls, or the answer of a policy network or of auxiliary heads. `lasting`: tokens
    that merged stay so; otherwise they are back after the part of the block they merged for. `standing`: one token
    stands for each patch, which the token maps name; otherwise several do, each in part, or none. `restores`: every
    patch is restored for the decoder, which does not know of the method; else it works on the tokens that are left.
    `alone`: every picture merges by itself, whatever batch it is in.
    """

    merge: ClassVar[Merge]
    settings: ClassVar[tuple[str, ...]] = ()
    counts_in: ClassVar[str] = ""
    unstoppable: ClassVar[str] = ""
    parts: ClassVar[tuple[Part, ...]] = ("",)
    compares: ClassVar[Compared] = "tokens"
    lasting: ClassVar[bool] = True
    standing: ClassVar[bool] = True
    restores: ClassVar[bool] = True
    alone: ClassVar[bool] = False

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        """The 1-based blocks that merge, in any order."""
        raise NotImplementedError

    def merge_in(self, plan: MergePlan, layer: int) -> Merge:
        """What merges in one of `layers`."""
        return self.merge

    def check(self, plan: MergePlan) -> None:
        """Raises `PlanError` for settings of its own that say nothing it can do."""

    def check_network(self, plan: MergePlan, network: Network) -> None:
        """Raises `RecipeError` for a network in which a plan that merges cannot."""

    def reads_clap_threshold(self, plan: MergePlan) -> bool:
        """Whether a merge waits for `clap_threshold`."""
        return False

    def static(self, plan: MergePlan) -> bool:
        """Whether every picture keeps the same number of tokens, known without it."""
        return bool(self.counts_in) or not plan.layers

    def in_force(self, plan: MergePlan, clap: float, gbm: float) -> MergePlan:
        """The plan with these thresholds; plans without merging are all equal."""
        return plan if plan.layers else DENSE


class _Algm(MergeMethod):
    """CLAP in a layer and GBM in later ones, each by its rule."""

    restores = False

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return *plan.clap_layers, *plan.gbm_layers

    def merge_in(self, plan: MergePlan, layer: int) -> Merge:
        return "clap" if layer in plan.clap_layers else "gbm"

    def reads_clap_threshold(self, plan: MergePlan) -> bool:
        return bool(plan.clap_layers) and plan.clap != "budget"

    def static(self, plan: MergePlan) -> bool:
        return not plan.reads_clap_threshold and (not plan.gbm_layers or plan.gbm == "budget")

    def in_force(self, plan: MergePlan, clap: float, gbm: float) -> MergePlan:
        clap_layers = plan.clap_layers if clap < math.inf or plan.clap == "budget" else ()
        gbm_layers = plan.gbm_layers if gbm < math.inf or plan.gbm == "budget" else ()
        if not clap_layers and not gbm_layers:
            return DENSE
        return replace(plan, clap_layers=clap_layers, gbm_layers=gbm_layers, clap_threshold=clap, gbm_threshold=gbm)


class _Counted(MergeMethod):
    """A method that merges as many tokens in every picture, which one of its settings counts block by block."""

    unstoppable = "those of this bundle take a constant number of tokens"

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return tuple(layer for layer, count in enumerate(getattr(plan, self.counts_in), 1) if count)


class _Tome(_Counted):
    """The baseline: `tome_r` says how many tokens vanish in each block from the first, none after its end."""

    merge, settings, counts_in = "tome", ("tome_r",), "tome_r"
    compares = "keys"

    def check(self, plan: MergePlan) -> None:
        if any(r < 0 for r in plan.tome_r):
            raise PlanError(f"merging.tome_r counts the tokens that vanish in each block, got {plan.tome_r}")


class _TomeBlockwise(_Counted):
    """Merges that do not last: attention runs on fewer tokens, then every token is back, and so for the MLP.

    `tome_share` says for each block from the first which share of the sequence, prefix counted, is merged away for
    both, none after its end. It is rounded down, and at most half.
    """

    merge, settings, counts_in = "tome", ("tome_share",), "tome_share"
    parts, lasting, restores = ("attention", "mlp"), False, False

    def check(self, plan: MergePlan) -> None:
        if not all(0 <= share <= 0.5 for share in plan.tome_share):
            raise PlanError(
                f"expected merging.tome_share as shares from 0 to 0.5, one a block, got {plan.tome_share}: at most "
                "half of the tokens can merge with another"
            )


class _Elvit(_Counted):
    """After block `elvit_layer` the patches become the centroids of a grid of `elvit_grid` (rows, columns).

    In each of `elvit_iterations` every patch is shared out among the centroids at most half of `elvit_window` away,
    nearer ones more, sharply as `elvit_temperature` says. For the decoder every patch is restored from its
    `elvit_neighbours` nearest centroids; `semantics` says how they are weighted (`ops/elvit.py`).
    """

    merge, counts_in = "elvit", "elvit_layer"
    settings = (
        "elvit_layer",
        "elvit_grid",
        "elvit_neighbours",
        "elvit_iterations",
        "elvit_window",
        "elvit_temperature",
    )
    parts, standing = ("end",), False

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return (plan.elvit_layer,) if plan.elvit_layer else ()

    def check(self, plan: MergePlan) -> None:
        _check_layer("elvit_layer", plan.elvit_layer)
        if plan.elvit_layer and min(plan.elvit_grid) < 1:
            raise PlanError(
                f"expected merging.elvit_grid as rows and columns of tokens, such as [28, 28], got {plan.elvit_grid}"
            )
        if plan.elvit_window < 1 or plan.elvit_window % 2 == 0:
            raise PlanError(f"expected an odd number as merging.elvit_window, got {plan.elvit_window}")
        if plan.elvit_neighbours < 1 or not 0 <= plan.elvit_iterations <= 100 or not 0 < plan.elvit_temperature < 1e6:
            raise PlanError(
                "expected merging.elvit_neighbours from 1, merging.elvit_iterations from 0 to 100 and a positive "
                f"merging.elvit_temperature, got {plan.elvit_neighbours}, {plan.elvit_iterations} and "
                f"{plan.elvit_temperature}"
            )

    def check_network(self, plan: MergePlan, network: Network) -> None:
        (rows, columns), grid = plan.elvit_grid, network.grid
        if rows > grid[0] or columns > grid[1] or plan.elvit_grid == grid:
            raise RecipeError(f"expected a merging.elvit_grid smaller than the grid {grid}, got {plan.elvit_grid}")
        if plan.elvit_neighbours > rows * columns:
            raise RecipeError(
                f"expected merging.elvit_neighbours up to the {rows * columns} tokens of merging.elvit_grid, got "
                f"{plan.elvit_neighbours}"
            )


class _Evit(_Counted):
    """The share `evit_keep` of the tokens that cls attends to most stays in each block of `evit_layers`, rounded up.

    One more token holds the others. For the decoder those are given the result of the kept token that was nearest to
    them (`ops/evit.py`).
    """

    merge, settings, counts_in = "evit", ("evit_layers", "evit_keep"), "evit_layers"
    compares, standing = "cls", False

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return plan.evit_layers

    def check(self, plan: MergePlan) -> None:
        _check_layers("evit_layers", plan.evit_layers)
        if not 0 < plan.evit_keep < 1:
            raise PlanError(f"expected merging.evit_keep as a share between 0 and 1, got {plan.evit_keep}")

    def check_network(self, plan: MergePlan, network: Network) -> None:
        if not network.prefix:
            raise RecipeError(
                f"method evit keeps what cls attends to, and the decoder {network.decoder} has a network without cls: "
                "take another method"
            )
        if network.architecture.adapter:
            raise RecipeError(
                f"method evit leaves patches out for good, and between its groups of blocks the {network.family} "
                "reads every patch: take another method"
            )
        for layer, (rows, keep) in plan.evit_counts(network.grid[0] * network.grid[1]).items():
            if keep >= rows:
                raise RecipeError(
                    f"expected a merging.evit_keep that leaves out one of the {rows} tokens of block {layer}, got "
                    f"{plan.evit_keep}"
                )


class _ByThreshold(MergeMethod):
    """A method whose one rule is `clap_threshold`: nothing merges where it is infinite."""

    def reads_clap_threshold(self, plan: MergePlan) -> bool:
        return bool(plan.layers)

    def in_force(self, plan: MergePlan, clap: float, gbm: float) -> MergePlan:
        return replace(plan, clap_threshold=clap) if plan.layers and clap < math.inf else DENSE


class _G2tm(_ByThreshold):
    """In block `g2tm_layer` patches that touch merge where their cosine similarity is above `clap_threshold`.

    Those they merge with do likewise: every group that is connected so becomes one token (`ops/g2tm.py`). The rule is
    that threshold, so the number of tokens changes with the picture.
    """

    merge, settings = "g2tm", ("g2tm_layer",)
    restores, alone = False, True

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return (plan.g2tm_layer,) if plan.g2tm_layer else ()

    def check(self, plan: MergePlan) -> None:
        _check_layer("g2tm_layer", plan.g2tm_layer)


class _Mpm(MergeMethod):
    """Two tokens that are each other's most similar one become one after each block of `mpm_layers` (`ops/mpm.py`).

    How many find each other changes with the picture, and no setting decides it.
    """

    merge, settings = "mpm", ("mpm_layers",)
    unstoppable = "MPM merges every pair that finds each other"
    parts, alone = ("end",), True

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return plan.mpm_layers

    def check(self, plan: MergePlan) -> None:
        _check_layers("mpm_layers", plan.mpm_layers)


class _Cts(_Counted):
    """The `cts_shared` superpatches, 2x2 patches, that a policy network finds likeliest to show one class.

    Each has one token from the first block on, made of its pixels at half the size (`ops/cts.py`). The network has to
    have that policy network, `network.policy`.
    """

    merge, settings, counts_in = "cts", ("cts_shared",), "cts_shared"
    parts, compares, restores = ("start",), "policy", False

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return (1,) if plan.cts_shared else ()

    def check(self, plan: MergePlan) -> None:
        if plan.cts_shared < 0:
            raise PlanError(f"merging.cts_shared counts the superpatches that share a token, got {plan.cts_shared}")

    def check_network(self, plan: MergePlan, network: Network) -> None:
        rows, columns = network.grid
        if not network.policy:
            raise RecipeError(
                "method cts shares the tokens that a policy network names, and this network has none: export a "
                "checkpoint that was trained with CTS, whose variant.yml names it, or set network.policy"
            )
        if plan.cts_shared > rows // 2 * (columns // 2):
            raise RecipeError(
                f"expected merging.cts_shared up to the {rows // 2 * (columns // 2)} superpatches of the grid "
                f"{network.grid}, got {plan.cts_shared}"
            )


class _Dtop(_ByThreshold):
    """Tokens leave after each block of `dtop_layers` where its auxiliary head is sure of their class.

    Sure is what lies above `clap_threshold`, here a probability; the `dtop_keep` surest of each class stay so that
    others see them (`ops/dtop.py`). What the heads say of tokens that leave is their result. The network has to have
    those heads, `network.auxiliary`.
    """

    merge, settings = "dtop", ("dtop_layers", "dtop_keep")
    parts, compares, standing, restores, alone = ("end",), "auxiliary", False, False, True

    def layers(self, plan: MergePlan) -> tuple[int, ...]:
        return plan.dtop_layers

    def check(self, plan: MergePlan) -> None:
        _check_layers("dtop_layers", plan.dtop_layers)
        if plan.dtop_keep < 1:
            raise PlanError(
                "expected merging.dtop_keep, the tokens of each class that stay for the others, from 1, got "
                f"{plan.dtop_keep}"
            )

    def check_network(self, plan: MergePlan, network: Network) -> None:
        if not set(plan.dtop_layers) <= set(network.auxiliary):
            raise RecipeError(
                f"method dtop asks auxiliary heads, and this network has them after blocks {network.auxiliary}, not "
                f"all of {plan.dtop_layers}: choose merging.dtop_layers among them, or export a checkpoint with others"
            )


METHODS: dict[Method, MergeMethod] = {
    "algm": _Algm(),
    "tome": _Tome(),
    "tome_blockwise": _TomeBlockwise(),
    "elvit": _Elvit(),
    "evit": _Evit(),
    "g2tm": _G2tm(),
    "mpm": _Mpm(),
    "cts": _Cts(),
    "dtop": _Dtop(),
}
_READERS = {setting: method for method, row in METHODS.items() for setting in row.settings}


def _check_layer(name: str, layer: int) -> None:
    if layer < 0:
        raise PlanError(f"expected merging.{name} from 1, or 0 to merge nowhere, got {layer}")


def _check_layers(name: str, layers: tuple[int, ...]) -> None:
    if sorted(set(layers)) != list(layers) or min(layers, default=1) < 1:
        raise PlanError(f"expected ascending blocks from 1 as merging.{name}, got {layers}")


def method_settings() -> tuple[str, ...]:
    """The settings of the merge plan that one method alone reads."""
    return tuple(item.name for item in fields(MergePlan) if item.name in _READERS)


@dataclass(frozen=True)
class MergePlan:
    """Where and how a network merges tokens. Layers are 1-based encoder blocks, as in the published code.

    `clap` and `gbm` are the rules by which a merge chooses. By `threshold`: `clap_threshold` is CLAP's
    cosine-similarity threshold (tau). By statistics, `adaptive`: `gbm_threshold` is the multiplier of the standard
    deviation's share (published: 1); `fixed`: it is the similarity threshold. By `budget`, which is not the paper's
    rule: the most similar `clap_budget` windows, and in each GBM layer the most similar `gbm_budget` tokens merge,
    whatever the picture. A budget is a count if it is a whole number, else a share of the windows, or of the patch
    tokens that reach the merge.

    With another `method` than `algm`, `clap_layers` and `gbm_layers` are empty, and only the settings are read that the
    method's row, `row`, tells of.

    `between_groups` matters where something else takes part between groups of blocks and needs every patch, as in
    ViT-Adapter: by `unmerge` the next group starts with every patch and whatever it merges itself; by `remerge` what
    had merged merges again, as before, and the next group may merge more of it.
    """

    clap_layers: tuple[int, ...] = (1,)
    gbm_layers: tuple[int, ...] = (5,)
    window: Size = (2, 2)
    clap_threshold: float = 1.0
    gbm_threshold: float = 1.0
    clap: ClapRule = "threshold"
    gbm: GbmRule = "adaptive"
    clap_budget: int | float = 0
    gbm_budget: int | float = 0
    semantics: Semantics = "code"
    batch: Batching = "per_image"
    order: TokenOrder = "published"
    method: Method = "algm"
    tome_r: tuple[int, ...] = ()
    tome_share: tuple[float, ...] = ()
    elvit_layer: int = 0
    elvit_grid: Size = (0, 0)
    elvit_neighbours: int = 20
    elvit_iterations: int = 5
    elvit_window: int = 5
    elvit_temperature: float = 0.02
    evit_layers: tuple[int, ...] = ()
    evit_keep: float = 0.7
    g2tm_layer: int = 0
    mpm_layers: tuple[int, ...] = ()
    cts_shared: int = 0
    dtop_layers: tuple[int, ...] = ()
    dtop_keep: int = 5
    between_groups: BetweenGroups = "unmerge"

    def __post_init__(self) -> None:
        self._check_method()
        layers = (*self.clap_layers, *self.gbm_layers)
        if len(set(layers)) != len(layers) or any(layer < 1 for layer in layers):
            raise PlanError(
                f"merge layers must be distinct and at least 1, got CLAP {self.clap_layers}, GBM {self.gbm_layers}"
            )
        if len(self.clap_layers) > 1:
            raise PlanError(f"CLAP works on the full patch grid and fits one layer only, got {self.clap_layers}")
        if self.clap_layers and self.gbm_layers and min(self.gbm_layers) < self.clap_layers[0]:
            raise PlanError(
                f"CLAP needs the full patch grid: layer {self.clap_layers[0]} lies after GBM {self.gbm_layers}"
            )
        if min(self.window) < 1 or self.window[0] * self.window[1] < 2:
            raise PlanError(f"a CLAP window covers at least two patches, got {self.window[0]}x{self.window[1]}")
        self._check_budget("clap", self.clap, self.clap_budget)
        self._check_budget("gbm", self.gbm, self.gbm_budget)
        if self.gbm == "budget" and self.gbm_layers and self.clap_layers and self.clap != "budget":
            raise PlanError(
                "expected a budget for CLAP too where GBM has one, as a threshold leaves it a number of tokens that "
                "changes with the picture: set merging.clap and merging.clap_budget"
            )

    @staticmethod
    def _check_budget(merge: str, rule: str, budget: float) -> None:
        if rule != "budget" and budget:
            raise PlanError(
                f"merging.{merge}_budget is read by the rule budget, got {budget} for {rule}: set merging.{merge} to it"
            )
        if rule == "budget" and not (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1):
            raise PlanError(
                f"expected merging.{merge}_budget as a share above 0 and up to 1.0, or a count from 1, got {budget}"
            )

    def _check_method(self) -> None:
        if self.method != "algm" and (self.clap_layers or self.gbm_layers):
            raise PlanError(
                f"method {self.method} has neither CLAP nor GBM, got layers {self.clap_layers} and {self.gbm_layers}: "
                "set merging.clap_layers and merging.gbm_layers to []"
            )
        if self.method != "algm" and "budget" in (self.clap, self.gbm):
            raise PlanError(
                f"method {self.method} has neither CLAP nor GBM, got a budget for them: set "
                f"merging.{self.row.counts_in or 'clap_threshold'} instead"
            )
        for item in fields(self):
            value, reader = getattr(self, item.name), _READERS.get(item.name, self.method)
            if reader != self.method and value != item.default:
                raise PlanError(f"merging.{item.name} is read by method {reader}, got {value} for {self.method}")
        self.row.check(self)
        if self.row.alone and self.batch != "per_image":
            raise PlanError(
                f"method {self.method} merges every image alone, got merging.batch {self.batch}: set it to per_image"
            )

    @property
    def row(self) -> MergeMethod:
        """What is to be known of the plan's method."""
        return METHODS[self.method]

    @property
    def places(self) -> tuple[tuple[int, Part], ...]:
        """Of every merge in the order they run its 1-based layer, and the part of the block it ends with, if one."""
        return tuple((layer, part) for layer in sorted(self.row.layers(self)) for part in self.row.parts)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer of every merge in the order they run: one whose attention and MLP merge is there twice."""
        return tuple(layer for layer, _ in self.places)

    @property
    def reads_clap_threshold(self) -> bool:
        """Whether a merge waits for `clap_threshold`: CLAP, G2TM, or DToP."""
        return self.row.reads_clap_threshold(self)

    @property
    def static(self) -> bool:
        """Whether every picture keeps the same number of tokens, known without it: by budgets, or by counts."""
        return self.row.static(self)

    @property
    def unstoppable(self) -> str:
        """Why no threshold stops the merges, for people; empty where one does, or nothing merges."""
        if not self.layers:
            return ""
        return "those of this bundle have a budget" if self.budgeted else self.row.unstoppable

    @property
    def budgeted(self) -> bool:
        """Whether a merge has a budget, so that no threshold stops it."""
        return bool(self.clap_layers and self.clap == "budget") or bool(self.gbm_layers and self.gbm == "budget")

    def evit_counts(self, patches: int) -> dict[int, tuple[int, int]]:
        """By layer, how many tokens reach EViT's merge in a network of so many patches, and how many of them stay."""
        counts = {}
        for layer in self.evit_layers:
            counts[layer] = patches, math.ceil(self.evit_keep * patches)
            patches = counts[layer][1] + 1
        return counts

    def merge_in(self, layer: int) -> Merge:
        """What merges in one of `layers`."""
        return self.row.merge_in(self, layer)


DENSE = MergePlan(clap_layers=(), gbm_layers=())


def fresh_merges(plan: MergePlan, network: Network) -> tuple[bool, ...]:
    """Of every merge in the order they run, whether every patch reaches it, whatever merged before."""
    if not plan.row.lasting or not plan.layers:
        return (True,) * len(plan.layers)
    again = plan.between_groups == "unmerge"
    group = [next(i for i, (_, end) in enumerate(network.groups) if layer <= end) for layer in plan.layers]
    return True, *(again and a != b for a, b in pairwise(group))
