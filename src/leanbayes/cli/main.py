"""Entry point of the command line: choose a command, turn errors into one sentence and an exit code."""

from __future__ import annotations

import difflib
import importlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from leanbayes.cli.help import screen

Options = TypeVar("Options")

COMMANDS = {
    "compare": "compare:compare",
    "train": "compare:train",
    "evaluate": "compare:evaluate",
    "predict": "predict:predict",
    "report": "compare:report",
    "reproduce": "data:reproduce",
    "list": "names:list_names",
    "data": "data:data",
    "bench": "bench:bench",
}
"""Module and function of each command; a module is imported when its command is called."""

SPELLINGS = {"--resume": "--no-fresh", "--help-all": "--help"}
"""Flags that the parser knows by another name."""

USAGE = """leanbayes: parameter-efficient Bayesian deep learning for PyTorch, with its gain and its price measured.

usage: leanbayes COMMAND ...

  compare     train methods on your data and network, evaluate them alike, write a table and one HTML report
  train       only train; the models can be evaluated later
  evaluate    only evaluate trained models
  predict     predict new rows with a network of a comparison, any number of rows
  report      write the report of a folder of results again
  reproduce   repeat a table or figure of a paper, our numbers next to the paper's
  list        list methods, nets, data and suites
  data        data sets: list, prepare NAME
  bench       measure the cost of each method on this machine

Begin with:

  leanbayes compare                                     the embedded digits, all methods, a few minutes
  leanbayes compare --data fashion-mnist --net lenet    a known data set and network
  leanbayes compare --data my.npz --net my_module:make_network --methods plain,rank1,implicit

leanbayes COMMAND --help explains the flags; compare, train and evaluate have more of them: --help-all.
Exit codes: 0 done, 1 a run failed, 2 wrong usage or input, 130 interrupted (finished work is kept, the
same command resumes).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _replace_unknown_signs()
    if (text := _answer(arguments)) is not None:
        sys.stdout.write(text)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "; see leanbayes --help"
        complain(f"expected a command among {', '.join(COMMANDS)}, got {name!r}{meant}")
        return 2
    module, _, function = COMMANDS[name].partition(":")
    try:
        with _brief_warnings():
            code: int = getattr(importlib.import_module(f"leanbayes.cli.{module}"), function)(rest)
            return code
    except SystemExit as stop:  # the parser's own: 0 after --help, 2 after a wrong flag
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        complain("interrupted; finished work is kept. The same command resumes.")
        return 130
    except OSError as error:
        complain(f"{error.strerror}: '{error.filename}'" if error.strerror and error.filename else str(error))
        return 2
    except (ValueError, ModuleNotFoundError) as error:
        complain(str(error))
        return 2


def _answer(arguments: Sequence[str]) -> str | None:
    """Return help or the version, for which no command is imported; None for everything else."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return USAGE
    if arguments[0] == "--version":
        from leanbayes import __version__

        return f"leanbayes {__version__}\n"
    return screen(arguments[0]) if {"-h", "--help"} & set(arguments[1:]) else None


def parse(kind: type[Options], arguments: list[str], command: str) -> Options:
    """Parse flags into a dataclass; fields without a default are positional. --help and a wrong flag exit."""
    import tyro

    from leanbayes.runtime._files import local

    for argument in arguments:
        local(argument.partition("=")[2] if argument.startswith("--") else argument)
    flags = [SPELLINGS.get(argument, argument) for argument in arguments]
    positional: Any = tyro.conf.PositionalRequiredArgs
    found: Options = tyro.cli(kind, args=flags, prog=f"leanbayes {command}", config=(positional,))
    return found


def complain(text: str) -> None:
    """Write one message to stderr."""
    sys.stderr.write(f"leanbayes: {text}\n")


@contextmanager
def _brief_warnings() -> Iterator[None]:
    """Show each warning once, as a sentence without its place in the code."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            complain(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _replace_unknown_signs() -> None:
    """Write a question mark for a character that the terminal's encoding lacks, such as ±."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
