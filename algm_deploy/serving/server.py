"""A server for one bundle, from its start to SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import current_thread, main_thread

import uvicorn

from algm_deploy.environment import usable_cores
from algm_deploy.errors import ListenError
from algm_deploy.predictor import WARM_UP_S, Predictor, WarmUp
from algm_deploy.serving.app import Limits, Service
from algm_deploy.serving.batching import Batcher
from algm_deploy.serving.metrics import Metrics
from algm_deploy.serving.protocol import check_name

# Seconds after which a thread that computes in Python lets another go on. The one that runs the network waits for a GPU
# several times a batch, each a few tenths of a millisecond, and after each of them for its turn: 5 ms, Python's own
# value, would be more than the network takes.
_TURN_S = 0.0005
# Seconds that an idle connection stays open. Proxies keep theirs for a minute; one that this side closes first costs
# the request that is on its way.
_KEEP_ALIVE_S = 75
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Settings:
    """How a server listens, batches and stops.

    Args:
        host: to listen on; by default this machine alone reaches it.
        port: 0 takes a free one.
        name: of the model in addresses; by default that of the bundle's folder.
        wait_s: how long a picture waits for others to share its batch.
        warm_up_s: how long CUDA graphs are captured before the server listens, at most.
        grace_s: how long requests may take that are being answered when the server is told to stop.
        threads: that decode requests and encode answers.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    name: str | None = None
    wait_s: float = 0.002
    grace_s: int = 30
    warm_up_s: float = WARM_UP_S
    threads: int = min(8, usable_cores())
    limits: Limits = field(default_factory=Limits)


class Server(uvicorn.Server):
    """Stops in order at SIGTERM, SIGINT and SIGHUP: takes no more requests, answers those it has, and returns.

    Args:
        listening: is called with the address when the server takes requests.
        warmed: what the warm-up did.
    """

    def __init__(self, config: uvicorn.Config, listening: Callable[[str], None], warmed: WarmUp) -> None:
        super().__init__(config)
        self._listening, self.warmed = listening, warmed

    async def startup(self, sockets: object = None) -> None:
        """Begins to listen."""
        await super().startup()
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def run(self, sockets: object = None) -> None:
        """Serves until a signal comes.

        Raises:
            ListenError: the address is taken, or none of this machine.
        """
        try:
            super().run()
        except SystemExit as error:
            raise ListenError(
                f"expected to listen on {self.config.host}, port {self.config.port}, which is taken or none of this "
                "machine: choose another with --port or --host"
            ) from error

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals without raising them again: stopping in order is no failure."""
        if current_thread() is not main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def server(predictor: Predictor, settings: Settings, listening: Callable[[str], None]) -> Iterator[Server]:
    """A server for an opened predictor; `run` of it returns when it was told to stop. The network is warm before.

    Raises:
        BundleError: the bundle's folder has a name that does not fit into addresses.
        RuntimeUnavailableError, ExecutionError: the network does not run.
    """
    name = settings.name or predictor.bundle.path.resolve().name
    check_name(name)
    warmed = _warmed(predictor, settings.warm_up_s)
    metrics = Metrics()
    metrics.warm_up_seconds.set(warmed.seconds)
    metrics.cuda_graphs.set_function(lambda: predictor.captures)
    with (
        _short_turns(),
        Batcher(predictor, settings.wait_s, metrics) as batcher,
        ThreadPoolExecutor(settings.threads, "pictures") as workers,
    ):
        service = Service(predictor, batcher, metrics, workers, name, settings.limits)
        config = uvicorn.Config(
            service.app(settings.host),
            host=settings.host,
            port=settings.port,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=settings.grace_s,
        )
        yield Server(config, listening, warmed)


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _warmed(predictor: Predictor, seconds: float) -> WarmUp:
    """Warms up, so that no client waits for what a runtime does at its first run.

    Not in the thread that opened the network: what a runtime keeps for each thread would be that one's alone.
    """
    with ThreadPoolExecutor(1, "warm-up") as other:
        return other.submit(predictor.warm_up, seconds).result()
