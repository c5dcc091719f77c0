"""Makes the painter of the benchmarks importable, as it is for the scripts beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "demo"))
