"""PyTorch runs of a bundle's network with a runtime's own merge decisions forced: the truth it is compared with.

Every run is one image at a time, whatever batch the runtime had, so a runtime that mixes up images is found out. The
truth is fp64; the baseline is PyTorch in the runtime's precision. A runtime may err twice as much as the baseline.
Where a runtime computes with the levels of a calibrated bundle both are quantised, and in int8 the baseline jitters
(`jitter.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.bundle.store import Bundle
from algm_deploy.merging import merge_inputs, replay_merging
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.fp8 import use_fp8
from algm_deploy.models.loading import DTYPES, load_network
from algm_deploy.models.merges import REPLAYS, ReplayChoice
from algm_deploy.models.quantized import computes_levels
from algm_deploy.models.scores import GridScores, Scores, upsample_scores
from algm_deploy.models.vit import Tokens, VitNetwork
from algm_deploy.ops._rows import wide
from algm_deploy.parity.decisions import Cells, Ints, MaskFacts
from algm_deploy.parity.jitter import jittered
from algm_deploy.parity.stopwatch import Stopwatch
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.schema import Precision

# Two implementations may each err twice as much as the baseline errs.
NOISE_FACTOR = 4
NOISE_FLOOR = 2.0**-22  # two units in the last place of a cosine near one

Doubles = NDArray[np.float64]


class Error(NamedTuple):
    """Root mean square and largest magnitude, of errors or of what errs."""

    rms: float
    largest: float


@dataclass(frozen=True, eq=False)
class Replayed:
    """One image under forced decisions.

    `truth` and `baseline` are the tokens that entered each merge. `true_masks` and `baseline_masks` are the masks
    (Q, S), before their activation, by which queries choose the cells they attend to, of each layer that has them do
    so. `error` is that of the baseline's scores, and `scale` the size of the true ones. Scores are kept as the network
    gives them and made full-size on demand: for 150 classes of 512x512 pixels that is 0.3 GB.
    """

    truth: tuple[Tokens, ...]
    baseline: tuple[Tokens, ...]
    error: Error
    scale: Error
    full_size: Callable[[], Doubles]
    true_masks: tuple[torch.Tensor, ...] = ()
    baseline_masks: tuple[torch.Tensor, ...] = ()

    def scores(self) -> Doubles:
        """True scores (K, H, W)."""
        return self.full_size()


class Replays:
    """Replays of the images of one verification; the same image with the same decisions is run once.

    `precision`: of the baseline. `attention`: its products are in int8 where those of the bundle may be. Truth and
    baseline are computed on `device`, and are handed on in the host's memory. `watch` is told the time of the truth.
    """

    def __init__(
        self,
        bundle: Bundle,
        images: NDArray[Any],
        precision: Precision,
        device: str = "cpu",
        attention: bool = False,
        watch: Stopwatch | None = None,
    ) -> None:
        self._images, self._watch = images, watch or Stopwatch()
        levels = computes_levels(bundle, precision)
        change = use_fp8 if precision == "fp8" and not levels else jittered
        load = partial(load_network, bundle, quantize=levels, attention=attention)
        self._truth = _ReplayNetwork(bundle, load(torch.float64), device)
        self._baseline = _ReplayNetwork(bundle, load(DTYPES[precision]), device, change)
        self._known: dict[tuple[int, bytes], Replayed] = {}

    def __call__(self, index: int, maps: Sequence[Ints], masks: Sequence[Cells] = ()) -> Replayed:
        """The image of that index, merged by the token maps (N,) of its merges.

        Where queries choose the cells that they attend to, they take those of `masks` (Q, S), layer by layer.
        """
        told = [array.tobytes() for array in maps] + [array.tobytes() for array in masks]
        key = index, hashlib.sha256(b"".join(told)).digest()
        if key not in self._known:
            self._known[key] = self._run(self._images[index], maps, masks)
        return self._known[key]

    def _run(self, image: NDArray[Any], maps: Sequence[Ints], masks: Sequence[Cells]) -> Replayed:
        with self._watch.part("fp64"):
            truth, tokens, deciding = self._truth(image, maps, masks)
        baseline, tokens_baseline, deciding_baseline = self._baseline(image, maps, masks)
        network = self._truth.network
        scores = full_size(truth, network)
        error = error_of(full_size(baseline, network) - scores)
        return Replayed(
            tokens,
            tokens_baseline,
            error,
            error_of(scores),
            partial(full_size, truth, network),
            deciding,
            deciding_baseline,
        )


class _ReplayNetwork:
    """A network of a bundle, merging as it is told; `change` gets it once, to alter it in place."""

    def __init__(
        self,
        bundle: Bundle,
        model: VitNetwork,
        device: str,
        change: Callable[[VitNetwork], object] = lambda model: model,
    ) -> None:
        self.network, self._device = bundle.recipe.network, device
        replaying = replay_merging(model, bundle.recipe.merging)
        self._model = Deployed(replaying, self.network, "scores").eval().model.to(device)
        change(self._model)
        self._entering: list[Tokens] = []
        self._deciding: list[torch.Tensor] = []
        for module in self._model.modules():
            if isinstance(module, REPLAYS):
                module.register_forward_pre_hook(lambda _, args: self._entering.append(args[0]))
            elif isinstance(module, ReplayChoice):
                module.register_forward_pre_hook(lambda _, args: self._deciding.append(args[0][0]))

    @torch.inference_mode()
    def __call__(
        self, image: NDArray[Any], maps: Sequence[Ints], masks: Sequence[Cells]
    ) -> tuple[Scores, tuple[Tokens, ...], tuple[torch.Tensor, ...]]:
        """Scores of one image (3, H, W), the tokens that entered each merge, and the masks that were decided on."""
        self._entering.clear()
        self._deciding.clear()
        forced, chosen = (tuple(map(self._given, arrays)) for arrays in (maps, masks))
        result = self._model(self._given(image), merge_inputs(0.0, 0.0, forced, self._device, chosen))
        result = result._replace(stages=[], chosen=()) if isinstance(result, GridScores) else result._replace(stages=[])
        return _on_host(result), _on_host(tuple(self._entering)), _on_host(tuple(self._deciding))

    def _given(self, array: NDArray[Any]) -> torch.Tensor:
        """One image's array, of a batch of one."""
        return torch.from_numpy(array)[None].to(self._device)


def _on_host(value: Any) -> Any:
    """The same, tuples with all that is in them, in the host's memory."""
    if isinstance(value, tuple):
        parts = map(_on_host, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.cpu() if isinstance(value, torch.Tensor) else value


@torch.inference_mode()
def full_size(scores: Scores, network: Network) -> Doubles:
    """Scores (K, H, W) of one image as the deployed network gives them."""
    full: Doubles = wide(upsample_scores(scores, network.grid, network.image_size))[0].double().numpy()
    return full


def error_of(x: Doubles) -> Error:
    """Of fp64 numbers; NaN where one is. Without arrays in between, each as large as the scores."""
    return Error(rms(x), float(max(x.max(), -x.min())))


def rms(x: Doubles) -> float:
    """Root mean square; NaN where a value is."""
    return float(np.sqrt(np.vdot(x, x) / x.size))


# --- what the merges decided on ---------------------------------------------------------------------------------------


def mask_facts(replayed: Replayed) -> list[MaskFacts]:
    """What the queries of each layer that chooses cells decided on, and its noise."""
    facts = []
    for exact, rounded in zip(replayed.true_masks, replayed.baseline_masks, strict=True):
        noise = NOISE_FACTOR * float((exact - rounded).abs().max())
        floor = NOISE_FLOOR * float(exact.abs().max())
        facts.append(MaskFacts(exact.numpy(), (rounded >= 0).numpy(), float(np.maximum(noise, floor))))
    return facts
