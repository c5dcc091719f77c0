"""TensorRT-RTX engines of both forms: one for the whole network, and one for each part between merges where the picture
decides how many tokens there are. Needs no GPU.

    python benchmarks/engines.py BUNDLE... --precision fp16 -o benchmarks/records/engines_rtx.json

With `--portable` also one of the bundle's `model.onnx`, in standard operators alone, as any other tool builds it: it
has no plugin, and there is one where no merge depends on the picture. Each bundle is copied before it is built. Seconds
are the builder's own. The record is written after every GPU, and rows that it holds already stay, unless the same
engine is built again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnx.inliner
from trained import write

from algm_deploy.bundle.files import ONNX
from algm_deploy.bundle.records import Engine
from algm_deploy.bundle.store import Bundle
from algm_deploy.environment import environment
from algm_deploy.errors import GateError
from algm_deploy.report.tables import markdown_table, tuned_rows
from algm_deploy.runners.tensorrt.build import build_engine, build_with_stretches
from algm_deploy.runners.tensorrt.engine import RTX_TARGETS, EngineOptions, engine_from_onnx
from algm_deploy.runners.tensorrt.library import Log, listening, load_bindings

HEADER = (
    "network",
    "precision",
    "GPUs",
    "engine",
    "MB",
    "s",
    "layers",
    "quantisers",
    "attention in parts",
    "rows it is tuned for",
    "release",
)
KEY = HEADER[:4]


def main() -> None:
    """Builds, prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--precision", default="fp16", choices=("fp32", "fp16", "bf16", "int8", "fp8"))
    parser.add_argument("--gpus", nargs="+", default=RTX_TARGETS, choices=RTX_TARGETS, help="compute capabilities")
    parser.add_argument("--together", action="store_true", help="one engine for all GPUs instead of one each")
    parser.add_argument("--portable", action="store_true", help="also an engine of the portable graph, without plugins")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    targets = [tuple(options.gpus)] if options.together else [(one,) for one in options.gpus]
    kept = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    rows = {tuple(row[name] for name in KEY): row for row in kept}
    for bundle in options.bundles:
        for gpus in targets:
            for figures in built(bundle, options.precision, gpus, options.portable):
                row = dict(zip(HEADER, figures, strict=True))
                rows[tuple(row[name] for name in KEY)] = row
            record = {"schema_version": 1, "environment": asdict(environment()), "rows": [*rows.values()]}
            write(record, options.output)
    print(markdown_table(HEADER, [[row.get(name, "-") for name in HEADER] for row in rows.values()]))


def built(path: Path, precision: Any, gpus: tuple[str, ...], portable: bool) -> Iterator[tuple[str, ...]]:
    """Rows of both forms of a bundle's network; of the single one where every picture has as many tokens."""
    with TemporaryDirectory() as folder:
        bundle = Bundle.open(shutil.copytree(path, Path(folder) / path.name))
        largest = bundle.recipe.max_batch
        chosen = EngineOptions((1, largest, largest), compute_capabilities=gpus)
        if bundle.recipe.merging.static:
            engines = {"whole": build_engine(bundle, "tensorrt-rtx", chosen, precision)}
        else:
            single, parts = build_with_stretches(bundle, "tensorrt-rtx", chosen, precision)
            engines = {"whole": single} if single else {}
            engines |= {f"part {place} of {len(parts.engines)}": one for place, one in enumerate(parts.engines, 1)}
        if portable:
            engines["portable, no plugin"] = without_plugins(bundle, Path(folder), precision, chosen)
    for name, engine in engines.items():
        yield (path.name, precision, ", ".join(gpus), name, *_figures(engine))


def without_plugins(bundle: Bundle, folder: Path, precision: Any, options: EngineOptions) -> Engine:
    """Of the portable graph, its functions replaced by the standard operators they stand for.

    Raises:
        GateError: the engine has a plugin.
    """
    model = folder / "portable.onnx"
    onnx.save(onnx.inliner.inline_local_functions(onnx.load(bundle.file(ONNX))), model)
    with listening(load_bindings("tensorrt-rtx"), Log()):
        _, engine = engine_from_onnx(model, "tensorrt-rtx", precision, None, options, progress=False)
    if engine.parsed_network.plugins:
        raise GateError(f"expected an engine without plugins, got {engine.parsed_network.plugins}")
    return engine


def _figures(engine: Engine) -> tuple[str, ...]:
    size, seconds = f"{engine.engine_bytes / 1e6:.1f}", f"{engine.build_seconds:.1f}"
    layers, in_parts = str(len(engine.builder_layers)), str(engine.attention_in_parts)
    quantisers = engine.parsed_network.layers.get("QUANTIZE", {})
    quantised = ", ".join(f"{count} {dtype}" for dtype, count in sorted(quantisers.items())) or "none"
    return size, seconds, layers, quantised, in_parts, tuned_rows(engine), engine.version


if __name__ == "__main__":
    main()
