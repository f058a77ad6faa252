"""Train variants of late conversion from one plain training for each seed, and score them on held-out training rows.

python -m tools.separation train --out runs/separation --seeds 0,1 --plain-seeds 0,1,2 --device cuda --compile
python -m tools.separation score runs/separation/*.npz --out docs/results/separation/separation.json

Several processes with the same `train` command share the work: each takes the next free training. A training that was
stopped resumes, a finished one is kept. `<variant>-seed<k>.failed` has the error of one that failed; remove it to try
again.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.compare import job as jobs_of
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, method_of, PLAIN, recipe_for
from leanbayes.compare.row_training import Row, train_row
from leanbayes.compare.run import row_of
from leanbayes.core.conversion import own_likelihood
from leanbayes.distributions.factor import Factor
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation.result import commit, environment
from leanbayes.methods._base import Method
from leanbayes.runtime._files import write_text
from leanbayes.runtime.batches import device_of
from leanbayes.training import Recipe
from leanbayes.training.devices import pick_device
from leanbayes.training.objective import autocast
from leanbayes.training.state import STATE
from tools.ruler import scores
from tools.ruler_scores import paired, predicted_parts, read_predictions, Saved, score, write_predictions

LATE = 0.7
"""Share of the epochs before the conversion: the default of the methods here."""
DEFAULT = "implicit"
"""The variant that the others are compared with."""


@dataclass(frozen=True)
class Variant:
    """A method with fields of its own, and the changes of its recipe; `posterior` is a factor of the posterior's rate.

    The method "plain" is the plain network, which also may restart its rate.
    """

    method: str = "implicit"
    fields: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    posterior: float = 1.0


VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(PLAIN),
    DEFAULT: Variant(),
    "rank1": Variant("rank1"),
    "restart 0.5": Variant(recipe={"restart_at_conversion": 0.5}),
    "posterior rate x 24": Variant(posterior=24.0),
    "spread 0.5": Variant(fields={"init_spread": 0.5}),
    "tiled last 5": Variant(recipe={"tile_last_epochs": 5}),
    "noise 0.05": Variant(fields={"init_std": 0.05}),
    "restart 0.25, posterior rate x 5, spread 0.5": Variant(
        fields={"init_spread": 0.5}, recipe={"restart_at_conversion": 0.25}, posterior=5.0
    ),
    "plain, restart 0.5": Variant(PLAIN, recipe={"restart_at_conversion": 0.5}),
    "posterior rate x 5": Variant(posterior=5.0),
    "restart 0.25": Variant(recipe={"restart_at_conversion": 0.25}),
    "restart 0.25, posterior rate x 24": Variant(recipe={"restart_at_conversion": 0.25}, posterior=24.0),
}
"""The variants by name, the most wanted first. All but the references change `implicit`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train variants and write their class probabilities on held-out rows")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--data", default="cifar10")
    train.add_argument("--net", default="wrn-16-4")
    train.add_argument("--budget", default="short", choices=jobs_of.BUDGETS)
    train.add_argument("--hold-out", type=int, default=5000)
    train.add_argument("--train-rows", type=int, default=0)
    train.add_argument("--epochs", type=int, default=0)
    train.add_argument("--seeds", type=_numbers, default=(0, 1))
    train.add_argument("--plain-seeds", type=_numbers, default=(), help="further plain networks")
    train.add_argument("--variants", type=lambda text: text.split(";"), default=list(VARIANTS), help="A;B;C")
    train.add_argument("--samples", type=int, default=16)
    train.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    train.add_argument("--precision", default="bf16-mixed")
    train.add_argument("--compile", action="store_true")
    train.add_argument("--root")
    many = commands.add_parser("score", help="score the files of train")
    many.add_argument("files", type=Path, nargs="+")
    many.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.command == "train":
        return Work(given).run()
    found = figures([read_predictions(path) for path in given.files])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", given.out)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


class Work:
    """The trainings of one command: which are left, and how each is done."""

    def __init__(self, given: argparse.Namespace) -> None:
        """Load the data and list the trainings, plain ones first."""
        if unknown := [name for name in given.variants if name not in VARIANTS]:
            raise ValueError(f"expected variants among {'; '.join(VARIANTS)}, got {'; '.join(unknown)}")
        self.out: Path = given.out
        self.out.mkdir(parents=True, exist_ok=True)
        hold, rows = given.hold_out, given.train_rows
        source = DataSpec(name=given.data, root=given.root, train_rows=rows, hold_out=hold)
        judging = EvaluationSpec(samples=given.samples, shift=False)
        self.experiment = Experiment(source, given.net, judging)
        self.rows: dict[int, Row] = {}
        self.job = Job(source=source, net=given.net, method=None, recipe=self._recipe(given), evaluation=judging)
        self.epoch = recipe_for(method_of(DEFAULT), self.job.recipe, LATE).convert_at_epoch
        plain = [(PLAIN, seed) for seed in dict.fromkeys((*given.seeds, *given.plain_seeds))]
        self.items = plain + [(name, seed) for name in given.variants if name != PLAIN for seed in given.seeds]

    def _recipe(self, given: argparse.Namespace) -> Recipe:
        """Return the recipe that `leanbayes compare` has for these data."""
        data, on_gpu = self.experiment.data, given.device.startswith("cuda")
        side = min(data.input_shape[1:])
        recipe = jobs_of.recipe(given.budget, kind=data.kind, rows=len(data.train), augment=data.augment, side=side)
        recipe = jobs_of.stretched(recipe, given.epochs or recipe.epochs)
        machine: dict[str, Any] = {"accelerator": given.device, "precision": given.precision, "compile": given.compile}
        return replace(recipe, **machine, channels_last=on_gpu)

    def run(self) -> int:
        """Train the free ones, one after another, until all are done here or in other processes."""
        while left := [item for item in self.items if not self._over(item)]:
            for item in left:
                with self._claimed(item) as mine:
                    if mine and not self._over(item):
                        self._attempt(item)
                        break
            else:
                time.sleep(1.0)
        return int(any(self._file(item, "failed").is_file() for item in self.items))

    def _file(self, item: tuple[str, int], ending: str) -> Path:
        return self.out / f"{jobs_of.file_name(item[0])}-seed{item[1]}.{ending}"

    def _over(self, item: tuple[str, int]) -> bool:
        """Return whether a training is finished or failed, or can never begin."""
        plain = PLAIN, item[1]
        ended = any(self._file(item, ending).is_file() for ending in ("npz", "failed"))
        return ended or (item[0] != PLAIN and self._file(plain, "failed").is_file() and not self._ready(item))

    def _ready(self, item: tuple[str, int]) -> bool:
        """Return whether a training may begin: a variant needs the plain state of its seed."""
        if item[0] == PLAIN:
            return True
        states = self._plain(item[1]).states
        return states is not None and (states.folder / f"epoch{self.epoch}" / STATE).is_file()

    def _plain(self, seed: int) -> Row:
        """Return the plain row of a seed; its data are on the device, once for all rows."""
        if seed not in self.rows:
            job = replace(self.job, recipe=replace(self.job.recipe, seed=seed), keeps=(self.epoch,))
            row = row_of(job, self.experiment, self.out)
            device = pick_device(row.recipe.accelerator)
            known = next((each.data for each in self.rows.values()), None)
            self.rows[seed] = replace(row, data=known or tuple(part.to(device) for part in row.data))
        return self.rows[seed]

    @contextmanager
    def _claimed(self, item: tuple[str, int]) -> Iterator[bool]:
        """Hold the lock of a training; yield whether it is ready and no other process has it. A kill frees the lock."""
        if not self._ready(item):
            yield False
            return
        with self._file(item, "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def _attempt(self, item: tuple[str, int]) -> None:
        start = time.perf_counter()
        try:
            saved = self.perform(*item)
        except Exception as error:
            write_text("".join(traceback.format_exception(error)), self._file(item, "failed"))
            said = f"failed: {error}"
        else:
            found = score(saved.parts["both"], saved.y).figures
            said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        seconds = time.perf_counter() - start
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {item[0]}, seed {item[1]}: {said} ({seconds:.0f} s)\n")
        sys.stderr.flush()
        torch.compiler.reset()
        if torch.cuda.is_available():  # on a CPU the memory is free by itself
            gc.collect()
            torch.cuda.empty_cache()

    def row(self, name: str, seed: int) -> Row:
        """Return a variant as a row that begins from the plain state of its seed."""
        variant, plain = VARIANTS[name], self._plain(seed)
        if name == PLAIN:
            return plain
        assert plain.states is not None
        method = method_of(variant.method, variant.fields)
        recipe = replace(plain.recipe, convert_at_epoch=self.epoch, **variant.recipe)
        if method is not None:
            recipe = replace(recipe, posterior_lr=variant.posterior * recipe.lr * method.posterior_rate)
        own: dict[str, Any] = {"make": partial(self._made, method, seed), "recipe": recipe, "plain": plain}
        own |= {"states": replace(plain.states, epochs=()), "folder": self._file((name, seed), "run")}
        row = replace(plain, **own)
        assert row.states is not None
        row.states.begin(row.folder, recipe, row.make, plain.make, None)
        if not (row.folder / STATE).is_file():
            raise ValueError(f"the plain part of {name} is not that of the plain network of seed {seed}")
        return row

    def _made(self, method: Method | None, seed: int) -> tuple[nn.Module, Likelihood]:
        device = pick_device(self.job.recipe.accelerator)
        model = self.experiment.model(method, seed).to(device)
        return model, own_likelihood(model) or self.experiment.likelihood().to(device)

    def perform(self, name: str, seed: int) -> Saved:
        """Train a variant and write its class probabilities on the held-out rows."""
        row = self.row(name, seed)
        start, _ = row.make()
        trained = train_row(row)
        model, data = trained.model, self.experiment.data
        device = device_of(model)
        with autocast(row.recipe.precision, device):
            parts = predicted_parts(model, self.experiment.test[1], trained.likelihood, row.samples, noise=False)
            found = {part: p.float().cpu() for part, p in parts}
        seconds = [float(one["seconds"]) for one in trained.history]
        about = {
            "net": self.job.net,
            "method": {"name": name, "of": VARIANTS[name].method, "fields": dict(VARIANTS[name].fields)},
            "seed": seed,
            "data": {"name": data.name, "sha256": data.sha256, "train": len(data.train), "held_out": len(data.test)},
            "recipe": row.recipe.fields(),
            "samples": row.samples,
            "seconds": {"before": sum(seconds[: self.epoch]), "after": sum(seconds[self.epoch :])},
            "members": movement(start, model),
            "environment": environment(device),
            "commit": commit(),
        }
        path = self._file((name, seed), "npz")
        return write_predictions(path, Saved(about, self.experiment.test[2].long().cpu(), found))


def movement(start: nn.Module, end: nn.Module) -> dict[str, float]:
    """Return how far members moved in training: standard deviations of their offsets, before and after.

    An offset is the mean of a factor in a member, less its average over the members. `correlation` is that of the
    offsets before and after: 1 for members that stayed. `noise` is the mean standard deviation within a member.
    """
    (first, before), (last, after) = (_offsets(model) for model in (start, end))
    if not len(first):
        return {}
    alike = float(torch.corrcoef(torch.stack([first, last]))[0, 1]) if first.any() and last.any() else 0.0
    spreads = {"spread_before": float(first.std()), "spread_after": float(last.std()), "correlation": alike}
    return spreads | {"noise_before": float(before.mean()), "noise_after": float(after.mean())}


def _offsets(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the offsets of all members from their average, and their standard deviations, as vectors."""
    both = [m.parameters_of_all() for m in model.modules() if isinstance(m, Factor)]
    locs = [(loc - loc.mean(0)).flatten() for loc, _ in both]
    none = torch.zeros(0)
    found = (torch.cat([part.detach().double().cpu().flatten() for part in parts] or [none]) for parts in (
        locs, [scale for _, scale in both]))  # fmt: skip
    first, second = found
    return first, second


def figures(runs: Sequence[Saved]) -> dict[str, Any]:
    """Return the curve of the plain networks, and for each variant its figures, worth, disagreement and movement."""
    found = scores(runs)
    by_name: dict[str, dict[int, Saved]] = {}
    for run in runs:
        by_name.setdefault(run.about["method"]["name"], {})[run.about["seed"]] = run
    plain, default = by_name[PLAIN], by_name.get(DEFAULT, {})
    pairs = [differ([a.parts["both"], b.parts["both"]]) for a, b in combinations(plain.values(), 2)]
    one = next(iter(plain.values()))
    found |= {"net": one.about["net"], "environment": one.about["environment"], "trained_with": _commits(runs)}
    found |= {"samples": one.about["samples"], "recipe": one.about["recipe"]}
    found |= {"plain_disagreement": statistics.fmean(pairs) if pairs else None}
    found["plain_seconds"] = {str(seed): sum(run.about["seconds"].values()) for seed, run in sorted(plain.items())}
    rank = {name: number for number, name in enumerate(VARIANTS)}
    found["methods"].sort(key=lambda each: rank.get(each["method"], len(rank)))
    for each in found["methods"]:
        own = dict(sorted(by_name[each["method"]].items()))
        each |= _details(own, one.about["recipe"])
        for name in ("both", "members without noise"):
            if name in each["parts"] and default:
                scored = [{s: score(_part(run, name), run.y) for s, run in of.items()} for of in (own, default)]
                each["parts"][name]["less_default"] = paired(scored[0], scored[1])
    return found


def differ(members: Sequence[Tensor]) -> float:
    """Return the share of rows whose likeliest classes differ between two members, the mean over all pairs."""
    votes = [p.argmax(1) for p in members]
    return statistics.fmean(float((a != b).double().mean()) for a, b in combinations(votes, 2))


def _part(run: Saved, name: str) -> Tensor:
    if name == "both":
        return run.parts["both"]
    assert run.members is not None
    return run.members


def _details(runs: dict[int, Saved], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a variant, how its members differ, how far they moved, and its seconds, by seed."""
    about = next(iter(runs.values())).about
    members = {str(s): [p for n, p in run.parts.items() if n.startswith("member")] for s, run in runs.items()}
    changed = {n: v for n, v in about["recipe"].items() if plain.get(n) != v and n != "seed"}
    return {
        "of": about["method"]["of"],
        "fields": about["method"]["fields"],
        "recipe": changed,
        "disagreement": {seed: differ(each) for seed, each in members.items() if len(each) > 1},
        "members": {str(seed): run.about["members"] for seed, run in runs.items()},
        "seconds": {str(seed): run.about["seconds"] for seed, run in runs.items()},
    }


def _commits(runs: Sequence[Saved]) -> list[str]:
    return sorted({run.about["commit"] for run in runs})


if __name__ == "__main__":
    sys.exit(main())
