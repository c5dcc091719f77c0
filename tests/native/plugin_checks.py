"""Checks of the plugin library inside one runtime library: `python plugin_checks.py CHECKS HARNESS RUNTIME PLUGINS`.

CHECKS are names with commas between them. With `host` at the end, PLUGINS is a build over the CPU kernels, which
enqueues in host memory. A program of its own, because one process holds one TensorRT. A failed check is an
AssertionError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kernel_memory import DTYPES, DeviceMemory, HostMemory
from plugin_harness import BUILD, PLUGINS, RUNTIME, SHAPES, SIZE_TENSOR, Harness, PluginKernels, tensor


def created(harness: Harness) -> None:
    for name, (attributes, _, _) in PLUGINS.items():
        for phase in (BUILD, RUNTIME):
            assert harness.create(name, attributes, phase), name


def wrong_namespace(harness: Harness) -> None:
    assert harness.create("clap", PLUGINS["clap"][0], namespace="algm") is None


def serialized(harness: Harness) -> None:
    """Fields hold the attributes, and a plugin made from them at run time holds the same."""
    for name, (attributes, _, _) in PLUGINS.items():
        expected = {key: value if isinstance(value, tuple) else (value,) for key, value in attributes.items()}
        plugin = harness.create(name, attributes)
        assert plugin
        assert plugin.fields() == expected
        again = harness.create(name, {k: v[0] if len(v) == 1 else v for k, v in plugin.fields().items()}, RUNTIME)
        assert again
        assert again.fields() == expected


def cloned(harness: Harness) -> None:
    """A clone owns its fields: they survive the object it was cloned from."""
    for name, (attributes, _, _) in PLUGINS.items():
        plugin = harness.create(name, attributes)
        assert plugin
        before = plugin.fields()
        for copy in (plugin.clone(), plugin.attach()):
            assert not set(copy.field_addresses()) & set(plugin.field_addresses())
            assert copy.fields() == before
        copy = plugin.clone()
        plugin.destroy()
        assert copy.fields() == before


def types(harness: Harness) -> None:
    for name, (attributes, inputs, outputs) in PLUGINS.items():
        plugin = harness.create(name, attributes)
        assert plugin
        for kind in ("float32", "float16", "bfloat16"):
            given, expected = ([kind if t == "T" else t for t in ports] for ports in (inputs, outputs))
            assert plugin.output_types(given) == expected, (name, kind)
            assert all(plugin.accepts([*given, *expected])), (name, kind)
            assert not any(plugin.accepts([*given, *expected], layout=3)), name


def wrong_types(harness: Harness) -> None:
    for name, (attributes, inputs, outputs) in PLUGINS.items():
        plugin = harness.create(name, attributes)
        assert plugin
        assert plugin.output_types(["int8" if t == "T" else t for t in inputs]) is None
        for position in range(1, len(inputs)):
            wrong = ["float16" if t == "T" else t for t in inputs]
            wrong[position] = "float16"
            assert plugin.output_types(wrong) is None, (name, position)
            expected = ["float16" if t == "T" else t for t in outputs]
            assert not plugin.accepts([*wrong, *expected])[position], (name, position)


def shapes(harness: Harness) -> None:
    for name, (inputs, outputs) in SHAPES.items():
        plugin = harness.create(name, PLUGINS[name][0])
        assert plugin
        found = plugin.output_shapes(inputs)
        assert found
        assert found[0] == outputs, name
        if name in ("clap", "gbm"):
            assert found[1] == (9, 25), name


def sizes(harness: Harness) -> None:
    """What a size tensor is tuned for and its bound are numbers, after another merge too; measured ones, or half."""
    attributes = PLUGINS["gbm"][0]
    behind_clap = [(2, SIZE_TENSOR - 4, 8), (2, SIZE_TENSOR - 4), *SHAPES["gbm"][0][2:]]
    for usual, tuned in ((9, 9), (0, 13), (400, 25)):
        plugin = harness.create("gbm", attributes | {"usual_rows": usual})
        assert plugin
        found = plugin.output_shapes(behind_clap)
        assert found
        assert found[1] == (tuned, 25), usual


def wrong_shapes(harness: Harness) -> None:
    """A wrong rank is refused while parsing, sizes that contradict each other when the shapes are known."""
    plugin = harness.create("clap", PLUGINS["clap"][0])
    assert plugin
    assert plugin.output_shapes([(2, 25), (2, 25), ()]) is None
    tokens, size, threshold = ((2, 30, 8), (2, 30), ())
    assert plugin.workspace([tensor(shape, "float32") for shape in (tokens, size, threshold)]) == -1


def workspace(harness: Harness) -> None:
    for name in ("clap", "gbm"):
        plugin = harness.create(name, PLUGINS[name][0])
        assert plugin
        sizes = []
        for batch in (1, 4):
            given = [
                tensor((batch, *shape[1:]) if shape else shape, "float32" if kind == "T" else kind)
                for shape, kind in zip(SHAPES[name][0], PLUGINS[name][1], strict=True)
            ]
            sizes.append(plugin.workspace(given))
        assert 0 < sizes[0] < sizes[1], (name, sizes)


def no_workspace(harness: Harness) -> None:
    """Inputs that the kernels refuse and dimensions that nobody knows stop a build."""
    for name in ("clap", "gbm"):
        plugin = harness.create(name, PLUGINS[name][0])
        assert plugin
        for rows, width in ((25, -1), (25, 0)):
            shapes = [(2, rows, width), (2, rows), *SHAPES[name][0][2:]]
            kinds = ["float32" if kind == "T" else kind for kind in PLUGINS[name][1]]
            assert plugin.workspace([tensor(s, k) for s, k in zip(shapes, kinds, strict=True)]) == -1, (name, width)


def unknown_rows(harness: Harness) -> None:
    """A row count that TensorRT does not tell when a merge or what follows it is enqueued, -1 in place of S'."""
    for name, (attributes, kinds, results) in PLUGINS.items():
        plugin = harness.create(name, attributes)
        assert plugin
        shapes, outputs = SHAPES[name]
        unknown = [(2, -1, *shapes[0][2:]), *shapes[1:]]
        given = [tensor(s, "float32" if k == "T" else k) for s, k in zip(unknown, kinds, strict=True)]
        written = [tensor((2,) * len(s), "float32" if k == "T" else k) for s, k in zip(outputs, results, strict=True)]
        assert plugin.enqueue(given, written, 0, 0) != 0, name


def wrong_attributes(harness: Harness) -> None:
    clap, gbm = PLUGINS["clap"][0], PLUGINS["gbm"][0]
    assert harness.create("clap", {k: v for k, v in clap.items() if k != "grid"}) is None
    assert harness.create("clap", clap | {"window": (0, 2)}) is None
    assert harness.create("clap", clap | {"grid": (4, 6, 1)}) is None
    assert harness.create("clap", clap | {"semantics": 2}) is None
    assert harness.create("clap", clap | {"usual_rows": -1}) is None
    assert harness.create("gbm", gbm | {"divisor": 0.0}) is None
    assert harness.create("gbm", gbm | {"divisor": 2}) is None  # an integer where a float belongs
    assert harness.create("deformable_attention", {"shapes": (4, 6, 0, 3)}) is None
    assert harness.create("deformable_attention", {"shapes": (1,) * 18}) is None


# --- enqueued ---------------------------------------------------------------------------------------------------------


def each_case(check: Callable[[Any, Any, np.random.Generator, Any], None], harness: Harness) -> None:
    import kernel_cases as cases  # loads torch, which the other checks do not need

    for dtype in DTYPES:
        cases.many(dtype, lambda pick, rng, dtype=dtype: check(PluginKernels(harness, MEMORY), pick, rng, dtype))


def enqueued_clap(harness: Harness) -> None:
    import kernel_cases as cases

    each_case(lambda k, pick, rng, dtype: cases.check_exact(k, cases.clap_case(pick, rng, dtype, True)), harness)


def enqueued_gbm(harness: Harness) -> None:
    import kernel_cases as cases

    each_case(lambda k, pick, rng, dtype: cases.check_exact(k, cases.gbm_case(pick, rng, dtype, True)), harness)


def enqueued_tail(harness: Harness) -> None:
    """Unmerge is a gather; labels of whole-number scores at power-of-two ratios are exact."""

    import kernel_cases as cases

    def check(kernels: Any, pick: cases.Pick, rng: np.random.Generator, dtype: Any) -> None:
        prefix, grid = pick((0, 1, 2, 5)), (pick((2, 3)), pick((2, 5)))
        scores, patch_map = cases.label_inputs(rng, grid, pick((1, 7, 150, 300)), prefix, dtype, True)
        values = kernels.unmerge(scores, patch_map, prefix=prefix)
        np.testing.assert_array_equal(values, np.take_along_axis(scores, patch_map[:, :, None] - prefix, 1))
        size = (grid[0] * 16, grid[1] * 8)
        assert cases.check_label_map(kernels, scores, patch_map, prefix=prefix, grid=grid, size=size) == 0

    each_case(check, harness)


def enqueued_places(harness: Harness) -> None:
    import kernel_cases as cases

    each_case(
        lambda k, pick, rng, dtype: cases.check_places(k, cases.places_case(pick, rng, dtype, True), True), harness
    )


def told_bound(array: np.ndarray, rows: int) -> np.ndarray:
    """What a plugin finds where it is told `rows` of an array (B, S, ...) that lies densely in memory for more."""
    images, _, *rest = array.shape
    memory = np.full((images, rows, *rest), 0.5, array.dtype)
    memory.reshape(-1)[: array.size] = array.reshape(-1)
    return memory


def bound_rows(harness: Harness) -> None:
    """The bound of a size tensor in place of its value: no plugin can tell, every picture but the first is garbage, and
    what compares an engine with PyTorch names the link. One picture alone would not show it."""
    from algm_deploy.runners.tensorrt.digest import Digest, first_difference, with_labels

    rng, kernels, merges = np.random.default_rng(3), PluginKernels(harness, MEMORY), ("clap_1", "gbm_2")
    words = {"semantics": "code", "batch": "per_image"}
    places = {"prefix": 1, "grid": (8, 8)}
    clap = {"window": (2, 2), "order": "published", "rule": "threshold", "budget": 0, **places, **words}
    gbm = {"prefix": 1, "rule": "fixed", "divisor": 1.0, "budget": 0, **words}
    kinds = rng.standard_normal((6, 16))[rng.integers(6, size=(2, 4, 4))].repeat(2, 1).repeat(2, 2).reshape(2, 64, 16)
    patches = kinds + 0.3 * rng.standard_normal((2, 64, 1)) * rng.standard_normal((2, 64, 16))
    tokens = np.concatenate([np.ones((2, 1, 16)), patches], 1).astype(np.float32)
    classes = rng.standard_normal((16, 5)).astype(np.float32)

    def chain(images: int, told: str | None, tail: str) -> dict[str, np.ndarray]:
        def given(name: str, array: np.ndarray) -> np.ndarray:
            return told_bound(array, 65) if name == told else array

        size = np.ones((images, 65), np.float32)
        merged, sizes, first, length = kernels.clap(tokens[:images], size, 0.9, **clap)
        assert merged.shape[1] < 60
        left, _, second, lengths = kernels.gbm(given("gbm", merged), given("gbm", sizes), first, length, 0.95, **gbm)
        scores = given(tail, left[:, 1:] @ classes)
        if tail == "labels":
            made = kernels.label_map(scores, second, size=(64, 64), **places)
        else:
            made = kernels.unmerge(scores, second, prefix=1).swapaxes(1, 2).reshape(images, 5, 8, 8)
        maps = {"token_map_clap_1": first, "token_map_gbm_2": second}
        return {**maps, "token_counts": np.stack([length, lengths], 1) - 1, tail: made}

    def difference(images: int, told: str | None, tail: str = "labels") -> str | None:
        expected = Digest(tokens[:images], with_labels(chain(images, None, tail)))
        return first_difference(expected, chain(images, told, tail), merges)

    assert difference(2, None) is None
    for told, tail, link in (
        ("gbm", "labels", "gbm_2, of picture 2"),
        ("labels", "labels", "the labels, of picture 2"),
        ("scores", "scores", "the labels, of picture 2"),
    ):
        assert link in str(difference(2, told, tail)), (told, difference(2, told, tail))
        assert difference(1, told, tail) is None, told


CHECKS = {
    check.__name__: check
    for check in (
        created,
        wrong_namespace,
        serialized,
        cloned,
        types,
        wrong_types,
        shapes,
        sizes,
        wrong_shapes,
        workspace,
        no_workspace,
        unknown_rows,
        wrong_attributes,
        enqueued_clap,
        enqueued_gbm,
        enqueued_tail,
        enqueued_places,
        bound_rows,
    )
}

if __name__ == "__main__":
    names, harness_path, runtime_path, plugins_path, *where = sys.argv[1:]
    MEMORY = HostMemory() if where == ["host"] else DeviceMemory()
    loaded = Harness(Path(harness_path), Path(runtime_path), Path(plugins_path))
    for name in names.split(","):
        CHECKS[name](loaded)
