"""What building and running share: the Python bindings of TensorRT or TensorRT-RTX, their log, and our plugins."""

from __future__ import annotations

import ctypes
import difflib
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from algm_deploy.bundle.graphs import PLUGIN_NAMESPACE, PLUGIN_VERSION, PLUGINS
from algm_deploy.errors import BuildError, RuntimeUnavailableError
from algm_deploy.native_libraries import REBUILD, require_library
from algm_deploy.runners.registry import row_of

RTX_ALIAS = "rtx_alias"


@dataclass(eq=False)
class Log:
    """Messages of TensorRT, collected in order.

    `engine_layers` holds name and kind of the finished engine's layers as the builder tells them in a verbose message.
    """

    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    engine_layers: list[tuple[str, str]] = field(default_factory=list)

    def add(self, severity: str, message: str) -> None:
        """Keeps errors, warnings and information, and of the verbose messages the finished layers."""
        if severity in ("INTERNAL_ERROR", "ERROR"):
            self.errors.append(message)
        if message.startswith("Layers:\n"):
            self.engine_layers += re.findall(r"^Name: (.*?), LayerType: (\w+)", message, re.MULTILINE)
        if severity != "VERBOSE":
            self.lines.append(f"{severity.lower()}: {message}")


def load_bindings(runtime: str) -> Any:
    """The Python module of `tensorrt` or `tensorrt-rtx`.

    Raises:
        RuntimeUnavailableError: the bindings are not installed, or too old.
    """
    row = row_of(runtime)
    try:
        trt = importlib.import_module(row.module)
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"the runtime {runtime} needs the Python module {row.module}, which cannot be imported ({error}): "
            f"pip install {row.install}"
        ) from error
    if version(trt) < row.oldest:
        raise RuntimeUnavailableError(
            f"expected {row.required}, found {trt.__version__}: pip install -U '{row.required}'"
        )
    return trt


def version(trt: Any) -> tuple[int, ...]:
    """Major and minor version of the bindings."""
    return tuple(int(part) for part in trt.__version__.split(".")[:2])


@contextmanager
def listening(trt: Any, log: Log | None = None) -> Iterator[tuple[Any, Log]]:
    """TensorRT's logger, and a log, the given one or a new one, of what it says inside the block.

    TensorRT keeps the first logger that it is given and writes to it from its plugin registry as well, so there is one
    for the life of the process, and logs listen to it.
    """
    logger = _logger(trt)
    log = log or Log()
    logger.listeners.append(log)
    try:
        yield logger, log
    finally:
        logger.listeners.remove(log)


@cache
def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.listeners: list[Log] = []

        def log(self, severity: Any, message: str) -> None:
            for listener in self.listeners:
                listener.add(severity.name, message)

    return Logger()


def load_plugins(trt: Any, runtime: str) -> Path:
    """Registers the plugin library with TensorRT, once a process.

    Returns:
        Path of the library.

    Raises:
        BuildError: the library has not been built, or TensorRT does not accept it.
    """
    path = require_library("trt_plugin")
    registry = trt.get_plugin_registry()
    if _missing_plugins(registry):
        if RTX_ALIAS in row_of(runtime).libraries:
            _make_rtx_name_loadable()
        registry.load_library(str(path))
    if missing := _missing_plugins(registry):
        raise BuildError(
            f"TensorRT {trt.__version__} loaded {path} and knows no plugin {', '.join(missing)} in namespace "
            f"{PLUGIN_NAMESPACE}: rebuild the library for this TensorRT with `{REBUILD} trt_plugin`"
        )
    return path


def plugin_sources(library: Path) -> str:
    """Version of the plugins and hash of the sources that a plugin library was made of, as it tells itself."""
    function = ctypes.CDLL(str(library)).algm_plugin_sources
    function.restype = ctypes.c_char_p
    return str(function().decode())


def registered_plugins(trt: Any) -> list[str]:
    """All plugin creators of the process as `name version namespace`."""
    creators = trt.get_plugin_registry().all_creators
    return sorted(f"{c.name} version {c.plugin_version} namespace {c.plugin_namespace or '(none)'}" for c in creators)


def nearest_plugin(trt: Any, wanted: str) -> str:
    """The registered creators that resemble `wanted`, for an error message."""
    known = registered_plugins(trt)
    near = [name for name in known if name.split()[0] == wanted.split()[0]]
    near += difflib.get_close_matches(wanted, known, n=2, cutoff=0.3)
    return "; ".join(dict.fromkeys(near)) or "none resembles it"


def _missing_plugins(registry: Any) -> list[str]:
    known = {(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators}
    return [name for name in PLUGINS if (name, PLUGIN_VERSION, PLUGIN_NAMESPACE) not in known]


def _make_rtx_name_loadable() -> None:
    """Loads the alias that lends the bindings' library the name its ONNX parser asks for.

    Without it the parser ends the process at the first plugin node: the wheel has libtensorrt_rtx.so.1 and the parser
    opens libtensorrt_rtx.so (runtimes/trt_plugin/CMakeLists.txt).
    """
    alias = require_library(RTX_ALIAS)
    try:
        ctypes.CDLL(str(alias), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BuildError(
            f"{alias.name} stands in for the name that the parser of TensorRT-RTX 1 looks up and cannot be loaded "
            f"({error}): install tensorrt-rtx 1.x"
        ) from error
