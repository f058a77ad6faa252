"""Entry point of the command line: choose a command, turn errors into one sentence and an exit code.

One screen of help for the commands with many flags. It is plain text, so that help needs no torch.

`--help-all` prints every flag with its default, from the dataclasses.
"""

from __future__ import annotations

import difflib
import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

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
  data        list the known data sets, or fetch one: data prepare NAME
  bench       measure the cost of each method on this machine

Begin with:

  leanbayes compare                                     the embedded digits, all methods, a few minutes
  leanbayes compare --data fashion-mnist --net lenet    a known data set and network
  leanbayes compare --data my.npz --net my_module:make_network --methods plain,rank1,implicit

leanbayes COMMAND --help explains the flags. For compare, train and evaluate it shows the most used ones;
leanbayes compare --help-all shows all of them.
Exit codes: 0 done, 1 a run failed, 2 wrong usage or input, 3 stopped by --stop-after, 130 interrupted.
After 3 and 130 finished work is kept, and the same command resumes.
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
    from leanbayes.runtime.display import brief_warnings

    module, _, function = COMMANDS[name].partition(":")
    try:
        with brief_warnings():
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


def _replace_unknown_signs() -> None:
    """Write a question mark for a character that the terminal's encoding lacks, such as ±."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


PURPOSE = {
    "compare": "Train methods on one data set and network, evaluate them alike, write a table and OUT/report.html.",
    "train": "Only train the methods of a comparison; leanbayes evaluate with the same flags evaluates them.",
    "evaluate": "Only evaluate trained methods; give the flags of leanbayes train. --fresh evaluates again.",
}

SCREEN = """usage: leanbayes {command} [--FLAG VALUE ...]        every flag: leanbayes {command} --help-all

{purpose}

data
  --data DATA           a known name (leanbayes list data), .npz, a table, or a folder with images
                        train/CLASS/*.png, test/CLASS/*.png; default digits
  --target COLUMN       column of a table to predict, default the last; --drop LIST of columns
  --group COLUMN        whose groups are not split; --time COLUMN, the latest rows are the test rows
  --task TASK           classification or regression, for your own data; default by its targets
  --train-rows N        number of training rows, --test-images N of test rows; 0 is all
  --hold-out N          evaluate on N training rows instead of the test set, to choose settings
  --validation SHARE    share of the training rows to hold out, default 0.1; they give temperature,
                        noise and, for tables, the epochs; 0 trains on all rows
methods and network
  --methods LIST        such as plain,rank1,patch[crossed=true]; default all: leanbayes list methods
  --net NET             a known name (leanbayes list nets), or your own as package.module:function
  --where GLOBS         layers to convert, such as "fc*", or last_stage, last_block, head (cheap
                        answers); --late SHARE of the epochs before the conversion
training
  --budget BUDGET       quick (default, minutes), short (an hour on two cores), full (as in papers)
  --seeds LIST          default 0,1,2 for quick and short, 0 for full; one seed gives no advice
  --tune N              choose learning rate and noise level of each row of the table by N trials,
                        on held-out training rows
  --recipe.FIELD VALUE  such as --recipe.epochs 30, --recipe.lr 0.05, --recipe.batch-size 64
  --METHOD.FIELD VALUE  such as --rank1.components 8

  epochs by budget            quick   short   full      rate   batch
  images, 5,000 rows or more  3       15      60        0.05   128
  images, fewer rows          40      120     300       0.1    32     rate 0.01 from 28 pixels on
  images with augmentation    10      40      250       0.2    256    full: rate 0.1, batch 128
  series                      4       6       8         0.002  128
  steps by budget             quick   short   full      rate   batch
  tables                      20,000  60,000  200,000   0.003  32     at most 500 epochs
  tables, --validation 0      1,500   6,000   40,000    0.01   32     (batch 128 from 2,000 rows on)
  A table trains until its held-out rows have not improved for 30 epochs.

evaluation
  --samples N           draws per prediction, default 16; --design paired mirrors their noise
  --ood LIST            out-of-distribution data sets, or none; default the usual ones for the data
  --no-shift            leave out corrupted images; --shift-images N, default 1000
machine and results
  --out FOLDER          default runs/DATA. Finished runs are kept, others resume; or --fresh
  --workers N           runs at a time, each a process with one thread; --backend local or ray
  --device DEVICE       auto, cpu, cuda or mps; --devices N processes; --precision bf16-mixed
  --log LOGGER          csv, tensorboard, wandb or mlflow; history.jsonl is written in any case
  --stop-after MINUTES  then stop after the epoch, with exit code 3; the same command resumes

  leanbayes {command} --data houses.csv --target price
  leanbayes {command} --data my.npz --net my_module:make_network --methods plain,rank1,implicit
"""


def screen(command: str) -> str | None:
    """Return the help of a command in one screen; None if the parser's own help is short enough."""
    purpose = PURPOSE.get(command)
    return None if purpose is None else SCREEN.format(command=command, purpose=purpose)
