"""`themis COMMAND …`: finds the command, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from themis import __version__
from themis.cli.failure import explain, report
from themis.core.errors import ConfigError

#: The commands and what they are for; each lives in a module of its own, loaded when it is called.
COMMANDS: Mapping[str, str] = {
    "train": "train a model: themis train RECIPE [--nproc N] [--policy …] [--data PATH] [overrides]",
    "plan": "plan placements for recorded loads: themis plan LOADFILE",
    "simulate": "iteration time and memory on a cluster: themis simulate MODEL [--cluster b] [--policy …]",
    "reproduce": "the paper's figures and claims beside ours: themis reproduce [FIGURE …]",
    "export": "a run's model as a directory for transformers: themis export RUN OUT",
    "info": "parameters, memory a rank by kind, and the environment: themis info RECIPE",
}

_USAGE = "usage: themis COMMAND …\n\n{commands}\n\nthemis COMMAND --help shows a command's options.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status: 0, 1 when the run failed, 2 for bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(given)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # the reader of our output has gone, which is no one's fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        return report(explain(error))


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        width = max(len(name) for name in COMMANDS)
        commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
        print(_USAGE.format(commands=commands), end="")
        return 0
    if given[0] == "--version":
        print(__version__)
        return 0
    if given[0] not in COMMANDS:
        raise ConfigError(f"{given[0]!r} is no command; there are {', '.join(COMMANDS)}")
    command: Callable[[list[str]], int] = import_module(f"themis.cli.{given[0]}").main
    return command(given[1:])


if __name__ == "__main__":
    sys.exit(main())
