"""Attention over images with different numbers of valid rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import IMPLEMENTATIONS, PROPERTY, assert_same, implementations, run_reference, seeds
from operator_inputs import Array

from algm_deploy.bundle.graphs import DOMAIN
from algm_deploy.lowering.portable import add_function_bodies
from algm_deploy.ops.attention import SHARE_LEVELS, Steps, attention_in_levels, packed_steps

PLAIN: dict[str, Any] = {"heads": 2, "scale": 0.35}
every, compared = implementations("attention")


def packed(seed: int, images: int, rows: int, width: int = 8) -> Array:
    return np.random.default_rng(seed).standard_normal((images, rows, 3 * width)).astype(np.float32)


def valid_rows(values: Array, length: Array) -> list[Array]:
    return [image[:rows] for image, rows in zip(values, length, strict=True)]


@compared
@PROPERTY
@given(
    seed=seeds,
    images=st.integers(1, 3),
    rows=st.integers(1, 9),
    heads=st.sampled_from([1, 2, 4]),
    lengths=st.booleans(),
)
def test_equals_the_reference(run: Any, seed: int, images: int, rows: int, heads: int, lengths: bool) -> None:
    rng = np.random.default_rng(seed)
    qkv = packed(seed, images, rows)
    length = rng.integers(1, rows + 1, images) if lengths else None
    if length is not None:
        length[rng.integers(images)] = rows
    (expected,) = run_reference("attention", [qkv, length], heads=heads, scale=0.35)
    (found,) = run("attention", [qkv, length], heads=heads, scale=0.35)
    assert found.shape == (images, rows, 8)
    checked = np.full(images, rows) if length is None else length
    assert_same(valid_rows(found, checked), valid_rows(expected, checked), 2e-6)


@every
def test_layout_is_query_key_value_then_heads(run: Any) -> None:
    """Two heads of width one. Only head 1 tells the rows apart; its query meets the key of row 1."""
    qkv = np.zeros((1, 2, 6), np.float32)
    qkv[0, :, 1] = 1  # query of head 1
    qkv[0, 1, 3] = 100  # key of head 1 in row 1
    qkv[0, :, 4] = [1, 3]  # values of head 0
    qkv[0, :, 5] = [5, 7]  # values of head 1
    (found,) = run("attention", [qkv, None], heads=2, scale=1.0)
    np.testing.assert_allclose(found[0], [[2, 7], [2, 7]], rtol=0, atol=1e-6)


@compared
@pytest.mark.parametrize("content", [np.nan, np.inf, 1e30])
def test_padded_rows_are_never_read(run: Any, content: float) -> None:
    qkv, length = packed(0, 3, 6), np.array([6, 4, 1])
    clean = run("attention", [qkv, length], **PLAIN)[0]
    for image, rows in enumerate(length):
        qkv[image, rows:] = content
    dirty = run("attention", [qkv, length], **PLAIN)[0]
    assert_same(valid_rows(dirty, length), valid_rows(clean, length), 0)


@compared
def test_a_padded_image_equals_itself_alone(run: Any) -> None:
    qkv, length = packed(0, 2, 7), np.array([7, 4])
    together = run("attention", [qkv, length], **PLAIN)[0]
    alone = run("attention", [qkv[1:, :4], None], **PLAIN)[0]
    assert_same([together[1:, :4]], [alone], 2e-6)


@compared
def test_length_of_a_full_batch_changes_nothing(run: Any) -> None:
    qkv = packed(0, 2, 5)
    assert_same(run("attention", [qkv, np.array([5, 5])], **PLAIN), run("attention", [qkv, None], **PLAIN), 1e-6)


@compared
def test_16_bit_tokens(run: Any) -> None:
    """At most twice the error of rounding inputs and result: the softmax is fp32."""
    qkv, length = packed(0, 2, 9, 16).astype(np.float16), np.array([9, 5])
    (expected,) = run_reference("attention", [qkv.astype(np.float32), length], **PLAIN)
    (found,) = run("attention", [qkv, length], **PLAIN)
    assert found.dtype == np.float16
    exact = valid_rows(expected, length)
    baseline = max(abs(x.astype(np.float16) - x).max() for x in exact)
    error = max(abs(a - b).max() for a, b in zip(valid_rows(found.astype(np.float32), length), exact, strict=True))
    assert error <= 2 * baseline + 2**-10  # products of fp16 rows carry half a unit of their own


def test_large_scores_do_not_overflow_in_16_bits() -> None:
    """Scores up to 64 * 60 * 60: their exponentials need the maximum subtracted, in fp32."""
    qkv = (packed(0, 1, 5, 8) * 60).astype(np.float16)
    for run in IMPLEMENTATIONS.values():
        assert np.isfinite(run("attention", [qkv, None], **PLAIN)[0]).all()


@pytest.mark.gpu
def test_threads_leave_the_choice_of_backends_as_it_was() -> None:
    qkv = torch.randn(2, 65, 3 * 64, device="cuda", dtype=torch.float16)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: torch.ops.algm.attention(qkv, None, 2, 0.35), range(200)))
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert all(torch.equal(value, found[0]) for value in found)


def test_bf16_in_torch() -> None:
    qkv = torch.from_numpy(packed(0, 2, 9, 16)).bfloat16()
    length = torch.tensor([9, 5])
    low = torch.ops.algm.attention(qkv, length, 2, 0.35)
    high = torch.ops.algm.attention(qkv.float(), length, 2, 0.35)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low[1, :5].float(), high[1, :5], rtol=2**-7, atol=2**-7)


# --- products in int8 ------------------------------------------------------------------------------------------------

STEPS = Steps(0.02, 0.03, 0.025)


def in_levels(qkv: Array, length: Array | None, steps: Steps = STEPS) -> Array:
    given = None if length is None else torch.from_numpy(length)
    found = attention_in_levels(torch.from_numpy(qkv), given, 2, 0.35, Steps(*map(torch.tensor, steps)))
    return found.numpy()


def levels_reference(qkv: Array, steps: Steps = STEPS) -> Array:
    """One image's rows (S, D) in fp64, by what levels are."""
    rows = len(qkv)
    query, key, value = (part.astype(np.float64) for part in qkv.reshape(rows, 3, 2, -1).transpose(1, 2, 0, 3))
    query, key, value = (
        np.clip(np.rint(part / np.float32(step)), -128, 127) * np.float64(np.float32(step))
        for part, step in zip((query * 0.35, key, value), steps, strict=True)
    )
    scores = query @ key.transpose(0, 2, 1)
    shares = np.rint(np.exp(scores - scores.max(-1, keepdims=True)) * SHARE_LEVELS)
    mixed: Array = shares @ value / shares.sum(-1, keepdims=True)
    return mixed.transpose(1, 0, 2).reshape(rows, -1)


@pytest.mark.parametrize("lengths", [(9, 9), (9, 5)])
def test_products_in_int8(lengths: tuple[int, int]) -> None:
    qkv, length = packed(0, 2, 9, 16).astype(np.float64), np.array(lengths)
    found = in_levels(qkv, length)
    for image, rows, result in zip(qkv, lengths, found, strict=True):
        np.testing.assert_allclose(result[:rows], levels_reference(image[:rows]), rtol=0, atol=1e-6)


def test_a_row_that_attends_to_all_alike_loses_nothing() -> None:
    """A probability of a thousandth has no level in 255; a share of the largest has."""
    qkv = packed(0, 1, 1000, 16).astype(np.float64)
    qkv[..., :16] = 0
    value = qkv[0, :, 32:]
    mean = (np.rint(value / np.float32(STEPS.value)).clip(-128, 127) * np.float64(np.float32(STEPS.value))).mean(0)
    np.testing.assert_allclose(in_levels(qkv, None)[0], np.broadcast_to(mean, (1000, 16)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("how", [{}, {"together": 1}, {"cast": 1}], ids=["all", "apart", "cast"])
@pytest.mark.parametrize("lengths", [None, (9, 5)])
def test_products_in_int8_in_standard_operators(lengths: tuple[int, int] | None, how: dict[str, int]) -> None:
    inputs = [ir.val("qkv", ir.DataType.INT8, ["B", "S", 48])]
    inputs += [] if lengths is None else [ir.val("length", ir.DataType.INT64, ["B"])]
    steps = [ir.val(name, ir.DataType.FLOAT, []) for name in Steps._fields]
    padding = [None] if lengths is None else []
    node = ir.node("attention", [*inputs, *padding, *steps], PLAIN | how, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].dtype = "values", ir.DataType.FLOAT
    graph = ir.Graph([*inputs, *steps], node.outputs, nodes=[node], opset_imports={"": 18, DOMAIN: 1}, name="one")
    model = ir.Model(graph, ir_version=10)
    add_function_bodies(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    qkv, length = packed(0, 2, 9, 16), None if lengths is None else np.array(lengths)
    levels = np.rint(qkv / packed_steps(STEPS, 0.35, 48)).clip(-128, 127).astype(np.int8)
    feeds = {"qkv": levels, **{name: np.array(step, np.float32) for name, step in STEPS._asdict().items()}}
    (found,) = session.run(None, feeds if length is None else feeds | {"length": length})
    expected = in_levels(qkv, length)
    for rows, ours, theirs in zip(lengths or (9, 9), expected, found, strict=True):
        close = np.isclose(ours[:rows], theirs[:rows], rtol=0, atol=1e-5)
        assert close.mean() > 0.9, "rounding may tip a value from one level to the next"
        np.testing.assert_allclose(theirs[:rows], ours[:rows], rtol=0, atol=0.05)
