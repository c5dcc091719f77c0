"""OpenVINO without its telemetry.

Importing it sends a message to a service that counts users, and keeps an identifier in the home folder, where the
package `openvino_telemetry` is at hand, which pip installs with it. This project sends nothing of its own accord.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

_TELEMETRY = "openvino_telemetry"

if "openvino" not in sys.modules and _TELEMETRY not in sys.modules:
    sys.modules[_TELEMETRY] = cast(ModuleType, None)  # so that importing it fails, and OpenVINO takes a stand-in
    try:
        import openvino
    finally:
        del sys.modules[_TELEMETRY]
else:
    import openvino

__all__ = ["openvino"]
