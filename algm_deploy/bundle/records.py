"""What a manifest holds: one type for each record, strict and frozen. Steps return them, the bundle stores them.

Units and statistics stand in the names of figures. A record that was measured has an `identity`: a later one of the
same identity takes its place. Old manifests are brought into these types by `bundle/upgrade.py`.
"""

# Annotations are evaluated: msgspec reads them.
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

from msgspec import Struct

from algm_deploy.bundle.signature import Signature
from algm_deploy.environment import Environment, GpuState
from algm_deploy.recipe.plan import MergePlan
from algm_deploy.recipe.schema import Output, Precision, Protocol, Recipe

SCHEMA = 2

Threshold = float | Literal["inf", "-inf"]  # JSON has no infinity
VariantName = Literal["dense", "dense_cudnn", "merged", "truncated"]
DENSE_VARIANTS: tuple[VariantName, ...] = ("dense", "dense_cudnn")
ProtocolName = Literal["duplicate", "mixed", "latency"]
Step = Literal["parity", "evaluation", "speed"]
Reference = Literal["cpu", "cuda"]  # what PyTorch computed on that a runtime was held to


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all records."""


class Measurement:
    """What records of one runtime have in common; `section` is where manifests keep a kind, `step` what makes it."""

    __slots__ = ()
    section: ClassVar[str]
    step: ClassVar[Step | None] = None

    runtime: str  # of each record; here it is no field, so that a record may be figures as well

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a later record must share to take this one's place."""
        return (self.runtime,)


class FileEntry(Record, frozen=True, kw_only=True):
    """A file of a bundle. `made_from` maps a source's name to its sha256; `uses` names files that it cannot do without.

    A source that is itself a file of the bundle must still have that hash, otherwise the entry is out of date.
    """

    sha256: str
    size_bytes: int
    made_from: dict[str, str] = {}
    uses: tuple[str, ...] = ()


class VariantOrigin(Record, frozen=True, kw_only=True):
    """Which network a variant of a bundle holds, of which files, and the rows kept after each layer, prefix counted."""

    name: VariantName
    made_from: dict[str, str]
    rows_by_layer: tuple[tuple[int, int], ...] = ()


class NotRun(Record, frozen=True, kw_only=True):
    """Why a step has no record for a runtime."""

    step: Step
    runtime: str
    reason: str


# -------------------------------------------------------------------------------------------------------- quantisation


class QuantizedProduct(Record, frozen=True, kw_only=True):
    """A matrix product, by the name of its module, whose input x is scale * (level - zero_point), fp32 `scale`.

    In fp8 levels are numbers of e4m3, scales powers of two, and there are no zero points. The weight has a step for
    each output channel, which follows from the weights of the bundle.
    """

    name: str
    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf") or not -128 <= self.zero_point <= 127:
            raise ValueError("expected a finite scale above 0 and a zero point from -128 to 127")


class QuantizedAttention(Record, frozen=True, kw_only=True):
    """Attention, by the name of its module, whose products may be in int8: the fp32 steps of its scaled queries, of its
    keys and of its values, whose level 0 is zero. Not every runtime computes with them: `ops/attention.py`."""

    name: str
    query: float
    key: float
    value: float

    def __post_init__(self) -> None:
        if not all(0 < step < float("inf") for step in (self.query, self.key, self.value)):
            raise ValueError("expected finite steps above 0")


class Quantization(Record, frozen=True, kw_only=True):
    """How a bundle in int8 or fp8 was calibrated: its products in that precision, and those of blocks that are not in
    it (`high`).

    Those are in fp32, for fp8 in fp16, and so is everything that is no product of a block: softmax, norms, the patch
    embedding, the rest of the decoder, and attention's own products, but for runtimes that compute those of `attention`
    in int8. Similarities, statistics, sizes and the label map are in fp32. `windows_sha256` is of the pixels of the
    windows that ranges were measured on. `label_agreement`, a share, is with the same weights in fp32, on some of these
    windows, `label_agreement_attention` that with `attention` in int8 too. In int8 channels were balanced, and weights
    have levels from -`weight_levels` to `weight_levels`.
    """

    products: tuple[QuantizedProduct, ...]
    attention: tuple[QuantizedAttention, ...] = ()
    high: tuple[str, ...] = ()
    windows: int
    windows_sha256: str
    ranges: str
    balance_alpha: float | None = None
    weight_levels: int | None = None
    label_agreement: float
    label_agreement_wanted: float
    label_agreement_attention: float | None = None


# -------------------------------------------------------------------------------------------------------------- parity


class Link(Record, frozen=True, kw_only=True):
    """One link of the parity chain. `measured` and `gate` are for people; `facts` hold numbers with units in names."""

    number: int
    name: str
    passed: bool
    measured: str
    gate: str
    facts: dict[str, Any] = {}


class Parity(Measurement, Record, frozen=True, kw_only=True):
    """The parity chain on one runtime. `files`: those that were executed, by SHA-256; `pictures`: of what kind;
    `reference`: what PyTorch computed on; `seconds`: by link, and by what links share (`parity/chain.py`); they add up
    to the chain, and are empty in older records."""

    section: ClassVar[str] = "parity"
    step: ClassVar[Step] = "parity"

    runtime: str
    images: int
    batches: tuple[int, ...]
    links: tuple[Link, ...]
    pictures: str = "pictures"
    device: str = "not recorded"
    files: dict[str, str] | None = None
    reference: Reference = "cpu"
    seconds: dict[str, float] = {}

    @property
    def passed(self) -> bool:
        """Whether there are links and all of them hold."""
        return bool(self.links) and all(link.passed for link in self.links)


# ---------------------------------------------------------------------------------------------------------- evaluation


class MergeTokens(Record, frozen=True, kw_only=True):
    """Patch tokens left after one merge, over windows or pictures. `merge` is its name in the signature: `clap_1`."""

    merge: str
    mean: float
    min: int | None = None
    max: int | None = None


class Figures(Record, frozen=True, kw_only=True):
    """Quality and token counts on the images of a data set, or of one of its slices; None without a labelled pixel."""

    images: int
    miou_percent: float | None
    pixel_accuracy_percent: float | None
    windows: int = 0
    labelled_pixels: int = 0
    majority_guess_miou_percent: float | None = None
    iou_percent_by_class: dict[str, float | None] = {}
    tokens: tuple[MergeTokens, ...] = ()


class TokenHistograms(Record, frozen=True, kw_only=True):
    """How many windows have how many tokens after each merge: counts between two edges."""

    token_edges: tuple[float, ...]
    windows_by_merge: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        rising = len(self.token_edges) > 1 and all(low < high for low, high in pairwise(self.token_edges))
        counts = self.windows_by_merge.values()
        if not rising or any(len(one) != len(self.token_edges) - 1 or min(one) < 0 for one in counts):
            raise ValueError("expected rising edges and a count between two of them")

    @property
    def patches(self) -> float:
        """Patches of a window: the tokens that a network without merging keeps."""
        return self.token_edges[-1]


class Evaluation(Measurement, Figures, frozen=True, kw_only=True):
    """One evaluation of a data set; `failures` maps the names of images that could not be used to the reason.

    Of `unlabelled` images, which have no labelled pixel, tokens and multiply-adds are in the figures. `thresholds` are
    those in force. Multiply-adds are in 10^9 of a window, `_dense` those without merges.
    """

    section: ClassVar[str] = "evaluations"
    step: ClassVar[Step] = "evaluation"

    runtime: str
    dataset: str
    split: str
    protocol: Protocol
    window_batch: int = 1
    thresholds: dict[str, Threshold] = {}
    device: str = "not recorded"
    fingerprint_sha256: str = ""
    preprocessing_sha256: str = ""
    gmacs_per_window_mean: float | None = None
    gmacs_per_window_dense: float | None = None
    token_histograms: TokenHistograms
    slices: dict[str, Figures] = {}
    failures: dict[str, str] = {}
    unlabelled: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """One evaluation of so many images at these thresholds."""
        images = self.images + len(self.failures)
        return (self.runtime, self.dataset, self.split, images, *sorted(self.thresholds.items()))


# --------------------------------------------------------------------------------------------------------------- speed


class Spread(Record, frozen=True, kw_only=True):
    """A figure over the rounds of a run that have one."""

    rounds: int
    min: float
    p25: float
    p75: float
    max: float


class ByPicture(Record, frozen=True, kw_only=True):
    """Latency of each picture beside its own token counts by merge, in the order they were timed."""

    latency_ms_p50: tuple[float, ...]
    tokens_by_merge: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        if any(len(counts) != len(self.latency_ms_p50) for counts in self.tokens_by_merge.values()):
            raise ValueError("expected as many token counts as latencies")


class Speed(Measurement, Record, frozen=True, kw_only=True):
    """One network under one protocol, timed in turns with the others of its run.

    `thresholds` are those in force of the merged network in this run. `stages` are the parts of `latency_ms_p50`, which
    goes from a window in the host's memory to its label map there: they add up to it. `reading` are medians of what a
    photo takes before that, which is in no other figure. `representative`: the pictures are photos. A run that is not
    `stable` has no figure worth telling. Speed-ups and efficiencies are against `baseline`, the faster of the dense
    networks that were timed.
    """

    section: ClassVar[str] = "speeds"
    step: ClassVar[Step] = "speed"

    runtime: str
    variant: VariantName
    protocol: ProtocolName
    batch: int
    stable: bool
    thresholds: dict[str, Threshold] = {}
    device: str = "not recorded"
    precision: Precision | None = None
    output: Output | None = None
    # figures
    throughput_img_per_s: float | None = None
    batch_ms_mean_of_medians: float | None = None
    latency_ms_p50: float | None = None
    latency_ms_p90: float | None = None
    latency_ms_p99: float | None = None
    stages: dict[str, float] = {}
    reading: dict[str, float] = {}
    speedup: float | None = None
    baseline: VariantName = "dense"
    merge_efficiency: float | None = None
    merge_efficiency_by_round: Spread | None = None
    tokens: tuple[MergeTokens, ...] = ()
    gmacs_per_window_mean: float | None = None
    by_picture: ByPicture | None = None
    # conditions
    drift_percent: float | None = None
    drift_percent_allowed: float | None = None
    rounds: int | None = None
    samples: int | None = None
    warmup_calls: int | None = None
    pictures: str | None = None
    pictures_timed: int | None = None
    representative: bool | None = None
    clock: str | None = None
    execution: dict[str, str] = {}
    nodes_by_provider: dict[str, int] = {}
    host_device_copies: int | None = None
    provider: str | None = None
    executable: str | None = None
    custom_operators: tuple[str, ...] = ()
    torch_threads: int | None = None
    cpus_usable: int | None = None
    load_average_1_minute: float | None = None
    environment: Environment | None = None
    gpu: GpuState | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """One network under one protocol at these thresholds."""
        return (self.runtime, self.protocol, self.variant, self.batch, *sorted(self.thresholds.items()))


# --------------------------------------------------------------------------------------------------------- executables


class ParsedTensor(Record, frozen=True, kw_only=True):
    """An input or output of a network as its builder sees it; -1 is the batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Plugin(Record, frozen=True, kw_only=True):
    """A plugin of a parsed network: the node's name, the plugin's, and the types of its outputs."""

    plugin: str
    name: str = ""
    dtypes: tuple[str, ...] = ()


class ParsedNetwork(Record, frozen=True, kw_only=True):
    """What a builder was given; `layers` counts layers by type and output dtype."""

    plugins: tuple[Plugin, ...]
    inputs: tuple[ParsedTensor, ...] = ()
    outputs: tuple[ParsedTensor, ...] = ()
    layers: dict[str, dict[str, int]] = {}


class TimingCache(Record, frozen=True, kw_only=True):
    """SHA-256 of a timing cache before and after a build: equal ones say that no kernel was measured anew."""

    sha256_before: str | None
    sha256_after: str | None

    @property
    def kept(self) -> bool:
        """Whether nothing was measured anew."""
        return self.sha256_before == self.sha256_after


class Engine(Measurement, Record, frozen=True, kw_only=True):
    """What an engine was made of and for, and the evidence about it; a runner refuses an engine whose facts do not fit.

    `compute_capabilities` names the GPUs it was built for. `engine_layers` comes from the engine inspector where the
    engine can be loaded, else it is None and `engine_layers_reason` says why. `builder_layers` (name, kind) are the
    finished engine's layers as the builder's log tells them, fused attention and plugins among them; it needs no GPU.
    `log` holds the builder's other lines, `rewrites` how often each lowering fired. `plugin_sources` is what the plugin
    library says that it was made of. `usual_rows` are the rows after each merge that the engine is tuned for, measured
    on what `usual_rows_of` says. `attention_in_parts`: attention layers that the builder did not fuse.
    """

    section: ClassVar[str] = "engines"

    runtime: str
    version: str
    precision: Precision
    batches: tuple[int, int, int]
    compute_capabilities: tuple[str, ...]
    version_compatible: bool
    hardware_compatible: bool
    onnx_hash: str
    plugin_sources: str | None
    engine_bytes: int
    parsed_network: ParsedNetwork
    engine_layers: list[Any] | None = None
    engine_layers_reason: str | None = None
    builder_layers: tuple[tuple[str, str], ...] = ()
    log: tuple[str, ...] = ()
    build_seconds: float
    timing_cache: TimingCache | None = None
    rewrites: dict[str, int] = {}
    usual_rows: dict[str, int] = {}
    usual_rows_of: str = "nothing"
    attention_in_parts: int | None = None


class EngineMerge(Record, frozen=True, kw_only=True):
    """A merge between two engines: names of its tensors, as the engines have them, and its operator's attributes."""

    kind: Literal["clap", "gbm"]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[int | float | str | tuple[int, ...], ...]


class EngineStretches(Measurement, Record, frozen=True, kw_only=True):
    """A network as one engine for each part between merges, in order, and the merges that are run between them.

    `usual_rows` of an engine are those that it is tuned to take. `single_refused` says why one engine for the whole
    network could not be built.
    """

    section: ClassVar[str] = "engine_stretches"

    runtime: str
    engines: tuple[Engine, ...]
    merges: tuple[EngineMerge, ...]
    single_refused: str | None = None

    def __post_init__(self) -> None:
        if not self.merges or len(self.engines) != len(self.merges) + 1:
            raise ValueError("expected a merge between every two engines")


class OptimizedGraph(Measurement, Record, frozen=True, kw_only=True):
    """A runtime's own ONNX graph: how often each rewrite fired, how many segments there are for CUDA graphs, whether
    products of fp32 numbers may be in it (None where nobody looked).
    """

    section: ClassVar[str] = "optimized_graphs"

    runtime: str
    rewrites: dict[str, int]
    segments: int = 0
    multiplies_fp32: bool | None = None


class Rebuilds(Measurement, Record, frozen=True, kw_only=True):
    """How far several builds of one executable differ; None where nothing here can execute it."""

    section: ClassVar[str] = "rebuilds"

    runtime: str
    builds: int
    distinct_files: int
    pictures: int
    labels_equal_percent_min: float | None = None
    network_ms_by_build: tuple[float, ...] | None = None
    device: str = "not recorded"


# -------------------------------------------------------------------------------------------------------------- tuning

Aim = Literal["reference", "best", "gmacs", "throughput"]
Knob = Literal["clap_threshold", "gbm_threshold"]


class TuningRecord(Record, frozen=True, kw_only=True, tag_field="kind"):
    """What one of the searches of `tune` found; a later one of the same title takes its place.

    `pictured` are a threshold's name and the values of it that pictures show.
    """

    section: ClassVar[str] = "tunings"

    title: str
    pictured: tuple[str, tuple[float, ...]] | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """One of this title."""
        return (self.title,)


class PairSimilarity(Record, frozen=True, kw_only=True):
    """Cosine similarity over so many pairs of patches."""

    pairs: int
    mean: float
    std: float


class ClassSimilarity(Record, frozen=True, kw_only=True):
    """Pairs by whether both patches show one class, within windows of `side` x `side` patches; side None: anywhere."""

    side: int | None
    same: PairSimilarity | None
    other: PairSimilarity | None


class BlockSimilarity(Record, frozen=True, kw_only=True):
    """Pairs of patches after the attention of a 1-based block; `by_class` where the patches are labelled."""

    block: int
    every: PairSimilarity
    by_class: tuple[ClassSimilarity, ...] = ()


class RuleTuning(TuningRecord, frozen=True, kw_only=True, tag="rule"):
    """CLAP's threshold by the rule: mean + standard deviation over the pairs of all `blocks`, network without merging.

    `dataset` and `split` are None for photos without labels.
    """

    dataset: str | None
    split: str | None
    images: int
    clap_threshold: float
    blocks: tuple[BlockSimilarity, ...]

    def __post_init__(self) -> None:
        if len({tuple(one.side for one in block.by_class) for block in self.blocks}) != 1:
            raise ValueError("expected at least one block, and the same windows in each")


class AttentionTuning(TuningRecord, frozen=True, kw_only=True, tag="attention"):
    """Where attention goes, without and with merging: means over labelled windows, each of which counts the same.

    Shares of the classes in percent, in the order of `class_names`: of the patches, of the tokens left after the last
    merge, in block `last_merge`, and of the attention in each block. `classes_attended`: how many classes attention is
    spread over, the exponential of its entropy. `thresholds` are those of the merging network.
    """

    dataset: str
    split: str
    images: int
    windows: int
    last_merge: int
    thresholds: dict[str, Threshold]
    class_names: tuple[str, ...]
    patches_percent: tuple[float, ...]
    tokens_percent: tuple[float, ...]
    attention_dense_percent_by_block: tuple[tuple[float, ...], ...]
    attention_merged_percent_by_block: tuple[tuple[float, ...], ...]
    classes_attended_dense_by_block: tuple[float, ...]
    classes_attended_merged_by_block: tuple[float, ...]

    def __post_init__(self) -> None:
        dense, merged = self.attention_dense_percent_by_block, self.attention_merged_percent_by_block
        by_block = (dense, merged, self.classes_attended_dense_by_block, self.classes_attended_merged_by_block)
        by_class = (self.patches_percent, self.tokens_percent, *dense, *merged)
        if {len(one) for one in by_block} != {len(dense)} or {len(one) for one in by_class} != {len(self.class_names)}:
            raise ValueError("expected shares for each block and each class")
        if not 1 <= self.last_merge < len(dense):
            raise ValueError(f"expected a block after the last merge, got {self.last_merge} of {len(dense)}")


class Point(Record, frozen=True, kw_only=True):
    """What one setting gives on some photos; multiply-adds in 10^9 of a window, `speedup` against the dense network
    `baseline`, the faster where a runtime has two."""

    miou_percent: float
    miou_percent_by_slice: dict[str, float | None] = {}
    gmacs_per_window_mean: float | None = None
    tokens: tuple[MergeTokens, ...] = ()
    throughput_img_per_s: float | None = None
    speedup: float | None = None
    baseline: VariantName = "dense"
    stable: bool = True


class Candidate(Point, frozen=True, kw_only=True):
    """A setting of what is searched: `value` is a threshold, or a 1-based block."""

    value: float


class TunedOn(Record, frozen=True, kw_only=True):
    """Photos, what they give without merging, and the candidates measured on them by rising value."""

    dataset: str
    split: str
    images: int
    images_by_slice: dict[str, int]
    dense: Point
    candidates: tuple[Candidate, ...] = ()


class HeldOut(TunedOn, frozen=True, kw_only=True):
    """Photos that nothing was chosen on: what the bundle's recipe gives, the marked candidate, and a reference."""

    recipe: Point
    marked: Point
    reference: Point | None = None


class SearchTuning(TuningRecord, frozen=True, kw_only=True):
    """A search for the candidate that serves an aim, on some photos, and how it does on others.

    `limit` of the aim: mIoU in percent, multiply-adds of a window in 10^9, or pictures a second. `marked` is the chosen
    candidate; where none `reached` the aim, the one that misses it least, with its tokens. `reference` names what a
    limit of mIoU was taken from, where that is not the dense network. `variant` says how merging differed from ALGM's.
    """

    aim: Aim
    limit: float | None
    reached: bool
    marked: Candidate
    token_histograms: TokenHistograms
    reference: str | None = None
    variant: tuple[str, ...] = ()
    tuned_on: TunedOn
    held_out: HeldOut

    def __post_init__(self) -> None:
        if not {one.merge for one in self.marked.tokens} <= self.token_histograms.windows_by_merge.keys():
            raise ValueError("expected a histogram for each merge")


class ThresholdTuning(SearchTuning, frozen=True, kw_only=True, tag="threshold"):
    """A search for a threshold; `recipe_value` is the bundle's."""

    knob: Knob
    recipe_value: float


class PrecisionSearch(Record, frozen=True, kw_only=True):
    """The threshold of a network in one precision, for the limit that all precisions share; `bundle` is its folder."""

    bundle: str
    precision: Precision
    search: ThresholdTuning


class PrecisionTuning(TuningRecord, frozen=True, kw_only=True, tag="precision"):
    """A search for precision and threshold together; `searches` in the order they were asked for, the first gives the
    reference. `marked` is the place of the fastest that keeps the limit; where none does, of the most accurate."""

    runtime: str
    searches: tuple[PrecisionSearch, ...]
    marked: int

    def __post_init__(self) -> None:
        if not 0 <= self.marked < len(self.searches):
            raise ValueError("expected the place of one of the searches")
        if any(one.search.held_out.reference is None for one in self.searches):
            raise ValueError("expected figures of the reference beside each search")

    @property
    def best(self) -> PrecisionSearch:
        """The one that is marked."""
        return self.searches[self.marked]


class BudgetTuning(SearchTuning, frozen=True, kw_only=True, tag="budget"):
    """A search for budgets; `plan` has the marked ones.

    A candidate's value is that of the threshold `knob` which merges as much on average, on the photos to choose on;
    `recipe_value` is the bundle's. `thresholds` are the figures of those thresholds themselves on these photos, and
    `thresholds_held_out` on the others, at the marked candidate at least.
    """

    knob: Knob
    plan: MergePlan
    recipe_value: float
    thresholds: tuple[Candidate, ...]
    thresholds_held_out: tuple[Candidate, ...]


class PositionTuning(SearchTuning, frozen=True, kw_only=True, tag="positions"):
    """A search for the earliest block of the last GBM in `layers`; `recipe_layers` are the bundle's."""

    layers: tuple[int, ...]
    recipe_layers: tuple[int, ...]


class TuningPage(TuningRecord, frozen=True, kw_only=True, tag="page"):
    """What an earlier release wrote for people to read; its `figures` do not suffice for a record of today's.

    tables  caption, header, rows
    plots   caption, labels of x and y, points (x, y, label) by series
    counts  caption, edges, windows between two edges and mean tokens by the merge's title
    """

    lines: tuple[str, ...]
    tables: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...]
    plots: tuple[tuple[str, str, str, dict[str, tuple[tuple[float, float, str], ...]]], ...]
    counts: tuple[tuple[str, tuple[float, ...], dict[str, tuple[int, ...]], dict[str, float]], ...]
    figures: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if any(len(row) != len(header) for _, header, rows in self.tables for row in rows):
            raise ValueError("expected rows as long as their table's header")


Tuning = RuleTuning | ThresholdTuning | PrecisionTuning | BudgetTuning | PositionTuning | AttentionTuning | TuningPage

# ------------------------------------------------------------------------------------------------------------ manifest

Stored = Parity | Evaluation | Speed | Engine | EngineStretches | OptimizedGraph | Rebuilds | Tuning


class Manifest(Record, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """Everything a bundle knows about itself. `replacing`: files that a stopped `add` may have put in place."""

    environment: Environment
    recipe: Recipe
    files: dict[str, FileEntry]
    replacing: dict[str, FileEntry] = {}
    signature: Signature | None = None
    preprocessing_sha256: str | None = None
    unused_checkpoint_keys: tuple[str, ...] = ()
    position_embedding_resized_from: tuple[int, int] | None = None
    variant: VariantOrigin | None = None
    quantization: Quantization | None = None
    not_run: tuple[NotRun, ...] = ()
    parity: tuple[Parity, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    speeds: tuple[Speed, ...] = ()
    engines: tuple[Engine, ...] = ()
    engine_stretches: tuple[EngineStretches, ...] = ()
    optimized_graphs: tuple[OptimizedGraph, ...] = ()
    rebuilds: tuple[Rebuilds, ...] = ()
    tunings: tuple[Tuning, ...] = ()


def storable(thresholds: Mapping[str, float]) -> dict[str, Threshold]:
    """Thresholds as records hold them: infinite ones as texts. `float` turns them back."""
    texts: dict[float, Threshold] = {float("inf"): "inf", float("-inf"): "-inf"}
    return {name: texts.get(value, value) for name, value in thresholds.items()}


def tokens_by_merge(tokens: Sequence[MergeTokens]) -> dict[str, float]:
    """Mean tokens by the merge's name, in the order they run."""
    return {one.merge: one.mean for one in tokens}
