"""Words of a command come in any order that its usage line shows: flags before, between and after the names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise

import pytest

from algm_deploy.cli.parser import parser

VALUES = ("8", "0.5", "64x64", "8,9", "photos", "torch")  # one of them fits every flag that has no choices


def leaves(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Every command that takes no other command."""
    below = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield command
    for action in below:
        for one in action.choices.values():
            yield from leaves(one)


COMMANDS = {command.prog: command for command in leaves(parser())}


def flag_words(action: argparse.Action) -> list[list[str]]:
    """What can be written for a flag, once by each of its names."""
    count = action.nargs if isinstance(action.nargs, int) else 1
    if action.choices:
        value = str(next(iter(action.choices)))
    elif action.type is None:
        value = "text"
    else:
        value = next(text for text in VALUES if fits(action.type, text))
    return [[name, *[value] * count] for name in action.option_strings]


def fits(kind: object, text: str) -> bool:
    try:
        kind(text)  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


def names_of(command: argparse.ArgumentParser) -> list[list[str]]:
    """Names that fill the positional arguments: at least, and one more where there may be several."""
    least: list[str] = []
    most: list[str] = []
    for action in command._actions:
        if action.option_strings:
            continue
        least += [f"{action.dest}-1"] * (action.nargs in (None, "+"))
        most += [f"{action.dest}-{index}" for index in range(1 if action.nargs in (None, "?") else 3)]
    return [least] if least == most else [least, most]


def orders(names: list[str], flag: list[str]) -> list[list[str]]:
    return [[*names[:place], *flag, *names[place:]] for place in range(len(names) + 1)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_order_of_the_usage_line_means_the_same(name: str) -> None:
    command = COMMANDS[name]
    flags = [action for action in command._actions if action.option_strings and action.dest != "help"]
    needed = [word for action in flags if action.required for word in flag_words(action)[0]]
    tried = 0
    for names in names_of(command):
        for action in flags:
            for words in flag_words(action):
                others = [] if action.required else needed
                found = [vars(command.parse_args([*others, *line])) for line in orders(names, words)]
                found += [vars(command.parse_args([*line, *others])) for line in orders(names, words)]
                for one, other in pairwise(found):
                    assert one == other, (names, words)
                tried += len(found)
    assert tried >= 2 * len(flags)


@pytest.mark.parametrize("name", COMMANDS)
def test_names_that_begin_with_a_dash_come_after_two_dashes(name: str) -> None:
    command = COMMANDS[name]
    needed = [w for a in command._actions if a.option_strings and a.required for w in flag_words(a)[0]]
    names = names_of(command)[-1]
    given = [f"-{text}" for text in names]
    found = vars(parser().parse_args([*name.split()[1:], *needed, "--", *given]))
    values = {str(v) for value in found.values() for v in (value if isinstance(value, list) else [value])}
    assert set(given) <= values


def test_the_check_can_fail() -> None:
    """argparse as it comes refuses a name behind a flag that stands behind a name."""
    plain = argparse.ArgumentParser(exit_on_error=False)
    plain.add_argument("bundle")
    plain.add_argument("beside", nargs="*")
    plain.add_argument("--output")
    assert plain.parse_args(["one", "two", "--output", "x"]).beside == ["two"]
    with pytest.raises(SystemExit):
        plain.parse_args(["one", "--output", "x", "two"])
