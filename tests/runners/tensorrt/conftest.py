"""What tests of builds need on a machine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from algm_deploy import native_libraries as native


@pytest.fixture(scope="session")
def bindings() -> None:
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("needs the Python module tensorrt_rtx: pip install 'algm-deploy[tensorrt-rtx]'")


@pytest.fixture(scope="session")
def rtx(bindings: None) -> None:
    if native.find_library("trt_plugin") is None:
        pytest.skip(f"needs the plugin library: {native.REBUILD} trt_plugin")
