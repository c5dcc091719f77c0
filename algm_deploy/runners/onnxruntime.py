"""The ONNX Runtime runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import onnxruntime as ort

from algm_deploy.bundle import Bundle
from algm_deploy.errors import RuntimeUnavailableError
from algm_deploy.runners.contract import Array, Runner


class OnnxRuntimeCpuRunner(Runner):
    """ONNX Runtime on the CPU provider.

    Outputs nobody asked for are not computed, so token maps cost nothing until they are wanted.
    """

    runtime = "onnxruntime-cpu"
    provider: ClassVar[str] = "CPUExecutionProvider"

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._session: ort.InferenceSession | None = None

    def _open(self) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # warnings about symbolic shapes that merging makes unavoidable
        self._session = ort.InferenceSession(self.bundle.file("model.onnx"), options, providers=[self.provider])
        active = self._session.get_providers()
        if active[0] != self.provider:
            raise RuntimeUnavailableError(f"asked ONNX Runtime for {self.provider}, got {', '.join(active)}")

    def _infer(self, feeds: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._session is not None
        options = ort.RunOptions()
        options.only_execute_path_to_fetches = True
        results = self._session.run(list(outputs), feeds, options)
        return dict(zip(outputs, results, strict=True))

    def _close(self) -> None:
        self._session = None
