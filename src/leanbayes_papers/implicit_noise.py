"""Implicit nodes and MC dropout on images that turn into noise (Trinh, Kaski, Heinonen, 2020, Figure 8)."""

from __future__ import annotations

from leanbayes_papers import noise
from leanbayes_papers.implicit_cifar import job, MEASURES, network, numbers_of, PAPER
from leanbayes_papers.study import Study
from leanbayes_papers.suite import Row, Setting, Suite, Table

NET = "WRN-28-10"
NAMES = ("SGD", "MC-dropout", "iBNN-16")


def implicit_noise(setting: Setting) -> Suite:
    """Predictive entropy of implicit nodes and MC dropout as images turn into noise (Figure 8)."""
    jobs = {data: {name: job(setting, name, data, NET) for name in NAMES} for data in ("cifar10", "cifar100")}
    return Suite(
        paper=PAPER,
        tables=tuple(
            Table(
                title=f"Implicit-nodes paper, Tables 3-5: {data}, {network(setting, NET)} (paper: {NET})",
                measures=MEASURES,
                rows=tuple(Row(name=name, job=made, paper=numbers_of(name, data, NET)) for name, made in named.items()),
                claim="these are the networks behind the figure.",
            )
            for data, named in jobs.items()
        ),
        studies=tuple(
            Study(
                name=f"noise-{data}",
                title=f"Implicit-nodes paper, Figure 8: predictive entropy under noise, {data}",
                claim="both implicit nodes and MC dropout raise the predictive entropy with the noise; implicit nodes "
                "put more of it into the epistemic part, MC dropout into the aleatoric part.",
                jobs=tuple(named.values()),
                measure=noise.noise_curves,
                draw=noise.draw_noise,
                say=noise.say_noise,
            )
            for data, named in jobs.items()
        ),
    )
