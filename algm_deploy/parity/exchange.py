"""Inputs and outputs of networks in Polygraphy's files, which its `run`, `inspect` and `debug` read and write.

polygraphy run model.onnx --onnxrt --load-inputs inputs.json --load-outputs outputs.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from algm_deploy.bundle.files import write_atomically
from algm_deploy.errors import BundleError
from algm_deploy.runners.contract import Array

Named = Mapping[str, Array]


def save_inputs(feeds: Sequence[Named], path: Path) -> Path:
    """Writes the inputs of several runs: one mapping from name to array a run.

    Raises:
        BundleError: the file cannot be written.
    """
    from polygraphy.json import save_json

    with write_atomically(path) as temporary:
        save_json([_plain(one) for one in feeds], str(temporary))
    return path


def save_outputs(outputs: Sequence[Named], runner: str, path: Path) -> Path:
    """Writes the outputs of several runs of one runner, called `runner` there.

    Raises:
        BundleError: the file cannot be written.
    """
    from polygraphy.comparator import IterationResult, RunResults

    results = RunResults()
    results.append((runner, [IterationResult(_plain(one), runner_name=runner) for one in outputs]))
    with write_atomically(path) as temporary:
        results.save(str(temporary))
    return path


def load_inputs(path: Path) -> list[dict[str, Array]]:
    """The inputs of several runs.

    Raises:
        BundleError: the file is no list of named arrays.
    """
    from polygraphy.json import load_json

    found = _loaded(load_json, path)
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) for one in found):
        raise BundleError(f"{path}: expected inputs as Polygraphy saves them, a mapping from name to array a run")
    return [_arrays(one, path) for one in found]


def load_outputs(path: Path) -> tuple[str, list[dict[str, Array]]]:
    """The first runner in the file, and the outputs of its runs.

    Raises:
        BundleError: the file holds no outputs of a run.
    """
    from polygraphy.comparator import RunResults

    found = _loaded(RunResults.load, path)
    if not isinstance(found, RunResults) or not len(found) or not found[0][1]:
        raise BundleError(f"{path}: expected outputs as `polygraphy run --save-outputs` writes them, got none")
    runner, runs = found[0]
    return str(runner), [_arrays(one, path) for one in runs]


def _plain(named: Named) -> dict[str, Array]:
    return {name: np.asarray(value) for name, value in named.items()}  # Polygraphy knows no scalars of NumPy


def _loaded(load: Any, path: Path) -> Any:
    if not path.is_file():
        raise BundleError(f"{path}: expected a file of Polygraphy, found none")
    try:
        return load(str(path))
    except Exception as error:  # its reader meets whatever is in the file
        said = f"{type(error).__name__} {error}".splitlines()[0][:200]
        raise BundleError(f"{path}: expected a file of Polygraphy, got {said}") from error


def _arrays(named: Mapping[str, Any], path: Path) -> dict[str, Array]:
    arrays = {str(name): np.asarray(value) for name, value in named.items()}
    if strange := [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]:
        raise BundleError(f"{path}: expected numbers as {strange[0]}, got {arrays[strange[0]].dtype}")
    return arrays
