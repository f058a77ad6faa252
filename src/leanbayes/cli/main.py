"""The command line: parsing only. Every flag is a field of a dataclass; the work is done elsewhere."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

USAGE = """leanbayes: parameter-efficient Bayesian deep learning for PyTorch, with its gain and its price measured.

usage: leanbayes COMMAND ...

  compare     train methods on your data and network, evaluate them alike, write a table and one HTML report
  train       only train; the models can be evaluated later
  evaluate    only evaluate what was trained
  predict     predict for new rows with a network of a comparison, as many rows as you like
  report      write the report of a folder of results anew
  reproduce   repeat a table or figure of a paper, our numbers beside the paper's
  list        what there is: methods, nets, data, suites
  data        data sets: list, prepare NAME
  bench       what each method costs on this machine

Begin with:

  leanbayes compare                                     the embedded digits, all methods, a few minutes
  leanbayes compare --data fashion-mnist --net lenet    a known data set and network
  leanbayes compare --data my.npz --net my_module:make_network --methods plain,rank1,implicit

leanbayes COMMAND --help teaches the rest. Exit codes: 0 done, 1 a run failed, 2 wrong usage or input,
130 interrupted (what was done is kept, the same command goes on).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _replace_unknown_signs()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _say(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from leanbayes import __version__

        _say(f"leanbayes {__version__}\n")
        return 0
    name, *rest = arguments
    commands = _commands()
    if name not in commands:
        _complain(f"expected a command among {', '.join(commands)}, got {name!r}; see leanbayes --help")
        return 2
    try:
        with _brief_warnings():
            return commands[name](rest)
    except SystemExit as stop:  # the parser's own: 0 after --help, 2 after a wrong flag
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        _complain("interrupted; what was done is kept. The same command goes on from there.")
        return 130
    except OSError as error:
        _complain(f"{error.strerror}: '{error.filename}'" if error.strerror and error.filename else str(error))
        return 2
    except (ValueError, ModuleNotFoundError) as error:
        _complain(str(error))
        return 2


def _commands() -> dict[str, Callable[[list[str]], int]]:
    from leanbayes.cli import commands

    return {
        "compare": commands.compare,
        "train": commands.train,
        "evaluate": commands.evaluate,
        "predict": commands.predict,
        "report": commands.report,
        "reproduce": commands.reproduce,
        "list": commands.list_names,
        "data": commands.data,
        "bench": commands.bench,
    }


@contextmanager
def _brief_warnings() -> Iterator[None]:
    """Show each warning once, as a sentence without its place in the code: data are read more than once."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            _complain(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _replace_unknown_signs() -> None:
    """Write a question mark for what the terminal's encoding lacks: a ± should not cost the table."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _say(text: str) -> None:
    sys.stdout.write(text)


def _complain(text: str) -> None:
    sys.stderr.write(f"leanbayes: {text}\n")
