"""The custom operators in ONNX Runtime on a CUDA device: what one call leaves behind for the next, and for others."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from operator_inputs import GBM, exact_tokens
from test_ort_custom_op import assert_equal, gbm_inputs, write

from algm_deploy.native_libraries import find_library
from algm_deploy.ops import reference

pytestmark = pytest.mark.gpu
FIXED = GBM | {"mode": "fixed"}
INPUTS = gbm_inputs(exact_tokens(np.random.default_rng(8), "few", (2, 31, 16)), (31, 21), 0.6)


@pytest.fixture
def session(tmp_path: Path) -> ort.InferenceSession:
    library = find_library("ort_custom_op")
    if library is None or "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu and algm-deploy build-native ort_custom_op")
    write(tmp_path, "gbm", {f"in_{i}": x for i, x in enumerate(INPUTS)}, 4, FIXED)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CUDAExecutionProvider"])


def run(session: ort.InferenceSession, inputs: list[np.ndarray]) -> list[np.ndarray]:
    return list(session.run(None, {f"in_{i}": x for i, x in enumerate(inputs)}))


def test_a_failed_allocation_is_the_error_of_its_own_call(session: ort.InferenceSession) -> None:
    """Four million rows of one value are 16 MB, and the partial results of their pairs more than any device has."""
    rows = 1 << 22
    huge = [
        np.ones((1, rows, 1), np.float32),
        np.ones((1, rows), np.float32),
        np.zeros((1, 1), np.int64),
        np.array([rows]),
        np.array(0.5, np.float32),
    ]
    with pytest.raises(Exception, match="taking memory"):
        run(session, huge)
    assert_equal(run(session, INPUTS), reference.gbm(*INPUTS, **FIXED))


def test_a_thread_that_merged_breaks_no_capture_when_it_ends(session: ort.InferenceSession) -> None:
    merged, leave = threading.Event(), threading.Event()

    def work() -> None:
        run(session, INPUTS)
        merged.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    merged.wait()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph, capture_error_mode="global"):
        x += 1
        leave.set()
        thread.join()
        x += 1
    graph.replay()
    assert x.tolist() == [2.0] * 8
