"""Commands about the installation: list, doctor, build-native."""

from __future__ import annotations

import argparse

from algm_deploy.cli import arguments
from algm_deploy.cli.saying import say
from algm_deploy.recipe.reading import recipe, recipe_names, recipe_rows


def list_recipes(_: argparse.Namespace) -> int:
    """Recipes that come with the package."""
    from algm_deploy.report.plans import listed_merges
    from algm_deploy.report.tables import text_table

    rows = []
    names = [full for name in recipe_names() for full in (name, *(f"{name}@{row}" for row in recipe_rows(name)))]
    for name in names:
        facts = recipe(name)
        plan, network = facts.merging, facts.network
        tau = f"{plan.clap_threshold:g}" if plan.reads_clap_threshold else "-"
        published = facts.published.get("miou_percent")
        miou = f"{published:g}" if published else "-"
        rows.append(
            (name, facts.protocol.dataset, "x".join(map(str, network.image_size)), listed_merges(plan), tau, miou)
        )
    say(text_table(("recipe", "dataset", "input", "merging layers", "tau", "published mIoU %"), rows))
    return 0


def doctor_flags(command: arguments.Parser) -> None:
    """Flags of doctor."""
    arguments.as_json(command)


def doctor(options: argparse.Namespace) -> int:
    """What can build and execute on this machine, and what to change."""
    from algm_deploy.doctor.rules import diagnose
    from algm_deploy.doctor.text import for_people, for_programs

    found = diagnose()
    say(for_programs(found) if options.json else for_people(found))
    return 0


def native_flags(command: arguments.Parser) -> None:
    """Flags of build-native."""
    command.add_argument(
        "libraries",
        type=arguments.word,
        nargs="*",
        metavar="LIBRARY",
        help="kernels (for PyTorch), trt_plugin (TensorRT), ort_custom_op (ONNX Runtime); default: all",
    )
    command.add_argument(
        "--architectures",
        type=arguments.several(arguments.positive),
        metavar="CC,CC",
        help="compute capabilities such as 89 or 80,90; default: all",
    )


def build_native(options: argparse.Namespace) -> int:
    """Compile the native libraries for this machine."""
    from algm_deploy.native_libraries import BUILT, build

    built = build(options.libraries or BUILT, options.architectures, progress=not options.quiet)
    for name, path in built.items():
        say(f"{name}: {path}")
    return 0
