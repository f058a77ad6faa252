"""The price of an answer: train networks once per seed, score every way to an answer, and time it.

python -m tools.curve train --out runs/curve/fashion --data fashion-mnist --net lenet --seeds 0,1,2
python -m tools.curve score --out runs/curve/fashion --into docs/results/curve
python -m tools.curve price --out runs/curve/fashion --into docs/results/curve --seeds 0
python -m tools.curve_page docs/results/curve > docs/results/curve.md

`train` writes its settings to OUT/study.json; the other commands read them. All commands keep finished work, so each
can run in pieces: `--seeds 0 --rows plain,implicit` does these rows alone. Rows of a seed s, each one training:

    plain, member2, member3, member4     plain networks; those after the first have the seeds s + 100, s + 200, s + 300
    implicit, rank1                      all layers converted, as `leanbayes compare` trains them
    implicit-last_stage, -last_block, -head      the same with `where=`; all begin from the plain network of the seed
    implicit-student                     `lb.distill` of the network with all layers

Some training rows are held out from all of these: temperatures are fitted on them. On a GPU, give `--device cuda
--precision bf16-mixed --compile` to `train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from leanbayes.compare import job as jobs_of
from tools import curve_price, curve_scores
from tools.curve_runs import Runs, Study


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the networks of a seed")
    score = commands.add_parser("score", help="score every way to an answer with the trained networks")
    price = commands.add_parser("price", help="time every way next to a plain pass")
    for command in (train, score, price):
        command.add_argument("--out", type=Path, required=True, help="folder of the networks")
        command.add_argument("--seeds", type=_numbers, default=(0, 1, 2) if command is not price else (0,))
        command.add_argument("--rows", type=_names, default=(), help="A,B,C: these trained networks alone")
        command.add_argument("--root", help="folder of the data")
        command.add_argument("--device", default=None if command is not train else "cpu")
    _settings(train)
    for command in (score, price):
        command.add_argument("--into", type=Path, required=True, help="folder of the figures")
    price.add_argument("--price-rows", type=int, default=1024)
    price.add_argument("--turns", type=int, default=11)
    price.add_argument("--seconds", type=float, default=0.1, help="least time of one measurement")
    price.add_argument("--capture", action="store_true", help="answers and plain passes as CUDA graphs")
    given = parser.parse_args(arguments)
    runs = Runs(_study(given), given.out, given.root)
    wanted = given.rows or runs.study.rows
    if unknown := [row for row in wanted if row not in runs.study.rows]:
        raise ValueError(f"expected rows among {', '.join(runs.study.rows)}, got {', '.join(unknown)}")
    if given.command == "train":
        every = [runs.train(seed, row) for seed in given.seeds for row in runs.study.rows if row in wanted]
        return int(any(error is not None for error in every))
    device = given.device or runs.study.device
    if given.command == "score":
        curve_scores.score_all(runs, given.seeds, wanted, device, given.into)
    elif len(given.seeds) > 1:
        raise ValueError(f"expected the networks of one seed to time, got seeds {given.seeds}")
    else:
        curve_price.price_all(runs, given.seeds[0], wanted, device, given)
    return 0


def _settings(train: argparse.ArgumentParser) -> None:
    """Add the settings of a study to a parser."""
    train.add_argument("--data", default="cifar10")
    train.add_argument("--net", default="wrn-28-10")
    train.add_argument("--methods", type=_names, default=("implicit", "rank1"))
    train.add_argument("--ood", type=_names, default=())
    train.add_argument("--budget", default="short", choices=jobs_of.BUDGETS)
    for name in ("epochs", "train-rows", "test-rows", "ood-rows"):
        train.add_argument(f"--{name}", type=int, default=0)
    train.add_argument("--hold-out", type=int, default=5000)
    train.add_argument("--samples", type=int, default=16)
    train.add_argument("--precision", default="32-true")
    train.add_argument("--compile", action="store_true")


def _study(given: argparse.Namespace) -> Study:
    """Return the study of the arguments of `train`, and write it; for other commands read it."""
    if given.command != "train":
        return Study.read(given.out)
    study = Study(**{name: getattr(given, name) for name in Study.__dataclass_fields__})
    study.write(given.out)
    return study


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
