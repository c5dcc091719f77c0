"""The commands and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from algm_deploy import __version__
from algm_deploy.cli import commands
from algm_deploy.cli.settings import count, positive, size, up_to
from algm_deploy.cli.tuning import add_searches, tune
from algm_deploy.runners.registry import RUNTIMES

_SLICE = (
    "how to group images for figures by slice: folder; FILE.csv:COLUMN with the images' names in the first column; or "
    "a regular expression whose group, or match, in an image's name is its slice; default: the data set's own"
)
_DATASET = "its name, or folder for labelled photos of your own with a classes.json; default: the bundle's"
_TERMS = (
    "Start with demo: it needs no checkpoint, no data and no GPU. A bundle is the folder that export and deploy write. "
    "CLAP merges the patches of a window in an early block where their similarity reaches tau, a threshold: the lower, "
    "the more merges, and above 1 none do. GBM merges tokens from anywhere in a later block. Exit codes: 0 done, 1 a "
    "gate failed, 2 bad input, 3 built but nothing here can execute it."
)


def parser() -> argparse.ArgumentParser:
    """The whole command line; a command's help is the docstring of its function."""
    root = argparse.ArgumentParser(
        "algm-deploy", description="Deploys plain-ViT segmenters with adaptive token merging.", epilog=_TERMS
    )
    root.add_argument("--version", action="version", version=__version__)
    subcommands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, groups in COMMANDS:
        text = str(run.__doc__).rstrip(".")
        command = subcommands.add_parser(name, help=text[0].lower() + text[1:], description=text)
        command.set_defaults(run=run)
        for add in groups:
            add(command)
    return root


def _bundle(command: argparse.ArgumentParser) -> None:
    command.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder that export or deploy wrote")


def _photos(command: argparse.ArgumentParser) -> None:
    command.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="photos, or folders of photos")
    command.add_argument(
        "-o", "--output", type=Path, default=Path("predictions"), help="folder for the pictures (predictions)"
    )
    command.add_argument(
        "--tau", type=float, help="CLAP threshold instead of the bundle's; above 1 CLAP merges nothing"
    )


def _doctor_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for programs")


def _native_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "libraries", nargs="*", metavar="LIBRARY", help="kernels (for PyTorch), trt_plugin, ort_custom_op; default: all"
    )
    command.add_argument(
        "--architectures", type=positive, nargs="+", metavar="CC", help="compute capabilities such as 89; default: all"
    )


def _demo_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", type=Path, default=Path("algm-demo"), help="folder to write (algm-demo)")
    _runtime(command)


def _runtime(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--runtime", choices=RUNTIMES, default="onnxruntime-cpu", help="what executes (default onnxruntime-cpu)"
    )


def _engine(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("TensorRT engines")
    group.add_argument("--engine-precision", choices=("fp32", "fp16", "bf16"), help="default: the bundle's")
    group.add_argument("--opt-batch", type=positive, help="batch the engine is tuned for; default: the largest")
    group.add_argument("--level", type=int, choices=range(6), help="optimisation level of the builder")
    group.add_argument("--workspace-mib", type=positive, help="scratch memory the builder may plan with")
    group.add_argument("--timing-cache", type=Path, help="tensorrt only: file of measured times, read and written")
    group.add_argument("--version-compatible", action="store_true", help="tensorrt only: runs on later releases too")
    group.add_argument("--hardware-compatible", action="store_true", help="tensorrt only: runs on later GPUs too")
    group.add_argument(
        "--compute-capabilities", nargs="+", metavar="CC", help="tensorrt-rtx only: GPUs to build for, such as 8.9"
    )


def _repeat(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--repeat", type=up_to(100), metavar="N", help="build N times and tell how far labels and times of them differ"
    )


def _verify_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--images", type=Path, nargs="+", default=[], help="photos for parity; default: synthetic scenes"
    )
    command.add_argument("--count", type=up_to(256), default=4, help="how many of them (default 4)")


def _data_options(command: argparse.ArgumentParser) -> None:
    required = command.prog.endswith("evaluate")
    command.add_argument(
        "--data", type=Path, required=required, help="root folder of a data set in its official layout"
    )
    command.add_argument("--dataset", help=_DATASET)
    command.add_argument("--split", help="default: the split its results are published on")
    command.add_argument("--slice", help=_SLICE)
    command.add_argument("--limit", type=positive, help="evaluate that many images, spread evenly")
    merging = command.add_mutually_exclusive_group()
    if required:
        merging.add_argument("--tau", type=float, help="CLAP threshold instead of the bundle's")
    merging.add_argument("--dense", action="store_true", help="merge nothing: what merging costs is the difference")


def _deploy_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--bench", action="store_true", help="time it as well, beside the dense network: see bench")


def _bench_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--images", type=Path, nargs="+", default=[], help="photos to time; default: synthetic scenes")
    command.add_argument(
        "--protocol",
        choices=("duplicate", "mixed", "latency"),
        default="latency",
        help="batches of one picture repeated, of different pictures, or single pictures until the label map is back "
        "on the host (default)",
    )
    command.add_argument("--batch", type=positive, help="pictures in a batch; default: the bundle's maximum")
    command.add_argument("--count", type=up_to(1024), help="how many pictures (default 8, or a batch of them)")
    command.add_argument("--warmup", type=count, help="calls before the clock counts (default 5)")
    command.add_argument(
        "--rounds",
        type=positive,
        help="rounds over the pictures at least; unsteady times get more (default 4)",
    )
    command.add_argument("--tau", type=float, help="CLAP threshold instead of the bundle's")


def _tune_options(command: argparse.ArgumentParser) -> None:
    add_searches(command, _bundle, _runtime, _DATASET, _SLICE)


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "beside", type=Path, nargs="*", metavar="OTHER", help="bundles to compare with, such as a dense one"
    )
    command.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="file to write (report.html)")
    command.add_argument("--images", type=Path, nargs="+", default=[], help="photos to show, or folders of photos")
    command.add_argument("--data", type=Path, help="root folder of a data set: photos to show with their labels")
    command.add_argument("--dataset", help=_DATASET)
    command.add_argument("--split", help="default: the split its results are published on")
    command.add_argument("--slice", help=_SLICE)
    command.add_argument("--count", type=up_to(100), default=3, help="how many photos of the data set (default 3)")


def _export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a file, its folder, or that of its parts")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    command.add_argument(
        "--recipe", help="recipe by name (see list) or TOML file; default: the checkpoint's variant.yml"
    )
    command.add_argument(
        "--image-size",
        type=size,
        metavar="HxW",
        help="input of the network in pixels; other than the protocol's window: photos are resized to it as a whole",
    )
    command.add_argument("--tau", type=float, help="CLAP threshold; default: the recipe's")
    command.add_argument(
        "--scores", action="store_const", const="scores", dest="tail", help="output class scores (default)"
    )
    command.add_argument(
        "--labels", action="store_const", const="labels", dest="tail", help="output label maps only: fastest"
    )
    command.add_argument("--precision", choices=("fp32", "fp16"), help="of weights and tokens; default: the recipe's")
    command.add_argument("--max-batch", type=positive, help="largest batch the bundle takes; default: the recipe's")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the recipe")


Command = Callable[[argparse.Namespace], int]
Options = Callable[[argparse.ArgumentParser], None]
COMMANDS: tuple[tuple[str, Command, tuple[Options, ...]], ...] = (
    (
        "deploy",
        commands.deploy,
        (_export_options, _runtime, _engine, _verify_options, _data_options, _deploy_options),
    ),
    ("export", commands.export_bundle, (_export_options,)),
    ("build", commands.build, (_bundle, _runtime, _engine, _repeat)),
    ("verify", commands.verify, (_bundle, _runtime, _verify_options)),
    ("evaluate", commands.evaluate, (_bundle, _runtime, _data_options)),
    ("tune", tune, (_tune_options,)),
    ("bench", commands.bench, (_bundle, _runtime, _bench_options)),
    ("predict", commands.predict, (_bundle, _photos, _runtime)),
    ("demo", commands.demo, (_demo_options,)),
    ("report", commands.report, (_bundle, _runtime, _report_options)),
    ("doctor", commands.doctor, (_doctor_options,)),
    ("build-native", commands.build_native, (_native_options,)),
    ("list", commands.list_recipes, ()),
)
