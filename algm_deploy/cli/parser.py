"""The commands, a row each: what they are called, their flags, and the function that runs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from algm_deploy import __version__
from algm_deploy.cli import making, proving, tuning, upkeep, using
from algm_deploy.cli.arguments import Parser, talk

_TERMS = (
    "Start with demo: it needs no checkpoint, no data and no GPU. A bundle is the folder that export and deploy write. "
    "CLAP merges the patches of a small window in an early block where they are similar enough, GBM merges tokens from "
    "anywhere in a later block. Exit codes: 0 done, 1 a gate failed, 2 bad input, 3 built but nothing here can execute "
    "it."
)


class Command(NamedTuple):
    """A command; its help is the docstring of `run`."""

    name: str
    run: Callable[[argparse.Namespace], int]
    add_flags: Callable[[Parser], None]


COMMANDS = (
    Command("demo", making.demo, making.demo_flags),
    Command("deploy", making.deploy, making.deploy_flags),
    Command("export", making.export, making.export_flags),
    Command("build", making.build, making.build_flags),
    Command("verify", proving.verify, proving.verify_flags),
    Command("evaluate", proving.evaluate, proving.evaluate_flags),
    Command("bench", proving.bench, proving.bench_flags),
    Command("prove", proving.prove, proving.prove_flags),
    Command("compare", proving.compare, proving.compare_flags),
    Command("predict", using.predict, using.predict_flags),
    Command("serve", using.serve, using.serve_flags),
    Command("serve-repository", using.serve_repository, using.serve_repository_flags),
    Command("report", using.report, using.report_flags),
    Command("list", upkeep.list_recipes, lambda _: None),
    Command("doctor", upkeep.doctor, upkeep.doctor_flags),
    Command("build-native", upkeep.build_native, upkeep.native_flags),
)


def parser() -> Parser:
    """The whole command line."""
    root = Parser("algm-deploy", description="Deploys plain-ViT segmenters with adaptive token merging.", epilog=_TERMS)
    root.add_argument("--version", action="version", version=__version__)
    subcommands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, add_flags in COMMANDS:
        text = str(run.__doc__).rstrip(".")
        command = subcommands.add_parser(name, help=text[0].lower() + text[1:], description=text)
        command.set_defaults(run=run)
        add_flags(command)
        talk(command)
    tuning.add_tune(subcommands)
    return root
