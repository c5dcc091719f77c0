"""How the workers of a cluster open a bundle: all of them the same one, on the same runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.fleet.cluster import Cluster
from algm_deploy.predictor import Predictor
from algm_deploy.runners.registry import default_runtime, row_of
from algm_deploy.timing.variants import executables


@dataclass(frozen=True)
class Opening:
    """How a worker opens a bundle; arguments as those of `Predictor`.

    `files` are the SHA-256 of what the driver would execute: a worker that finds others at the same path refuses.
    `on_gpus`: each worker gets a GPU of its own.
    """

    bundle: str
    runtime: str
    device: str | None
    files: dict[str, str]
    on_gpus: bool = False
    thresholds: dict[str, Any] = field(default_factory=dict)

    def opened(self) -> Predictor:
        """The bundle on this machine.

        Raises:
            BundleError: it is not there, or another one.
            RuntimeUnavailableError: it cannot be executed here.
        """
        bundle = Bundle.open(self.bundle)
        if executables(bundle, self.runtime) != self.files:
            raise BundleError(
                f"{self.bundle}: expected the same bundle on every machine of the cluster, found another on one: keep "
                "it on storage that all of them share, or copy it anew"
            )
        return Predictor(bundle, self.runtime, device=self.device, **self.thresholds)


def opening_of(cluster: Cluster, bundle: Bundle, runtime: str | None, device: str | None, **thresholds: Any) -> Opening:
    """How workers open a bundle: on the runtime that is named, or the best on a machine of the cluster.

    Raises:
        RuntimeUnavailableError: no machine can execute it; a GPU is needed and the cluster has none.
    """
    if runtime is None:
        runtime = str(cluster.call(default_runtime, tuple(bundle.files), device))
    row = row_of(runtime)
    if row.needs_gpu and not cluster.gpus:
        raise RuntimeUnavailableError(
            f"expected a cluster with GPUs for {runtime}, this one has none: name another runtime"
        )
    on_gpus = bool(cluster.gpus) and "cuda" in row.devices and not (device or "").startswith("cpu")
    path = str(bundle.path.resolve())
    return Opening(path, runtime, device, executables(bundle, runtime), on_gpus, thresholds)
