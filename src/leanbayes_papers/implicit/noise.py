"""Figure 8 of the implicit-nodes paper: predictive entropy as images turn into noise.

Gaussian (its eq. 28): (1 - g) x + g e with e standard normal, of standardised network inputs. Salt and pepper: each
number of an image is 0 or 1 with probability p (half each), before it is standardised.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.data import DataSet
from leanbayes_papers.harness import plot_curves, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.implicit import PAPER
from leanbayes_papers.implicit.cifar import table

NET = "WRN-28-10"
NAMES = ("SGD", "MC-dropout", "iBNN-16")
STRENGTHS = {"quick": 5, "short": 11, "full": 11}
IMAGES = {"quick": 100, "short": 2000, "full": 10_000}
PARTS = ("total", "aleatoric", "epistemic")
ENDS = Table.of("implicit", "noise", derive=lambda rows: [row for row in rows if row["strength"] in (0.0, 1.0)])


def implicit_noise(run: Run) -> Suite:
    """Predictive entropy of implicit nodes and MC dropout as images turn into noise (Figure 8)."""
    tables = {data: table(run, "networks", data, NET, NAMES) for data in ("cifar10", "cifar100")}
    plot = partial(plot_curves, x="strength", by=("noise", "method"), columns=ENDS.columns)
    figures = []
    for data, known in tables.items():
        fields = {"measure": partial(measure, specs=known.specs), "specs": known.specs, "name": f"noise-{data}"}
        figures.append(Study.of("implicit", "noise", {"set": data}, tables=(ENDS,), plot=plot, **fields))
    return Suite(paper=PAPER, studies=(*tables.values(), *figures))


def gaussian(data: DataSet, x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Mix raw images with standard normal noise; return network inputs."""
    clean = data.inputs(x)
    return (1 - strength) * clean + strength * torch.randn(clean.shape, generator=generator, device=generator.device)


def salt_and_pepper(data: DataSet, x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Set each number of raw images to 0 or to its largest value with probability `strength`; return network inputs."""
    hit = torch.rand(x.shape, generator=generator, device=generator.device) < strength
    white = torch.rand(x.shape, generator=generator, device=generator.device) < 0.5
    salt = white.to(x.dtype) * (255 if x.dtype == torch.uint8 else 1)
    return data.inputs(torch.where(hit, salt, x))


KINDS = {"gaussian": gaussian, "salt and pepper": salt_and_pepper}


def measure(run: Run, *, specs: tuple[TrainingSpec, ...]) -> list[Record]:
    """Return mean entropies by noise, network, seed and strength."""
    records = []
    for spec in specs:
        assert spec.evaluation is not None
        for seed in run.seeds:
            model, experiment, _ = run.train(spec, seed)
            x = experiment.test[0][: IMAGES[run.budget]]
            for kind in KINDS:
                rows = entropies(model, experiment.data, x, kind, STRENGTHS[run.budget], spec.evaluation.samples)
                records += [{"noise": kind, "method": spec.name, "seed": seed} | row for row in rows]
    return records


def entropies(model: nn.Module, data: DataSet, x: Tensor, kind: str, count: int, samples: int) -> list[Record]:
    """Return the mean entropies of a model at `count` strengths of noise, from none to nothing else."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(count):
        strength = step / (count - 1)
        noisy = KINDS[kind](data, x, strength, generator)
        p = lb.predict(model, noisy, samples=samples, keep_samples=False).to("cpu")
        rows.append({"strength": strength} | {part: float(getattr(p, part).double().mean()) for part in PARTS})
    return rows
