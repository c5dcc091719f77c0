"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SHARES = tuple(step / 10 for step in range(1, 11))


class Metrics:
    """Counters of one server. Their names begin with `algm_`; times are seconds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("algm_requests", "Requests by HTTP status", ["status"], registry=registry)
        self.request_seconds = Histogram(
            "algm_request_seconds", "From a request's arrival to its answer", buckets=_SECONDS, registry=registry
        )
        self.running = Gauge("algm_requests_running", "Requests that are being answered", registry=registry)
        self.waiting = Gauge("algm_pictures_waiting", "Pictures that wait for a batch", registry=registry)
        self.queue_seconds = Histogram(
            "algm_queue_seconds", "A picture's wait for its batch", buckets=_SECONDS, registry=registry
        )
        self.batch_seconds = Histogram(
            "algm_batch_seconds", "The network, for a batch", buckets=_SECONDS, registry=registry
        )
        self.batch_windows = Histogram(
            "algm_batch_windows",
            "Windows in a batch",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            registry=registry,
        )
        self.warm_up_seconds = Gauge("algm_warm_up_seconds", "Of the warm-up before the start", registry=registry)
        self.cuda_graphs = Gauge(
            "algm_cuda_graphs", "CUDA graphs that were captured, those of the warm-up included", registry=registry
        )
        self.patches = Counter("algm_patches", "Patches of the pictures, before merging", registry=registry)
        self.tokens = Counter("algm_tokens", "Tokens left after each merge", ["merge"], registry=registry)
        self.kept = Histogram(
            "algm_token_share", "Tokens left after the last merge, a patch", buckets=_SHARES, registry=registry
        )

    def count_tokens(self, merges: Sequence[str], counts: Sequence[int], patches: int) -> None:
        """Adds a picture: its patches, and the tokens left after each merge."""
        self.patches.inc(patches)
        for merge, count in zip(merges, counts, strict=True):
            self.tokens.labels(merge).inc(count)
        if counts:
            self.kept.observe(counts[-1] / patches)

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self._registry)
