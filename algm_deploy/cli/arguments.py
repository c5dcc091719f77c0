"""Flags that commands share, each declared once, and the types of values.

No flag takes a varying number of values: a list is one value with commas, or the flag comes again. So flags and names
may stand in any order.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Sequence
from itertools import islice
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from algm_deploy.cli.saying import tell
from algm_deploy.errors import DatasetError, RecipeError, RuntimeUnavailableError
from algm_deploy.recipe.plan import DENSE, method_settings
from algm_deploy.recipe.reading import budget_settings, checked
from algm_deploy.recipe.schema import Precision
from algm_deploy.runners.registry import RUNTIMES, default_runtime

if TYPE_CHECKING:
    from algm_deploy.bundle.store import Bundle

_SLICE = (
    "how to group images for figures by slice: folder; FILE.csv:COLUMN with the images' names in the first column; or "
    "a regular expression whose group, or match, in an image's name is its slice; default: the data set's own"
)


class Parser(argparse.ArgumentParser):
    """Takes flags and names in any order, and no flag by half its name."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, **options)
        self.allow_abbrev = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, names and flags intermixed; a name that begins with a dash stands after two dashes."""
        if args is not None and self._subparsers is None:
            args = self._names_last(args)
        return super().parse_known_args(args, namespace)

    def _names_last(self, given: Sequence[str]) -> list[str]:
        flags: list[str] = []
        names: list[str] = []
        words = iter(given)
        for word in words:
            if word == "--":
                names += words
            elif word.startswith("-") and word != "-":
                action = self._option_string_actions.get(word)
                count = 1 if action and action.nargs is None else action.nargs if action else 0
                flags += [word, *islice(words, count)]  # type: ignore[arg-type]  # no flag takes a varying number
            else:
                names.append(word)
        return [*flags, "--", *names] if names else flags

    def error(self, message: str) -> NoReturn:
        """One sentence and where help is; argparse would print every flag first."""
        tell(f"{self.prog}: {message}; `{self.prog} --help` tells more")
        raise SystemExit(2)


# ---------------------------------------------------------------------------------------------------------------- types

_MOST = 999_999_999  # of what is counted


def word(text: str) -> str:
    """A name; an empty one, such as that of an unset variable, would mean the default."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty text: is a variable unset?")
    return text


def path(text: str) -> Path:
    """A path; an empty one would mean the current folder."""
    return Path(word(text))


def size(text: str) -> tuple[int, int]:
    """HEIGHTxWIDTH in pixels."""
    height, separator, width = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH in pixels, such as 512x1024, got {text!r}")
    return positive(height), positive(width)


def threshold(text: str) -> float:
    """A similarity, or inf to merge nothing."""
    if isnan(number := _number(text)):
        raise argparse.ArgumentTypeError(f"expected a number, or inf to merge nothing, got {text!r:.50}")
    return number


def finite(text: str) -> float:
    """A number, not infinity."""
    if not isfinite(number := _number(text)):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r:.50}")
    return number


def _number(text: str) -> float:
    """NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def count(text: str) -> int:
    """A whole number of at least 0."""
    return up_to(_MOST, least=0)(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return up_to(_MOST)(text)


def up_to(limit: int, least: int = 1) -> Callable[[str], int]:
    """A whole number from `least`, 0 or 1, to `limit`, such as that of pictures that lie in memory at once."""

    def number(text: str) -> int:
        if not text.isdecimal() or (least and not text.strip("0")):
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r:.50}")
        if len(text) > len(str(limit)) or int(text) > limit:
            raise argparse.ArgumentTypeError(f"expected a whole number up to {limit}, got {text!r:.50}")
        return int(text)

    return number


def port(text: str) -> int:
    """A port to listen on, 0 for a free one."""
    return up_to(65535, least=0)(text)


def budget(text: str) -> tuple[int | float, int | float]:
    """WINDOWS,TOKENS: each a count, or a share written with a point."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(
            f"expected WINDOWS,TOKENS as counts or shares, such as 110,156 or 0.43,0.225, got {text!r:.50}"
        )
    clap, gbm = (int(part) if part.strip().isdecimal() and len(part) < 10 else finite(part) for part in parts)
    return clap, gbm


def several(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Values of one kind, with commas between them."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    return values


def setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE of a recipe; the value as TOML, or the text itself."""
    key, separator, value = text.partition("=")
    if not separator:
        raise RecipeError(f"expected --set KEY=VALUE, such as merging.order=raster; got {text!r}")
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        found = value
    return key, checked(key, found)


# ---------------------------------------------------------------------------------------------------------------- flags


def bundle(command: Parser) -> None:
    """The bundle a command works on."""
    command.add_argument("bundle", type=path, metavar="BUNDLE", help="folder that export or deploy wrote")


def runtime(command: Parser) -> None:
    """What executes."""
    command.add_argument(
        "--runtime",
        choices=tuple(RUNTIMES),
        help="what executes; default: the best that can execute here, and it says so",
    )


def device(command: Parser) -> None:
    """Where it executes."""
    command.add_argument(
        "--device", type=word, metavar="DEVICE", help="cpu, cuda or cuda:1; default: the runtime's usual one"
    )


def images(command: Parser, default: str) -> None:
    """Photos of the user's."""
    command.add_argument(
        "--images",
        type=path,
        action="append",
        default=[],
        metavar="PHOTO",
        help=f"photo or folder of photos, may come again; default: {default}",
    )


def dataset(command: Parser, required: bool, slices: bool = True) -> None:
    """A labelled data set; `slices`: figures are told by slice."""
    command.add_argument(
        "--data", type=path, required=required, help="root folder of a data set in its official layout"
    )
    command.add_argument(
        "--dataset",
        type=word,
        help="its name, or folder for labelled photos of your own with a classes.json; default: the bundle's",
    )
    command.add_argument("--split", type=word, help="default: the split its results are published on")
    if slices:
        command.add_argument("--slice", type=word, help=_SLICE)


def thresholds(command: Parser) -> None:
    """How much a run merges, instead of what the bundle says."""
    group = command.add_argument_group("merging, instead of the bundle's thresholds")
    group.add_argument(
        "--tau",
        type=threshold,
        help="threshold of CLAP or G2TM, or confidence of DToP: the lower, the more merges; above 1 nothing",
    )
    group.add_argument("--gbm", type=threshold, help="GBM's multiplier of the deviation, or its threshold")
    group.add_argument("--dense", action="store_true", help="merge nothing: what merging costs is the difference")


def ray(command: Parser) -> None:
    """Many machines."""
    group = command.add_argument_group("many machines")
    group.add_argument(
        "--ray",
        type=word,
        metavar="ADDRESS",
        help="run on a Ray cluster: HOST:PORT, auto for the one this machine is part of, or local to start one here",
    )
    group.add_argument(
        "--workers",
        type=positive,
        help="workers of the cluster; default: one for each GPU, or for each core where the runtime uses no GPU",
    )


def waiting(group: argparse._ArgumentGroup, queue: str) -> None:
    """What a server takes; `queue`: what --queue counts."""
    group.add_argument(
        "--wait",
        type=count,
        default=2,
        metavar="MS",
        help="milliseconds that a picture waits for others to share its batch (default 2)",
    )
    group.add_argument(
        "--queue", type=up_to(100_000), default=64, metavar="COUNT", help=f"how many {queue} (default 64)"
    )
    group.add_argument(
        "--max-megapixels", type=up_to(170), default=50, metavar="MP", help="largest picture (default 50)"
    )


def as_json(command: Parser) -> None:
    """For programs."""
    command.add_argument("--json", action="store_true", help="print the record as JSON, and nothing else")


def talk(command: Parser) -> None:
    """How much is said."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("-v", "--verbose", action="store_true", help="also say what is usually left out")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress bars and no notes")


def settings(command: Parser) -> None:
    """What a bundle is exported with."""
    command.add_argument("checkpoint", type=path, metavar="CHECKPOINT", help="a file, or a folder with it or its parts")
    command.add_argument("-o", "--output", type=path, required=True, metavar="BUNDLE", help="folder to write")
    command.add_argument(
        "--recipe", type=word, help="recipe by name (see list) or TOML file; default: the checkpoint's variant.yml"
    )
    command.add_argument(
        "--image-size",
        type=size,
        metavar="HxW",
        help="input of the network in pixels; where it is not the protocol's window, whole photos are resized to it",
    )
    tail = command.add_mutually_exclusive_group()
    tail.add_argument("--scores", action="store_true", help="output class scores (default)")
    tail.add_argument("--labels", action="store_true", help="output label maps only: fastest")
    command.add_argument(
        "--precision", choices=get_args(Precision), help="what large products are computed in; default: the recipe's"
    )
    command.add_argument(
        "--calibrate",
        type=path,
        action="append",
        default=[],
        metavar="PHOTO",
        help="for int8, and for fp8 with TensorRT: photo or folder of photos like those it will see, to measure ranges "
        "on; may come again",
    )
    command.add_argument("--max-batch", type=positive, help="largest batch the bundle takes; default: the recipe's")
    command.add_argument(
        "--set", type=word, action="append", default=[], metavar="KEY=VALUE", help="any setting of the recipe"
    )
    group = command.add_argument_group("merging, instead of the recipe's")
    group.add_argument(
        "--tau",
        type=finite,
        help="threshold of CLAP or G2TM, or confidence of DToP: the lower, the more merges; above 1 nothing",
    )
    group.add_argument("--gbm", type=finite, help="GBM's multiplier of the deviation, or its threshold")
    group.add_argument("--dense", action="store_true", help="export the network without any merge")
    group.add_argument(
        "--budget",
        type=budget,
        metavar="WINDOWS,TOKENS",
        help="instead of thresholds: merge the most similar windows and tokens of every picture, as many as this says, "
        "in counts (110,156) or shares (0.43,0.225); not the paper's rule, and no run changes it",
    )


# --------------------------------------------------------------------------------------------------------------- values

_SETTINGS = {
    "image_size": "network.image_size",
    "tau": "merging.clap_threshold",
    "gbm": "merging.gbm_threshold",
    "precision": "precision",
    "max_batch": "max_batch",
}
_MERGES = ("method", "clap_layers", "gbm_layers", *method_settings())
_WITHOUT_MERGES = {f"merging.{name}": getattr(DENSE, name) for name in _MERGES}


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Recipe settings from the flags of `settings`.

    Raises:
        RecipeError: --dense or --budget beside what it excludes, a setting by a flag and by --set, an unknown one, or a
            value that does not fit.
    """
    given = {key: value for flag, key in _SETTINGS.items() if (value := getattr(options, flag)) is not None}
    if options.scores or options.labels:
        given["output"] = "labels" if options.labels else "scores"
    if options.dense:
        if options.tau is not None or options.gbm is not None:
            raise RecipeError("expected --dense without --tau and --gbm: a network without merges reads no threshold")
        if options.budget is not None:
            raise RecipeError("expected --dense or --budget, got both: a network without merges has no budget for them")
        given |= _WITHOUT_MERGES
    if options.budget is not None:
        if options.tau is not None or options.gbm is not None:
            raise RecipeError("expected --budget without --tau and --gbm: a merge by a budget reads no threshold")
        given |= budget_settings(*options.budget)
    asked = dict(map(setting, options.set))
    if twice := sorted(given.keys() & asked.keys()):
        raise RecipeError(f"expected {twice[0]} once, got it by a flag and by --set: leave one out")
    return given | asked


def given_thresholds(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments `tau`, `gbm` and `dense` of the Python functions, from the flags of `thresholds`."""
    return {"tau": options.tau, "gbm": options.gbm, "dense": options.dense}


def check_data(options: argparse.Namespace) -> None:
    """DatasetError where there are flags about a data set and none that names it: they would say nothing."""
    flags = ("dataset", "split", "slice", "limit")
    given = [flag for flag in flags if getattr(options, flag, None) is not None]
    if options.data is None and given:
        raise DatasetError(
            f"expected --data with --{given[0]}, got no data set: name its folder, or leave the flag out"
        )


def check_ray(options: argparse.Namespace, *flags: str) -> None:
    """RuntimeUnavailableError where flags of a cluster are given without one."""
    if options.ray is None and (given := [flag for flag in ("workers", *flags) if getattr(options, flag) is not None]):
        raise RuntimeUnavailableError(f"expected --ray ADDRESS with --{given[0]}, got none: add it, or leave that out")


def runtime_of(options: argparse.Namespace, bundle: Bundle | None = None) -> str:
    """The runtime that --runtime names, or the best that can execute the bundle here; `main` says which that was."""
    if options.runtime:
        return str(options.runtime)
    device = getattr(options, "device", None)
    options.chosen = default_runtime(bundle.files, device) if bundle else default_runtime(device=device)
    return str(options.chosen)


def listed(values: Sequence[object]) -> str:
    """Values with commas between them."""
    return ", ".join(map(str, values))
