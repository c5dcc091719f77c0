"""Packed rows against the modules as they are: on a CPU without graphs, on a CUDA device with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from graph_stand_ins import JoinedOnTheHost, NoGraphs
from native_build import built
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from toys import toy

from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.errors import ExecutionError
from algm_deploy.merging import insert_merging, merge_inputs, replay_merging, truncate
from algm_deploy.models.auxiliary import LinearHead
from algm_deploy.models.deployed import Deployed
from algm_deploy.models.loading import network_class
from algm_deploy.models.merges import Tome
from algm_deploy.models.scores import MaskScores, labels_of, upsample_scores
from algm_deploy.models.vit import MergeInputs, Tokens, VitNetwork
from algm_deploy.ops.clap import clap as clap_operator
from algm_deploy.ops.dtop import dtop as dtop_operator
from algm_deploy.ops.gbm import gbm as gbm_operator
from algm_deploy.ops.native_kernels import Kernels, use_kernels
from algm_deploy.ops.tome import tome as tome_operator
from algm_deploy.parity.chain import verify
from algm_deploy.predictor import batch_sizes
from algm_deploy.recipe.families import architectures
from algm_deploy.recipe.network import Network
from algm_deploy.recipe.plan import DENSE, MergePlan
from algm_deploy.recipe.reading import flatten
from algm_deploy.runners.torch import packed as torch_packed
from algm_deploy.runners.torch.layout import Layout, bucket, likely_buckets, packed_index, padded_index
from algm_deploy.runners.torch.packed import MOST_BATCH_SIZES, MOST_GRAPHS, WARM_GRAPHS, PackedNetwork, attend
from algm_deploy.runners.torch.runner import TorchRunner
from algm_deploy.runners.torch.tail import labels

Images = Callable[[int], np.ndarray]
PLANS = {
    "dense": DENSE,
    "clap and gbm": MergePlan((1,), (3,)),
    "two gbm": MergePlan((1,), (2, 4), gbm="fixed"),
    "gbm alone, paper": MergePlan((), (2,), semantics="paper"),
    "shared counts": MergePlan((1,), (3,), batch="batch_min", order="raster"),
    "budgets": MergePlan((1,), (2, 4), clap="budget", clap_budget=0.4, gbm="budget", gbm_budget=0.2),
    "tome": MergePlan((), (), method="tome", tome_r=(9, 0, 5)),
    "evit": MergePlan((), (), method="evit", evit_layers=(1, 3), evit_keep=0.6),
    "g2tm": MergePlan((), (), method="g2tm", g2tm_layer=2),
    "dtop": MergePlan((), (), method="dtop", dtop_layers=(1, 3), dtop_keep=1),
}
USUAL = "clap and gbm"
CTS = MergePlan((), (), method="cts", cts_shared=5)
THRESHOLDS = {"fixed": ((0.9, 0.9), (0.99, 0.8)), "adaptive": ((0.9, 0.0), (0.99, 2.0)), "budget": ((0.0, 0.0),)}
SURE = (0.16, 0.0), (0.2, 0.0)  # confidences that the heads of a Segmenter with random weights have of some tokens
NEVER = float("inf")


def network(decoder: str = "mask_transformer", width: int = 64) -> Network:
    return Network("segmenter", width, 4, 2, 11, (128, 128), decoder=decoder)  # type: ignore[arg-type]


FAMILIES = {
    "setr": replace(network(), family="setr", decoder="pup", decoder_dim=16),
    "setr, levels": replace(network(), family="setr", decoder="mla", decoder_dim=16, stages=(1, 2, 3, 4)),
    "segvit": replace(network(), family="segvit", decoder="atm", decoder_dim=32, stages=(2, 3, 4)),
    "segvit, pruned": replace(network(), family="segvit", decoder="prune", decoder_dim=32, decoder_heads=2),
    "dinov2, padded pictures": replace(network(), family="dinov2", decoder="linear", patch_size=14, extra_tokens=4),
    "dinov2, levels": replace(network(), family="dinov2", decoder="linear_ms", stages=(1, 2, 3, 4)),
    "deit": replace(network(), family="deit", decoder="linear", extra_tokens=1),
    "eomt": replace(network(), family="eomt", decoder="queries", depth=5, decoder_depth=1, queries=7, extra_tokens=4),
}

PRUNED = FAMILIES["segvit, pruned"]
ADAPTER, _ = toy("vit_adapter", "upernet")


def thresholds_of(plan: str) -> tuple[tuple[float, float], ...]:
    """By which some tokens merge or leave."""
    return SURE if PLANS[plan].method == "dtop" else THRESHOLDS[PLANS[plan].gbm]


def with_heads(shape: Network, plan: MergePlan) -> Network:
    """The network with the auxiliary heads that the plan asks, if any."""
    return replace(shape, auxiliary=plan.dtop_layers)


def plans_of(shape: Network) -> Iterator[str]:
    """One of each kind that the network can merge by: EViT asks cls."""
    yield from ("dense", USUAL, "two gbm", "budgets", "tome", "g2tm")
    if shape.prefix:
        yield "evit"


def model_of(shape: Network, dtype: torch.dtype = torch.float32) -> VitNetwork:
    generator = torch.Generator().manual_seed(0)
    model = network_class(shape)(shape).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model.to(dtype)


def deployed(
    plan: MergePlan, shape: Network | None = None, dtype: Any = torch.float32, device: str = "cpu"
) -> Deployed:
    shape = with_heads(shape or network(), plan)
    return Deployed(insert_merging(model_of(shape, dtype), plan), shape, "scores").eval().to(device)


def busy_before_flat(blob_images: Images) -> list[Tensor]:
    """Batches of two sizes. Busy pictures, which merge less, come first: the rows of flat ones end before theirs."""
    images = torch.from_numpy(blob_images(6))
    return [images[3:], images[:3], images[5:], images[:1]]


def run(packed: PackedNetwork, image: Tensor, clap: float, gbm: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    with packed.run(image, clap, gbm) as merged:
        scores = upsample_scores(merged.scores, packed._model.network.grid, packed._model.network.image_size)
        return scores, [length.clone() for length in merged.lengths], [map.clone() for map in merged.maps]


def assert_like_modules(packed: PackedNetwork, plain: Deployed, image: Tensor, clap: float, gbm: float) -> None:
    """fp32: the same decisions, and scores within rounding."""
    scores, lengths, maps = run(packed, image, clap, gbm)
    with torch.inference_mode():
        expected, counts, expected_maps = plain(image, merge_inputs(clap, gbm, device=image.device))
    assert [length.tolist() for length in lengths] == (counts.T + plain.network.prefix).tolist()
    for found, map in zip(maps, expected_maps, strict=True):
        assert torch.equal(found, map)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_buckets_hold_all_rows_and_are_few() -> None:
    single = {bucket([length], 1025) for length in range(1, 1026)}
    assert all(rows == longest for rows, longest in single)
    assert len(single) == 33
    rng = np.random.default_rng(0)
    several = set()
    for _ in range(2000):
        lengths = rng.integers(300, 1025, 32).tolist()
        rows, longest = bucket(lengths, 1025)
        assert sum(lengths) <= rows <= min(32 * 1025, sum(lengths) * (1 + 1 / 32))
        assert max(lengths) <= longest <= min(1025, max(lengths) + 127)
        several.add((rows, longest))
    assert len(several) < 30


def test_graphs_of_photos_that_differ_find_room() -> None:
    """Token counts drawn like those of CamVid photos, in batches as a server cuts them."""
    rng = np.random.default_rng(0)
    sizes = batch_sizes(32)
    met: list[tuple[int, ...]] = []
    for batch in range(3000):
        size = sizes[batch % len(sizes)]
        for segment, (mean, deviation) in enumerate(((653, 110), (506, 84))):
            lengths = rng.normal(mean, deviation, size).clip(2, 1025).astype(int).tolist()
            met.append((size, segment, *bucket(lengths, 1025)))
    assert len({*met} | {(size,) for size in sizes}) < MOST_GRAPHS
    assert len({*met[-600:]} - {*met[:-600]}) < 12  # of 600 that came last hardly any was new
    assert len(sizes) <= MOST_BATCH_SIZES


def test_buckets_that_are_likely() -> None:
    """CamVid's photos keep 653 and 506 rows on average, those of darker scenes 560 and 460."""
    single = likely_buckets(1, 641, 257, 1025, 2)
    assert single == [(1025, 1025), *((rows, rows) for rows in range(1024, 287, -32))]
    rng, found, alike = np.random.default_rng(1), [], []
    for size in (2, 4, 8, 16):
        for usual, fewest, means in ((641, 257, (653, 560)), (481, 129, (506, 460))):
            likely = likely_buckets(size, usual, fewest, 1025, 31)
            assert len({*likely}) == 31
            assert all(rows >= size * fewest and longest >= fewest for rows, longest in likely)
            same = {bucket([length] * size, 1025) for length in range(fewest, 1026)}
            for mean in means:
                lengths = rng.normal(mean, mean / 6, (500, size)).clip(fewest, 1025).astype(int).tolist()
                met = [bucket(batch, 1025) for batch in lengths]
                found.append(float(np.mean([pair in likely for pair in met])))
                alike.append(float(np.mean([pair in same for pair in met])))
    assert min(found) > 0.75 and np.mean(found) > 0.9
    assert np.mean(alike) < 0.4, "buckets of pictures of one length would not have helped"


@pytest.mark.parametrize("lengths", [[1], [5, 1, 7], [3, 3, 3, 3]])
def test_rows_find_their_place_and_back(lengths: list[int]) -> None:
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    layout = Layout(len(lengths), max(lengths) + 2, starts)
    stride, rows = max(lengths) + 2, sum(lengths) + 3
    place = packed_index(layout, rows, stride)
    expected = [image * stride + row for image, length in enumerate(lengths) for row in range(length)]
    assert place[: sum(lengths)].tolist() == expected
    back = padded_index(layout, rows, 0, layout.longest)
    for image, length in enumerate(lengths):
        assert back[image, :length].tolist() == list(range(int(starts[image]), int(starts[image]) + length))
    assert int(place.min()) >= 0 and int(place.max()) < len(lengths) * stride
    assert int(back.min()) >= 0 and int(back.max()) < rows


def assert_attention_within_images(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Also a row of NaN behind an image, or of another image, has no effect."""
    lengths, heads, width = [5, 1, 130], 2, 64
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths) + 9, 3 * width, generator=generator).to(device, dtype)
    qkv[sum(lengths) :] = torch.nan
    found = attend(qkv, Layout(3, 256, starts), heads, 0.2)
    for first, end in pairwise(starts.tolist()):
        alone = torch.ops.algm.attention(qkv[None, first:end].float(), None, heads, 0.2)[0]
        torch.testing.assert_close(found[first:end].float(), alone, rtol=0, atol=tolerance)


def test_attention_stays_within_images() -> None:
    assert_attention_within_images("cpu", torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_attention_stays_within_images_on_cuda(dtype: torch.dtype, tolerance: float) -> None:
    assert_attention_within_images("cuda", dtype, tolerance)


# --- the network on a CPU --------------------------------------------------------------------------------------------


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Otherwise it holds whatever was there before, which is a number nearly always."""
    torch.use_deterministic_algorithms(True)  # fills it
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
@pytest.mark.parametrize("plan", PLANS)
def test_same_results_as_the_modules(plan: str, decoder: str, rounded: bool, blob_images: Images) -> None:
    plain = deployed(PLANS[plan], network(decoder))
    packed = PackedNetwork(plain, torch.uint8)
    if rounded:
        packed.graphs = NoGraphs()  # type: ignore[assignment]
    for count in (3, 1, 2):
        image = torch.from_numpy(blob_images(count))
        for clap, gbm in (*thresholds_of(plan), (NEVER, NEVER)):
            assert_like_modules(packed, plain, image, clap, gbm)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("family", FAMILIES)
def test_same_results_as_the_modules_of_every_family(family: str, blob_images: Images) -> None:
    """Also where rows are rounded up, and where a level is read before the last merge."""
    for plan in plans_of(FAMILIES[family]):
        plain = deployed(PLANS[plan], FAMILIES[family])
        packed = PackedNetwork(plain, torch.uint8)
        for graphs in (None, NoGraphs()):
            packed.graphs = graphs  # type: ignore[assignment]
            for images in busy_before_flat(blob_images):
                assert_like_modules(packed, plain, images, *thresholds_of(plan)[0])


@pytest.mark.parametrize("decoder", ["mask_transformer", "linear"])
def test_two_tokens_in_front_of_the_patches(decoder: str, blob_images: Images) -> None:
    plain = deployed(PLANS[USUAL], replace(network(decoder), extra_tokens=1))
    image = torch.from_numpy(blob_images(3))
    assert_like_modules(PackedNetwork(plain, torch.uint8), plain, image, *THRESHOLDS["adaptive"][0])


@pytest.mark.parametrize("plan", [USUAL, "dtop"])
def test_rows_of_padding_reach_nothing(plan: str, blob_images: Images) -> None:
    """Everything that a segment does not write is NaN before it."""
    plain = deployed(PLANS[plan])
    packed = PackedNetwork(plain, torch.uint8)
    image, thresholds = torch.from_numpy(blob_images(3)), thresholds_of(plan)[0]
    expected = run(packed, image, *thresholds)

    def poison() -> None:
        memory = packed._memories[3]
        for cut in map(memory.cut, range(2)):
            for row, length in enumerate(cut.length.tolist()):
                cut.merged[row, min(length, cut.merged.shape[1]) :] = torch.nan
            cut._tokens.fill_(torch.nan)
        for room in memory.rooms.values():
            room.fill_(torch.nan)

    packed.graphs = NoGraphs(poison)  # type: ignore[assignment]
    scores, lengths, maps = run(packed, image, *thresholds)
    torch.testing.assert_close(scores, expected[0], rtol=0, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(maps, expected[2], strict=True))
    assert min(lengths[0].tolist()) < max(lengths[0].tolist()), "images of one length would leave no padding"


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("plan", ["cts", "truncated"])
def test_tokens_that_are_shared_before_the_first_block(plan: str, blob_images: Images) -> None:
    shape = replace(network(), policy=True)
    model = model_of(shape)
    filled = insert_merging(model, CTS) if plan == "cts" else truncate(model, {1: 50}, CTS)
    plain = Deployed(filled, shape, "scores").eval()
    packed = PackedNetwork(plain, torch.uint8)
    packed.graphs = graphs = NoGraphs()  # type: ignore[assignment]
    for count in (3, 1):
        assert_like_modules(packed, plain, torch.from_numpy(blob_images(count)), 0.0, 0.0)
    assert len(graphs.keys) == 2


@pytest.mark.parametrize("plan", ["dense", "dtop"])
def test_a_network_that_drops_tokens_keeps_one_segment(plan: str, blob_images: Images) -> None:
    """Where DToP would let them leave, that is after a block."""
    shape = network()
    plain = Deployed(truncate(model_of(shape), {1: 40, 3: 25}, PLANS[plan]), shape, "scores").eval()
    packed = PackedNetwork(plain, torch.uint8)
    packed.graphs = NoGraphs()  # type: ignore[assignment]
    assert_like_modules(packed, plain, torch.from_numpy(blob_images(2)), 0.0, 0.0)
    assert len(packed.graphs.keys) == 1


@pytest.mark.parametrize("plan", ["budgets", "tome", "evit"])
def test_known_counts_keep_one_segment_a_batch_size(plan: str, blob_images: Images) -> None:
    """Whatever the pictures; by threshold there are three, for other rows at each other picture."""
    packed = PackedNetwork(deployed(PLANS[plan]), torch.uint8)
    packed.graphs = graphs = NoGraphs()  # type: ignore[assignment]
    images = torch.from_numpy(blob_images(4))
    for batch in (images[:1], images[1:2], images[2:], images[:2], torch.full_like(images[:1], 90)):
        run(packed, batch, 0.0, 0.0)
    assert set(graphs.keys) == {(1, 0, 65, 65), (2, 0, 130, 65)}


@pytest.fixture
def host_kernels() -> Kernels:
    """The kernels on host memory, which merge as those of a CUDA device do."""
    return Kernels(built("kernels"), "cpu")


@pytest.mark.parametrize("family", ["segmenter", *FAMILIES])
def test_kernels_merge_by_keys_as_the_modules_do(family: str, host_kernels: Kernels, blob_images: Images) -> None:
    """Batches of two sizes in turns, so that nothing of an earlier one is left."""
    plain = deployed(PLANS["tome"], FAMILIES.get(family))
    packed = PackedNetwork(plain, torch.uint8)
    packed.kernels = host_kernels
    for images in busy_before_flat(blob_images):
        assert_like_modules(packed, plain, images, 0.0, 0.0)


def test_kernels_stand_where_the_operator_is_called(
    host_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, blob_images: Images
) -> None:
    """But for networks without prefix, whose rows come in an order that the kernels do not write."""

    def called(*_: object) -> None:
        raise AssertionError("the operator")

    monkeypatch.setattr(Tome, "forward", called)
    image = torch.from_numpy(blob_images(2))
    without_prefix = FAMILIES["segvit"]
    assert not without_prefix.prefix
    for shape, kernels, by_kernels in (
        (None, host_kernels, True),
        (None, None, False),
        (without_prefix, host_kernels, False),
    ):
        packed = PackedNetwork(deployed(PLANS["tome"], shape), torch.uint8)
        packed.kernels = kernels
        with nullcontext() if by_kernels else pytest.raises(AssertionError, match="the operator"):
            _, lengths, maps = run(packed, image, 0.0, 0.0)
            assert [length.tolist() for length in lengths] == [[56, 56], [51, 51]]
            assert [len(map.unique()) for pair in maps for map in pair] == [55, 55, 50, 50]


PRUNING = {
    "mask_transformer": network(),
    "linear": network("linear"),
    "two in front": replace(network(), extra_tokens=1),
}


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", [*PRUNING.values(), PRUNED], ids=[*PRUNING, "segvit"])
def test_tokens_that_leave(shape: Network, rounded: bool, blob_images: Images) -> None:
    """None, some, and all but one of each class; then heads are sure of one class alone, and one token is left."""
    plain = deployed(PLANS["dtop"], shape)
    packed = PackedNetwork(plain, torch.uint8)
    packed.graphs = NoGraphs() if rounded else None  # type: ignore[assignment]
    images = [torch.from_numpy(blob_images(count)) for count in (3, 1)]
    some = 0.332 if shape is PRUNED else SURE[0][0]
    for tau in (NEVER, some, -1.0, some):
        for image in images:
            assert_like_modules(packed, plain, image, tau, 0.0)
    lengths = {length for left in run(packed, images[0], some, 0.0)[1] for length in left.tolist()}
    assert len(lengths) > 3 and max(lengths) < 64
    for head in (block.auxiliary for block in plain.model.encoder.blocks if block.judged):
        if isinstance(head, LinearHead):
            head.head.bias[5] = 30.0
    for image in images:
        assert_like_modules(packed, plain, image, 0.1, 0.0)
        lengths = {length for left in run(packed, image, 0.1, 0.0)[1] for length in left.tolist()}
        assert lengths == {shape.prefix + 1}


@pytest.mark.parametrize("shape", [network(), PRUNED], ids=["segmenter", "segvit"])
def test_what_leaves_is_decided_without_reading_back(shape: Network) -> None:
    """On tensors without values, as below; the operator, which shortens the sequence, has to read how far."""
    plain = deployed(PLANS["dtop"], shape)
    slot, block = PackedNetwork(plain, torch.uint8)._segments[0][-1].slot, plain.model.encoder.blocks[0]
    assert slot is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        size, canvas = torch.empty(2, 65), torch.empty(2, 64, 11)
        places = torch.empty(2, 64, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
        tokens = Tokens(torch.empty(2, 65, 64), size, *places, padded=True, canvas=canvas)
        inputs = MergeInputs(torch.empty(()), torch.empty(()))
        left = slot(tokens, inputs)
        assert left.values.shape == tokens.values.shape and left.canvas.shape == canvas.shape
        judged = block.auxiliary(tokens)
        with pytest.raises(DataDependentOutputException):
            dtop_operator._init_fn(judged.values, *judged[2:4], judged.keys, inputs.clap, 1, 1)


@pytest.mark.parametrize("budget", [True, False])
def test_a_merge_by_budget_reads_nothing_back(budget: bool) -> None:
    """On tensors without values, which nothing can be read from, as in a CUDA graph."""
    windows = [4, 4], [2, 2], 1, "code", "per_image", "published", "budget" if budget else "threshold", 2
    rule = 1, "budget" if budget else "fixed", 5.0, "code", "per_image", 3
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, size, tau = torch.empty(2, 17, 8), torch.empty(2, 17), None if budget else torch.empty(())
        patches, length = torch.empty(2, 16, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
        for rows, merge in (
            (11, lambda: clap_operator._init_fn(tokens, size, tau, *windows)),
            (14, lambda: gbm_operator._init_fn(tokens, size, patches, length, tau, *rule)),
        ):
            if budget:
                assert merge()[0].shape == (2, rows, 8)
            else:
                with pytest.raises(DataDependentOutputException):
                    merge()


def test_memory_of_few_batch_sizes_is_kept(blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
    packed.graphs = graphs = NoGraphs()  # type: ignore[assignment]
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 1, 9):
        run(packed, torch.from_numpy(blob_images(count)), 0.9, 0.0)
    assert list(packed._memories) == [3, 4, 5, 6, 7, 8, 1, 9]
    assert {key[0] for key in graphs.keys} == {3, 4, 5, 6, 7, 8, 1, 9}


def test_thresholds_are_those_of_the_call(blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
    image = torch.from_numpy(blob_images(2))
    first = run(packed, image, 0.9, 0.0)
    assert not torch.equal(first[0], run(packed, image, NEVER, NEVER)[0])
    assert torch.equal(first[0], run(packed, image, 0.9, 0.0)[0])


# --- graphs beforehand -----------------------------------------------------------------------------------------------


DECIDING = (USUAL, "two gbm", "gbm alone, paper", "shared counts", "g2tm", "dtop")


def warmed(plan: str, images: int, graphs: NoGraphs, shape: Network | None = None) -> PackedNetwork:
    packed = PackedNetwork(deployed(PLANS[plan], shape), torch.uint8)
    packed.graphs = graphs  # type: ignore[assignment]
    for _ in range(2):
        graphs.keys.clear()
        assert packed.warm_up(images, NEVER)
        assert (graphs.patient, graphs.waited) == (True, False), "at once, and from then on at the second time"
    return packed


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("plan", DECIDING)
def test_a_single_picture_finds_all_its_graphs(plan: str, blob_images: Images) -> None:
    packed = warmed(plan, 1, graphs := NoGraphs())
    known = set(graphs.keys)
    assert len(graphs.keys) == len(known), "nothing is run twice"
    draw, images = np.random.default_rng(0), torch.from_numpy(blob_images(6))
    for image in images.split(1):
        for clap, gbm in [(NEVER, NEVER), (-2.0, -1e6), *draw.uniform((0, -2), (1, 2), (12, 2)).tolist()]:
            run(packed, image, clap, gbm)
    assert set(graphs.keys) == known
    for number in range(1, len(packed._segments)):
        assert {rows for _, segment, rows, _ in known if segment == number} >= {64, 65}


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("family", [None, "segvit", "dinov2, levels", "eomt"])
@pytest.mark.parametrize("plan", ["two gbm", USUAL, "gbm alone, paper"])
def test_a_single_pictures_segments_are_joined(
    plan: str, family: str | None, host_kernels: Kernels, blob_images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what they give one after the other, whatever the picture and the thresholds."""
    monkeypatch.setattr(torch_packed, "Joined", JoinedOnTheHost)
    shape = FAMILIES[family] if family else None
    cold, warm = (PackedNetwork(deployed(PLANS[plan], shape), torch.uint8) for _ in range(2))
    for one in (cold, warm):
        one.kernels, one.graphs = host_kernels, NoGraphs()  # type: ignore[assignment]
    assert warm.warm_up(1, NEVER)
    joined, _ = warm._memories[1].joined or pytest.fail("the graphs were not joined")
    images = [*torch.from_numpy(blob_images(3)).split(1), torch.from_numpy(blob_images(2))]
    for image in images:
        for thresholds in (*thresholds_of(plan), (-2.0, -1e6), (NEVER, NEVER)):
            (found, *others), (expected, *same) = run(warm, image, *thresholds), run(cold, image, *thresholds)
            assert torch.equal(found, expected)
            assert all(torch.equal(a, b) for x, y in zip(others, same, strict=True) for a, b in zip(x, y, strict=True))
    assert joined.replays == 3 * (len(thresholds_of(plan)) + 2), "single pictures alone"
    assert {key[0] for key in warm.graphs.joining} == {1}, "only their graphs are kept in a form that can be joined"
    assert warm.warm_up(1, NEVER)
    assert warm._memories[1].joined == (joined, warm._memories[1].joined[1]), "once is enough"
    for batch in range(2, MOST_BATCH_SIZES + 2):
        run(warm, torch.from_numpy(blob_images(batch)), 0.9, 0.0)
    assert not warm.joined, "it went with the memory that it used"


def test_what_is_not_all_captured_is_not_joined(
    host_kernels: Kernels, blob_images: Images, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No graph of one size, no room for all, a host that merges, or a driver that joins nothing."""

    def refuse(*_: Any) -> None:
        raise ExecutionError("expected CUDA 12.8 or newer to join graphs, got: no such thing")

    class Failed(NoGraphs):
        def found(self, key: tuple[int, ...]) -> tuple[Any, Any]:
            return (None, None) if key[1:3] == (1, 64) else super().found(key)

    monkeypatch.setattr(torch_packed, "Joined", refuse)
    for graphs, kernels in ((Failed(), host_kernels), (NoGraphs(limit=2), host_kernels), (NoGraphs(), None)):
        packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
        packed.kernels, packed.graphs = kernels, graphs  # type: ignore[assignment]
        assert packed.warm_up(1, NEVER)
        assert packed._memories[1].joined is None
        assert not caplog.records
    packed.kernels, packed.graphs = host_kernels, NoGraphs()  # type: ignore[assignment]
    packed._memories.clear()
    assert packed.warm_up(1, NEVER)
    assert "single pictures wait for the host behind every merge: expected CUDA 12.8" in caplog.text
    assert_like_modules(packed, deployed(PLANS[USUAL]), torch.from_numpy(blob_images(1)), 0.9, 0.0)


@pytest.mark.usefixtures("unwritten_memory_is_nan")
@pytest.mark.parametrize("family", ["segvit", "dinov2, levels", "eomt"])
@pytest.mark.parametrize("plan", [*DECIDING[:4], "g2tm"])
def test_results_stay_what_they_are_after_a_warm_up(plan: str, family: str, blob_images: Images) -> None:
    """Bit for bit, thresholds included: those of the warm-up end with it."""
    cold = PackedNetwork(deployed(PLANS[plan], FAMILIES[family]), torch.uint8)
    cold.graphs = NoGraphs()  # type: ignore[assignment]
    for images in busy_before_flat(blob_images):
        warm = warmed(plan, len(images), NoGraphs(), FAMILIES[family])
        for thresholds in (*thresholds_of(plan), (-2.0, -1e6), (NEVER, NEVER)):
            (found, *others), (expected, *same) = run(warm, images, *thresholds), run(cold, images, *thresholds)
            assert torch.equal(found, expected)
            assert all(torch.equal(a, b) for x, y in zip(others, same, strict=True) for a, b in zip(x, y, strict=True))


def test_batches_of_several_get_some_graphs_and_find_the_others_later(blob_images: Images) -> None:
    packed = warmed(USUAL, 4, graphs := NoGraphs())
    assert {key[:2] for key in graphs.keys} == {(4, 0), (4, 1), (4, 2)}
    assert len(set(graphs.keys)) <= WARM_GRAPHS
    plain = deployed(PLANS[USUAL])
    for thresholds in (*thresholds_of(USUAL), (-2.0, -1e6), (NEVER, NEVER)):
        assert_like_modules(packed, plain, torch.from_numpy(blob_images(4)), *thresholds)


@pytest.mark.parametrize("plan", ["dense", "budgets", "tome", "evit"])
def test_known_counts_are_one_graph_beforehand(plan: str, blob_images: Images) -> None:
    packed = warmed(plan, 2, graphs := NoGraphs())
    assert graphs.keys == [(2, 0, 130, 65)]
    assert_like_modules(packed, deployed(PLANS[plan]), torch.from_numpy(blob_images(2)), 0.0, 0.0)


def test_a_warm_up_ends_in_time(monkeypatch: pytest.MonkeyPatch, blob_images: Images) -> None:
    clock = [0.0]
    monkeypatch.setattr(torch_packed.time, "monotonic", lambda: clock[0])

    def second() -> None:
        clock[0] += 1

    packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
    packed.graphs = graphs = NoGraphs(second)  # type: ignore[assignment]
    assert not packed.warm_up(1, 3.0)
    assert len(graphs.keys) == 3
    assert not packed.warm_up(1, 3.0)
    assert len(graphs.keys) == 3
    assert_like_modules(packed, deployed(PLANS[USUAL]), torch.from_numpy(blob_images(1)), 0.9, 0.0)
    clock[0] = 0
    assert packed.warm_up(1, 100.0)


def test_a_warm_up_drops_no_graph() -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
    packed.graphs = graphs = NoGraphs(limit=4)  # type: ignore[assignment]
    assert packed.warm_up(1, NEVER), "there is no room, but there was time"
    assert len(graphs.keys) == 4


def test_without_graphs_there_is_nothing_to_warm_up() -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
    assert packed.warm_up(1, NEVER)
    assert not packed._memories


def test_float_pixels(blob_images: Images) -> None:
    plain = deployed(PLANS[USUAL])
    packed = PackedNetwork(plain, torch.float32)
    assert_like_modules(packed, plain, torch.from_numpy(blob_images(2).astype(np.float32)) + 0.25, 0.9, 0.0)


def test_what_does_not_fit_is_told() -> None:
    def said(network: Deployed) -> str:
        return torch_packed.why_not(network) or ""

    for plan in PLANS.values():
        assert torch_packed.why_not(deployed(plan)) is None
        if plan.layers:
            replaying = replay_merging(model_of(with_heads(network(), plan)), plan)
            assert "as was recorded" in said(Deployed(replaying, network(), "scores"))
    other = deployed(PLANS["evit"])
    other.model.encoder.blocks[1].merge = nn.Identity()
    assert "none of ALGM, ToMe, EViT, G2TM and DToP" in said(other)
    assert "none of ALGM" in said(deployed(MergePlan((), (), method="mpm", mpm_layers=(2,))))
    other = deployed(PLANS["dtop"])
    other.model.encoder.outputs = (3, 4)
    assert "reads a block after which the picture decides" in said(other)
    for sees in ("proportional", "weighs"):
        seeing = deployed(PLANS[USUAL])
        setattr(seeing.model.encoder.blocks[2], sees, True)
        assert "as many tokens in every picture" in said(seeing)
    second = deployed(DENSE)
    second.model.encoder.blocks[1].start_merge = nn.Identity()
    assert "tokens before a block" in said(second)
    assert "part of a block" in said(deployed(MergePlan((), (), method="tome_blockwise", tome_share=(0.1,) * 4)))
    half = replace(PLANS["budgets"], gbm="adaptive", gbm_budget=0)  # a known number first, then one of the picture
    assert "only some of its merges" in said(deployed(half))
    shallow = replace(FAMILIES["dinov2, levels"], depth=5)
    assert "last block" in said(deployed(PLANS[USUAL], shallow))

    class Stranger(nn.Module):
        """A family that was registered by another package, without a description."""

    other = deployed(PLANS[USUAL])
    other.model = Stranger()  # type: ignore[assignment]
    assert "does not describe" in said(other)
    assert "a row for every patch" in said(deployed(PLANS[USUAL], ADAPTER))


def test_every_family_fits_or_says_why_not() -> None:
    fitting = {shape.family for shape in FAMILIES.values()} | {"segmenter"}
    exchanging = {ADAPTER.family, "eva"}
    assert fitting | exchanging == {row.family for row in architectures()}


def test_threads_take_turns(blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL]), torch.uint8)
    assert_threads_take_turns(packed, [torch.from_numpy(blob_images(count)) for count in (1, 2, 3)])


def assert_threads_take_turns(packed: PackedNetwork, images: Sequence[Tensor]) -> None:
    expected = [run(packed, image, 0.9, 0.0)[0] for image in images]
    with ThreadPoolExecutor(len(images)) as pool:
        found = [pool.submit(run, packed, image, 0.9, 0.0) for _ in range(3) for image in images]
    for future, wanted in zip(found, expected * 3, strict=True):
        assert torch.equal(future.result()[0], wanted)


@pytest.mark.parametrize("plan", [USUAL, "dtop"])
def test_labels_of_packed_scores(plan: str, blob_images: Images) -> None:
    assert_labels_of_packed_scores(plan, "cpu", torch.from_numpy(blob_images(3)))


def assert_labels_of_packed_scores(plan: str, device: str, images: Tensor) -> None:
    plain, thresholds = deployed(PLANS[plan], device=device), thresholds_of(plan)[0]
    plain.output = "labels"
    packed, image = PackedNetwork(plain, torch.uint8), images.to(device)
    for _ in range(2):
        with packed.run(image, *thresholds) as merged:
            found = labels(merged.scores, plain.network.grid, plain.network.image_size)
    with torch.inference_mode():
        expected = plain(image, merge_inputs(*thresholds, device=device))[0]
    assert found.dtype == expected.dtype
    assert (found != expected).double().mean() < 1e-3  # near ties of two classes


# --- on a CUDA device ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["kernels", "operators"])
def merging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Merges by the kernel library, or by PyTorch's operators as where it is not built."""
    if request.param == "operators":
        monkeypatch.setattr(torch_packed, "use_kernels", lambda: None)
    elif use_kernels() is None:
        pytest.skip("the kernel library is not built here: algm-deploy build-native kernels")
    return str(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_graphs_give_the_modules_results(plan: str, graphs: bool, merging: str, blob_images: Images) -> None:
    """The first time, when all is captured, and replayed."""
    plain = deployed(PLANS[plan], device="cuda")
    packed = PackedNetwork(plain, torch.uint8, graphs=graphs)
    for _ in range(3):
        for count in (3, 1, 2):
            image = torch.from_numpy(blob_images(count)).cuda()
            for clap, gbm in thresholds_of(plan):
                assert_like_modules(packed, plain, image, clap, gbm)
    assert (packed.graphs is None) == (not graphs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("plan", "family"),
    [
        *product(["two gbm", USUAL, "gbm alone, paper"], ["segmenter", "segvit", "dinov2, levels", "eomt"]),
        *product(["dtop"], ["segmenter", "segvit, pruned"]),  # whose checkpoints have heads within the encoder
    ],
)
def test_graphs_of_a_single_picture_are_joined(plan: str, family: str, blob_images: Images) -> None:
    """Bit for bit what they give one after the other, whatever the picture and the thresholds."""
    if use_kernels() is None:
        pytest.skip("the kernel library is not built here: algm-deploy build-native kernels")
    shape = FAMILIES.get(family)
    cold, warm = (PackedNetwork(deployed(PLANS[plan], shape, device="cuda"), torch.uint8) for _ in range(2))
    assert warm.warm_up(1, NEVER)
    assert warm.joined or plan == "dtop", "heads may hold steps that cannot be joined"
    for _ in range(3):
        for image in torch.from_numpy(blob_images(3)).cuda().split(1):
            for thresholds in (*thresholds_of(plan), (-2.0, -1e6), (NEVER, NEVER)):
                (found, *others), (expected, *same) = run(warm, image, *thresholds), run(cold, image, *thresholds)
                assert torch.equal(found, expected)
                for x, y in zip(others, same, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.fixture
def full_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in all bits of fp32, which are not PyTorch's default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_fp32")
def test_graphs_share_tokens_as_the_modules_do(blob_images: Images) -> None:
    plain = deployed(CTS, replace(network(), policy=True), device="cuda")
    packed = PackedNetwork(plain, torch.uint8)
    for count in (3, 1, 3, 1):
        assert_like_modules(packed, plain, torch.from_numpy(blob_images(count)).cuda(), 0.0, 0.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("shape", [network("linear"), PRUNED], ids=["segmenter", "segvit"])
def test_graphs_let_tokens_leave_as_the_modules_do(shape: Network, blob_images: Images) -> None:
    """One graph holds a segment and what its head decides, so the host launches nothing between two segments."""
    plain = deployed(PLANS["dtop"], shape, device="cuda")
    packed = PackedNetwork(plain, torch.uint8)
    assert packed.graphs is not None
    some = 0.332 if shape is PRUNED else SURE[0][0]
    for _ in range(2):
        for count in (3, 1, 2):
            for tau in (NEVER, some, -1.0):
                assert_like_modules(packed, plain, torch.from_numpy(blob_images(count)).cuda(), tau, 0.0)
    assert all(graph is not None for graph, _ in packed.graphs._graphs.values()), "some could not be captured"


@pytest.mark.gpu
@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_modules_results_of_every_family(family: str, blob_images: Images) -> None:
    for plan in plans_of(FAMILIES[family]):
        plain = deployed(PLANS[plan], FAMILIES[family], device="cuda")
        packed = PackedNetwork(plain, torch.uint8)
        assert packed.graphs is not None
        for _ in range(2):
            for images in busy_before_flat(blob_images):
                assert_like_modules(packed, plain, images.cuda(), *thresholds_of(plan)[0])
        most = 2 * (1 + 2 * (len(packed._segments) - 1))  # two batches of each of two sizes, which share the first part
        assert 0 < packed.graphs.captures == len(packed.graphs) <= most


@pytest.mark.gpu
@pytest.mark.usefixtures("full_fp32")
@pytest.mark.parametrize("family", ["segmenter", "eomt"])
def test_graphs_merge_by_keys_as_the_operators_do(family: str, merging: str, blob_images: Images) -> None:
    """Beside modules that merge in PyTorch's operators. Networks without prefix call the operator themselves."""
    plain = deployed(PLANS["tome"], FAMILIES.get(family), device="cuda")
    packed = PackedNetwork(plain, torch.uint8)
    with tome_operator.set_kernel_enabled("cuda", enabled=False) if use_kernels() else nullcontext():
        for _ in range(3):
            for images in busy_before_flat(blob_images):
                assert_like_modules(packed, plain, images.cuda(), 0.0, 0.0)
    assert packed.graphs is not None
    assert all(graph is not None for graph, _ in packed.graphs._graphs.values()), "some could not be captured"


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_of_every_family(family: str, blob_images: Images) -> None:
    """In fp16 no more labels differ from fp32 with the same decisions than twice the modules' own."""
    shape = FAMILIES[family]
    packed = PackedNetwork(deployed(PLANS[USUAL], shape, torch.float16, "cuda"), torch.uint8)
    image = torch.from_numpy(blob_images(1)).cuda()
    for _ in range(2):
        with packed.run(image, 0.9, 0.0) as merged:
            found, maps = labels(merged.scores, shape.grid, shape.image_size), [map.clone() for map in merged.maps]
    models = model_of(shape, torch.float16), model_of(shape, torch.float16).float()
    plain, exact = (Deployed(replay_merging(m, PLANS[USUAL]), shape, "labels").eval().cuda() for m in models)
    with torch.inference_mode():
        inputs = merge_inputs(0.0, 0.0, tuple(maps), "cuda")
        truth, same = exact(image, inputs)[0], plain(image, inputs)[0]
    assert found.dtype == truth.dtype
    assert (found != truth).double().mean() <= 2 * (same != truth).double().mean() + 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "classes", "cells"), [(7, 11, 8), (100, 150, 32), (33, 19, 64), (20, 300, 5)])
def test_labels_of_masks_are_those_of_their_scores(queries: int, classes: int, cells: int) -> None:
    """Also of masks that hardly cover anything, where small values decide."""
    generator = torch.Generator().manual_seed(0)
    for shift in (0, -30):
        masks = (torch.randn(2, queries, cells, cells + 1, generator=generator) * 4 + shift).cuda()
        scores = MaskScores(masks, torch.randn(2, queries, classes + 1, generator=generator).cuda() * 3, 0, [])
        found, expected = labels(scores, (1, 1), (70, 84)), labels_of(scores, (1, 1), (70, 84))
        assert found.dtype == expected.dtype
        assert (found != expected).double().mean() < 1e-3  # near ties of two classes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("plan", "count"), [(USUAL, 1), *((plan, count) for plan in ("tome", "evit", "dtop") for count in (1, 3, 8))]
)
def test_low_precision_errs_no_more_than_the_modules(
    plan: str, count: int, dtype: torch.dtype, merging: str, blob_images: Images
) -> None:
    """Against fp32 with the packed network's own maps; twice the error of the modules in the same precision."""
    shape = with_heads(network(width=128), PLANS[plan])
    packed = PackedNetwork(deployed(PLANS[plan], shape, dtype, "cuda"), torch.uint8)
    image = torch.from_numpy(blob_images(count)).cuda()
    for _ in range(2):
        scores, _, maps = run(packed, image, *thresholds_of(plan)[0])
    models = model_of(shape, dtype), model_of(shape, dtype).float()
    plain, exact = (Deployed(replay_merging(m, PLANS[plan]), shape, "scores").eval().cuda() for m in models)
    with torch.inference_mode():
        inputs = merge_inputs(0.0, 0.0, tuple(maps), "cuda")
        truth, same = exact(image, inputs)[0], plain(image, inputs)[0]
    assert torch.isfinite(scores).all()
    allowed = 2 * (same - truth).abs().max() + 1e-3
    assert (scores - truth).abs().max() <= allowed


CHAINED = [("evit", "fp32"), ("evit", "fp16"), ("evit", "bf16"), ("evit", "fp8"), ("tome", "fp16"), ("g2tm", "fp16")]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("plan", "precision"), CHAINED)
def test_the_chain_holds_on_packed_rows(plan: str, precision: str, tiny_export: Callable[..., Bundle]) -> None:
    """Batches of 1, 2, 3 and 8 mixed pictures, with token maps forced and decided freely."""
    bundle = tiny_export(flatten(PLANS[plan], "merging.") | {"precision": precision})
    report = verify(bundle, "torch", parity_windows(bundle.recipe, [], 3), progress=False)
    assert [(link.name, link.measured) for link in report.links if not link.passed] == []
    assert report.batches == (1, 2, 3, 8)
    with TorchRunner(bundle) as run:
        assert run.execution["rows"] == "packed"


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [USUAL, "dtop"])
def test_counts_and_thresholds_change_without_new_graphs(plan: str, blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[plan], device="cuda"), torch.uint8)
    assert packed.graphs is not None
    images = [torch.from_numpy(blob_images(4)[i : i + 1]).cuda() for i in range(4)]
    work = [(image, clap, gbm) for image in images for clap, gbm in (*thresholds_of(plan), (NEVER, NEVER))]
    first = [run(packed, *each) for each in work]
    captures = packed.graphs.captures
    order = np.random.default_rng(0).permutation(len(work) * 3) % len(work)
    for index in order:
        scores, _, maps = run(packed, *work[index])
        assert torch.equal(scores, first[index][0])
        assert all(torch.equal(a, b) for a, b in zip(maps, first[index][2], strict=True))
    assert packed.graphs.captures == captures
    assert len({tuple(length.item() for length in lengths) for _, lengths, _ in first}) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("plan", DECIDING)
def test_after_a_warm_up_single_pictures_capture_nothing(plan: str, merging: str, blob_images: Images) -> None:
    cold, warm = (PackedNetwork(deployed(PLANS[plan], device="cuda"), torch.uint8) for _ in range(2))
    assert cold.graphs is not None and warm.graphs is not None
    assert warm.warm_up(1, NEVER)
    captures = warm.graphs.captures
    assert captures == len(warm.graphs) > len(warm._segments), "several buckets of a segment"
    images = torch.from_numpy(blob_images(6)).cuda()
    with warm.graphs.warming():  # what is new would be captured at once
        for image, thresholds in product(images.split(1), (*thresholds_of(plan), (-2.0, -1e6), (NEVER, NEVER))):
            (found, *others), (expected, *same) = run(warm, image, *thresholds), run(cold, image, *thresholds)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # captured and as it comes
            assert all(torch.equal(a, b) for x, y in zip(others, same, strict=True) for a, b in zip(x, y, strict=True))
    assert warm.graphs.captures == captures


@pytest.mark.gpu
def test_batches_of_several_are_warmed_up_on_cuda(merging: str, blob_images: Images) -> None:
    plain = deployed(PLANS[USUAL], device="cuda")
    packed = PackedNetwork(plain, torch.uint8)
    for count in (2, 4):
        assert packed.warm_up(count, NEVER)
    for count in (1, 2, 4):
        for thresholds in (*thresholds_of(USUAL), (-2.0, -1e6), (NEVER, NEVER)):
            assert_like_modules(packed, plain, torch.from_numpy(blob_images(count)).cuda(), *thresholds)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["budgets", "tome", "evit"])
def test_known_counts_are_one_graph_a_batch_size_on_cuda(plan: str, merging: str, blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[plan], device="cuda"), torch.uint8)
    assert packed.graphs is not None
    images = torch.from_numpy(blob_images(4)).cuda()
    for _ in range(2):
        for batch in (images[:1], images[1:2], images[2:], images):
            run(packed, batch, 0.0, 0.0)
    assert packed.graphs.captures == len(packed.graphs) == 3


@pytest.mark.gpu
def test_the_callers_stream_is_respected(blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL], device="cuda"), torch.uint8)
    images = [torch.from_numpy(blob_images(2)[i : i + 1]).cuda() for i in range(2)]
    expected = [run(packed, image, 0.9, 0.0)[0] for image in images]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for image, stream in zip(images, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                late = torch.empty_like(image).copy_(image)  # there only after the sleep
                found.append(run(packed, late, 0.9, 0.0)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_threads_take_turns_on_cuda(blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL], device="cuda"), torch.uint8)
    assert_threads_take_turns(packed, [torch.from_numpy(blob_images(count)).cuda() for count in (1, 2, 3)])


@pytest.mark.gpu
def test_graphs_are_few_and_share_their_memory(blob_images: Images) -> None:
    packed = PackedNetwork(deployed(PLANS[USUAL], device="cuda"), torch.uint8, most_graphs=5)
    assert packed.graphs is not None
    reserved = []
    for _ in range(4):
        for count in range(1, 7):  # more batch sizes than are kept, too
            image = torch.from_numpy(blob_images(count)).cuda()
            first = run(packed, image, 0.9, 0.0)[0]
            assert torch.equal(first, run(packed, image, 0.9, 0.0)[0])
            assert len(packed.graphs) <= 5
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1], reserved


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [USUAL, "dtop"])
def test_labels_of_packed_scores_on_cuda(plan: str, merging: str, blob_images: Images) -> None:
    assert_labels_of_packed_scores(plan, "cuda", torch.from_numpy(blob_images(3)))
