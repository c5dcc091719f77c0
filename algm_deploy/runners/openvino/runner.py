"""The OpenVINO runner: the graph that `build` made for it where there is one, else the portable one without functions.

What is computed in which precision is said by the graph, and never left to OpenVINO, which by itself takes bf16 on
processors that have it: an fp32 or fp16 bundle is computed in fp32, one in bf16 as `lowering/openvino.py` has written
it. OpenVINO computes all outputs of a graph; those nobody asked for are not copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algm_deploy.bundle.records import OptimizedGraph
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import processor_flags, thread_limit, usable_cores
from algm_deploy.errors import BundleError
from algm_deploy.lowering.openvino import write_openvino_onnx
from algm_deploy.native_libraries import say_once
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.contract import Array, Runner
from algm_deploy.runners.openvino.library import openvino

DEVICE = "CPU"
ATTENTION_BF16 = {"bf16_attention", "bf16"}  # rewrites that make it so; "bf16" stood for both kinds of layers before
ATTENTION_INT8 = "int8_attention"


class OpenVinoRunner(Runner):
    """OpenVINO on the CPU. A graph for single images runs once for each image.

    `threads`: how many compute a network, on any cores; by default those of OMP_NUM_THREADS, else as many as there are
    cores that the process may use; where it may use all, each on its own.
    """

    runtime = "openvino"

    def __init__(self, bundle: Bundle, device: str | None = None, threads: int | None = None) -> None:
        super().__init__(bundle, device)
        self._threads = threads or thread_limit()
        self._compiled: openvino.CompiledModel | None = None
        self._free: deque[openvino.InferRequest] = deque()

    @classmethod
    def build(cls, bundle: Bundle, **options: Any) -> list[str]:
        """Adds the graph that is made for OpenVINO."""
        row = cls.row()
        row.check_options(options)
        cores = thread_limit() or usable_cores()
        counts = write_openvino_onnx(bundle, row.own, attention_bf16=has_amx(), attention_int8=has_vnni(), cores=cores)
        bundle.record(OptimizedGraph(runtime=cls.runtime, rewrites=dict(counts)))
        return [f"{row.own}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}"]

    @property
    def execution(self) -> dict[str, str]:
        """The arithmetic of the open runner, and its threads."""
        if self._compiled is None:
            return {}
        threads = str(self._compiled.get_property("INFERENCE_NUM_THREADS"))
        if self.bundle.recipe.precision == "int8":
            inside = ", attention's products among it" if self.attention_in_levels else ""
            return {"arithmetic": f"int8 where the graph is quantised{inside}, else fp32", "threads": threads}
        return {"arithmetic": "bf16" if self._low else "fp32", "threads": threads}

    @property
    def precision(self) -> Precision:
        """In what it executes the bundle: bf16 in fp32 where the processor or the graph for it is missing."""
        return "fp32" if self.bundle.recipe.precision == "bf16" and not self._low else super().precision

    @property
    def attention_in_levels(self) -> bool:
        """As it was built: on a processor with VNNI."""
        built = self.bundle.found(OptimizedGraph, self.runtime)
        return built is not None and self.executable == self.row().own and ATTENTION_INT8 in built.rewrites

    @property
    def _low(self) -> bool:
        """Whether products are computed in bf16: the bundle's precision, written in its graph, on a CPU that has it."""
        return self.bundle.recipe.precision == "bf16" and self._lacks is None

    @cached_property
    def _lacks(self) -> str | None:
        """What is missing to compute a bundle in bf16 as its graph says, None where nothing is."""
        if self.executable != self.row().own:
            return f"the graph for it is missing: `{self.build_command}`"
        if not has_bf16():
            return "this processor has none of its instructions"
        return None

    def _check_attention(self) -> None:
        """OpenVINO keeps to what a graph says of attention, on every processor, so a graph for another is refused."""
        built = self.bundle.found(OptimizedGraph, self.runtime)
        rewrites = built.rewrites.keys() if built is not None else set[str]()
        if ATTENTION_BF16 & rewrites and not has_amx():
            self._refuse("bf16", "AMX")
        if ATTENTION_INT8 in rewrites and not has_vnni():
            self._refuse("int8", "VNNI")

    def _refuse(self, arithmetic: str, instructions: str) -> None:
        raise BundleError(
            f"{self.bundle.path}: its graph for {self.runtime} has attention in {arithmetic}, which only processors "
            f"with {instructions} compute well, and this one has none: build it here with `{self.build_command}`"
        )

    def _open(self) -> None:
        if self._low or self.attention_in_levels:
            self._check_attention()
        elif self.bundle.recipe.precision == "bf16":
            say_once(f"{self.runtime} computes {self.bundle.path} in fp32 and not in bf16: {self._lacks}")
        path = self.bundle.file(self.executable)
        try:
            self._compiled = openvino.Core().compile_model(path, DEVICE, self._properties())
        except RuntimeError as error:
            said = " ".join(str(error).split())[:300]
            raise BundleError(
                f"{path}: expected a graph that OpenVINO {openvino.__version__} can load, it says {said!r}: export or "
                "build it again"
            ) from error

    def _properties(self) -> dict[str, str]:
        latency = {"PERFORMANCE_HINT": "LATENCY"}
        if self._threads:  # pinned, the threads of several processes would all take the first cores
            latency |= {"INFERENCE_NUM_THREADS": str(self._threads), "ENABLE_CPU_PINNING": "NO"}
        # The mode ACCURACY keeps to the types in the graph, bf16 among them.
        return latency | ({"EXECUTION_MODE_HINT": "ACCURACY"} if self._low else {"INFERENCE_PRECISION_HINT": "f32"})

    def _infer(
        self, image: Tensor, thresholds: dict[str, float], outputs: Sequence[str], to: torch.device
    ) -> dict[str, Tensor]:
        assert self._compiled is not None
        request = self._free.pop() if self._free else self._compiled.create_infer_request()
        single = self._compiled.input("image").partial_shape[0].is_static
        step = 1 if single else len(image)
        pixels = image.numpy()
        feeds = {name: np.array(value, np.float32) for name, value in thresholds.items()}
        parts = [
            _run(request, {**feeds, "image": pixels[start : start + step]}, outputs)
            for start in range(0, len(image), step)
        ]
        self._free.append(request)
        joined = parts[0] if len(parts) == 1 else [np.concatenate(part) for part in zip(*parts, strict=True)]
        return {name: torch.from_numpy(value) for name, value in zip(outputs, joined, strict=True)}

    def _close(self) -> None:
        self._free.clear()
        self._compiled = None


def has_bf16() -> bool:
    """Whether this machine's processor computes in bf16."""
    return "BF16" in openvino.Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")


def has_amx() -> bool:
    """Whether this machine's processor has AMX. Attention is in bf16 only with it: see `lowering/openvino.py`."""
    return "amx_bf16" in processor_flags()


def has_vnni() -> bool:
    """Whether this machine's processor multiplies bytes and adds them in 32 bits. Attention is in int8 only with it."""
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(processor_flags())


def _run(request: openvino.InferRequest, feeds: dict[str, Array], outputs: Sequence[str]) -> list[Array]:
    """One run; what it returns is the caller's."""
    request.infer(feeds, share_inputs=True, share_outputs=True)
    return [request.get_tensor(name).data.copy() for name in outputs]
