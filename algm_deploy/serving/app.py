"""The routes of a server: health, metadata, inference, metrics and a page for people."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from algm_deploy import __version__
from algm_deploy.errors import AlgmDeployError, BundleError, ImageError, RequestError
from algm_deploy.pictures.sliding import Pending
from algm_deploy.predictor import Predictor, given_thresholds
from algm_deploy.serving import protocol
from algm_deploy.serving.answers import Answers, token_rows
from algm_deploy.serving.batching import Batcher
from algm_deploy.serving.metrics import Metrics
from algm_deploy.serving.protocol import Asked, Value
from algm_deploy.wording import merge_titles

_LOG = logging.getLogger("algm_deploy")
Result = TypeVar("Result")
_Answer = Callable[[Request], Awaitable[Response]]

_PAGE = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_GONE = 499  # as nginx logs a client that closed its connection


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Args:
        body_bytes: of one request.
        pixels: of one picture.
        pictures: that wait or run at a time, of all clients; more are told to come again.
        body_s: seconds in which a request's body has to arrive.
    """

    body_bytes: int = 32 << 20
    pixels: int = 50_000_000
    pictures: int = 64
    body_s: float = 30


class Service:
    """One bundle behind HTTP.

    Args:
        predictor: opened.
        batcher: of this predictor.
        workers: threads in which requests are decoded and answers encoded.
        name: of the model in addresses.
    """

    def __init__(
        self,
        predictor: Predictor,
        batcher: Batcher,
        metrics: Metrics,
        workers: Executor,
        name: str,
        limits: Limits,
    ) -> None:
        self.predictor, self.batcher, self.metrics, self.name, self.limits = predictor, batcher, metrics, name, limits
        self._workers = workers
        self._bytes = 0
        self._pictures = 0
        self._answers = Answers(predictor, limits.pixels)
        self.version = model_version(predictor)
        self._page = {path: (_page_file(file), kind) for path, (file, kind) in _PAGE.items()}

    def app(self, host: str) -> Starlette:
        """The ASGI application. One that listens on this machine alone takes requests for its names alone.

        Otherwise a page of the web could have its own name lead here, and read what the browser's owner may read.
        """
        model = "/v2/models/{model}"
        routes = [
            *(Route(f"/{path}", self.page) for path in _PAGE),
            Route("/page/model.json", self.page_model),
            Route("/metrics", self.prometheus),
            Route("/predict", self._answering(self.predict), methods=["POST"]),
            Route("/v2", self.server_metadata),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
        ]
        for place in (model, model + "/versions/{version}"):
            routes += [
                Route(place, self._answering(self.model_metadata, counted=False)),
                Route(place + "/ready", self._answering(self.model_ready, counted=False)),
                Route(place + "/infer", self._answering(self.infer), methods=["POST"]),
            ]
        hosts = [*_LOOPBACK] if host in _LOOPBACK else ["*"]
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, hosts, www_redirect=False)])

    # --- what a server tells ------------------------------------------------------------------------------------------

    async def live(self, _: Request) -> Response:
        """Whether the runtime executes; where not, a new process is needed."""
        return JSONResponse({"live": self.batcher.healthy}, 200 if self.batcher.healthy else 503)

    async def ready(self, _: Request) -> Response:
        """Whether requests are answered: from the first moment on, as the network is warm before the server listens."""
        return JSONResponse({"ready": self.batcher.healthy}, 200 if self.batcher.healthy else 503)

    async def server_metadata(self, _: Request) -> Response:
        """Name, version and extensions of the protocol."""
        return JSONResponse({"name": "algm-deploy", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def model_ready(self, request: Request) -> Response:
        """As `ready`, for the model."""
        self._check_model(request)
        healthy = self.batcher.healthy
        return JSONResponse({"name": self.name, "ready": healthy}, 200 if healthy else 503)

    async def model_metadata(self, request: Request) -> Response:
        """Inputs, outputs, and what people want to know."""
        self._check_model(request)
        return await self.page_model(request)

    async def page_model(self, _: Request) -> Response:
        """The same, for the page, which does not know the model's name."""
        signature = self.predictor.signature
        classes = self._answers.classes
        outputs = {
            protocol.LABELS: (self._answers.labels_dtype.upper(), [-1, -1, -1]),
            protocol.LABELS_PNG: ("BYTES", [-1]),
            protocol.TOKENS_PNG: ("BYTES", [-1]),
            protocol.TOKEN_COUNTS: ("INT64", [-1, len(signature.merges)]),
            protocol.PATCHES: ("INT64", [-1]),
        }
        defaults = self.predictor.thresholds_in_force
        return JSONResponse(
            {
                "name": self.name,
                "versions": [self.version],
                "platform": self.predictor.runtime,
                "inputs": [
                    {"name": protocol.IMAGE, "datatype": "UINT8", "shape": [-1, -1, -1, 3]},
                    {"name": protocol.ENCODED, "datatype": "BYTES", "shape": [-1]},
                ],
                "outputs": [
                    {"name": name, "datatype": outputs[name][0], "shape": outputs[name][1]}
                    for name in self._answers.outputs
                ],
                "parameters": {
                    "network": self.predictor.bundle.recipe.name,
                    "device": self.predictor.device_name,
                    "thresholds": {name: _finite(value) for name, value in defaults.items()},
                    "merges": list(merge_titles(signature.merges).values()),
                    "classes": list(classes.names),
                    "palette": [list(color) for color in classes.palette],
                },
            }
        )

    async def prometheus(self, _: Request) -> Response:
        """Metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        """A page on which people drop a photo, and what belongs to it."""
        content, kind = self._page[request.url.path.removeprefix("/")]
        return Response(content, headers=_PAGE_HEADERS, media_type=kind)

    # --- what a server does -------------------------------------------------------------------------------------------

    async def infer(self, request: Request) -> Response:
        """An inference request of the protocol."""
        self._check_model(request)
        header = request.headers.get(protocol.HEADER_LENGTH)
        most = self.limits.pictures

        def read(body: bytes) -> Asked:
            return protocol.read_request(body, header, self._answers.outputs, most)

        asked, values = await self._predicted(request, read)
        content, headers = await self._in_thread(
            lambda: protocol.write_response(self.name, self.version, asked, values)
        )
        return Response(content, headers=headers)

    async def predict(self, request: Request) -> Response:
        """An encoded picture as the body, its label map as PNG back; tau, gbm and dense stand in the address."""

        def read(body: bytes) -> Asked:
            return Asked([body], {protocol.LABELS_PNG: True}, **_in_address(request.query_params))

        _, values = await self._predicted(request, read)
        counts = {f"algm-{name.replace('_', '-')}": _listed(values[name]) for name in _COUNTS if name in values}
        (content,) = values[protocol.LABELS_PNG]
        return Response(content, headers=counts, media_type="image/png")

    async def _predicted(self, request: Request, read: Callable[[bytes], Asked]) -> tuple[Asked, dict[str, Value]]:
        """What a request asks for, and its outputs by name."""
        body, held = await self._body(request)
        pictures = 0
        try:
            self._require_room(1)
            asked = await self._in_thread(lambda: read(body))
            self._require_room(len(asked.pictures))
            pictures = len(asked.pictures)
            self._pictures += pictures
            thresholds = given_thresholds(self.predictor.bundle, asked.tau, asked.gbm, asked.dense)
            given = {**{name: float(v) for name, v in self.predictor.thresholds.items()}, **thresholds}
            waiting = await self._in_thread(lambda: self._answers.prepared(asked))
            done = await self._run(request, waiting, given, protocol.TOKENS_PNG in asked.outputs)
            values = await self._in_thread(lambda: self._answers.values(asked, done))
        finally:
            self._pictures -= pictures
            self._bytes -= held
        for patches, counts in token_rows(values):
            self.metrics.count_tokens(self._answers.merges, counts, patches)
        return asked, values

    async def _body(self, request: Request) -> tuple[bytes, int]:
        """The body, and how many bytes of the room that all requests share it holds.

        Raises:
            RequestError: it is too long or too slow, or there is no room.
        """
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    self._bytes += len(chunk)
                    if size > self.limits.body_bytes:
                        raise RequestError(f"expected a request of up to {self.limits.body_bytes} bytes, got more", 413)
                    if self._bytes > self.limits.body_bytes * self.limits.pictures:
                        raise _full()
                    chunks.append(chunk)
        except TimeoutError as error:
            self._bytes -= size
            raise RequestError(f"expected the whole request within {self.limits.body_s:g} seconds", 408) from error
        except BaseException:
            self._bytes -= size
            raise
        return b"".join(chunks), size

    def _require_room(self, pictures: int) -> None:
        if self._pictures + pictures > self.limits.pictures:
            raise _full()

    async def _run(
        self, request: Request, pictures: Sequence[Pending], thresholds: Mapping[str, float], token_maps: bool
    ) -> list[Pending]:
        """The pictures when they are done; where the client leaves before, those that have not begun never do."""
        futures = [self.batcher.submit(picture, thresholds, token_maps) for picture in pictures]
        done = asyncio.gather(*map(asyncio.wrap_future, futures))
        gone = asyncio.ensure_future(_left(request))
        either: set[asyncio.Future[Any]] = {done, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientDisconnect
            return await done
        finally:
            gone.cancel()
            done.cancel()
            await asyncio.gather(*either, return_exceptions=True)  # asyncio logs errors that nobody asked for

    # --- around all of them -------------------------------------------------------------------------------------------

    def _answering(self, answer: _Answer, counted: bool = True) -> _Answer:
        """An endpoint whose errors become answers of the protocol; `counted` in the metrics."""

        async def endpoint(request: Request) -> Response:
            started = time.perf_counter()
            with self.metrics.running.track_inprogress():
                try:
                    response = await answer(request)
                except ClientDisconnect:
                    response = Response(status_code=_GONE)
                except AlgmDeployError as error:
                    response = _refusal(error)
                except Exception:  # noqa: BLE001 - one request ends, the server goes on, and the log has it whole
                    _LOG.exception("a request could not be answered")
                    response = JSONResponse({"error": "the server failed; its log tells more"}, 500)
            if counted:
                self.metrics.requests.labels(str(response.status_code)).inc()
                self.metrics.request_seconds.observe(time.perf_counter() - started)
            return response

        return endpoint

    def _check_model(self, request: Request) -> None:
        model, version = request.path_params["model"], request.path_params.get("version", self.version)
        if (model, version) != (self.name, self.version):
            raise RequestError(f"expected the model {self.name}, version {self.version}: got {model!r:.50}", 404)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


def model_version(predictor: Predictor) -> str:
    """The beginning of the hash of what the predictor executes."""
    return predictor.bundle.files[predictor.executable].sha256[:12]


_COUNTS = (protocol.TOKEN_COUNTS, protocol.PATCHES)


def _refusal(error: AlgmDeployError) -> Response:
    """An error as the protocol tells it: by a client's fault 4xx, else 500."""
    fault = isinstance(error, ImageError | BundleError)
    status = error.status if isinstance(error, RequestError) else 400 if fault else 500
    return JSONResponse({"error": str(error)}, status, {"retry-after": "1"} if status == 503 else None)


def _full() -> RequestError:
    return RequestError("this server has as many pictures as it takes: send it again after a moment", 503)


async def _left(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _in_address(query: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of a request from the query of its address."""
    given: dict[str, Any] = dict(query)
    for name in given.keys() & {"tau", "gbm"}:
        try:
            given[name] = float(given[name])
        except ValueError as error:
            raise RequestError(f"expected a number as {name}, got {given[name]!r:.50}") from error
    if "dense" in given:
        given["dense"] = {"true": True, "false": False}.get(given["dense"], given["dense"])
    return protocol.merging_of(given)


def _finite(value: float) -> float | str:
    """A number as JSON holds it."""
    return value if np.isfinite(value) else str(value)


def _listed(value: Value) -> str:
    return ",".join(map(str, np.ravel(value)))


def _page_file(name: str) -> bytes:
    return (files("algm_deploy.serving") / "page" / name).read_bytes()
