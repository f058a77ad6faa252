"""What matters in rank-1 factors (Dusenberry et al., 2020, Figures 2 to 5), on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from leanbayes.compare.job import Job
from leanbayes_papers import checkpoints
from leanbayes_papers.rank1_cifar import batch_ensemble_job, COMPONENTS, factor_job, PAPER, rank1
from leanbayes_papers.study import Study
from leanbayes_papers.suite import Row, Setting, Suite, Table

MEASURES = ("nll", "accuracy", "ece", "c_nll", "c_accuracy", "c_ece", "disagreement")
SIZES = (1, 2, 4, 8, 16)
SIDES = ("input", "output")


def rank1_ablations(setting: Setting) -> Suite:
    """Rank-1 factors on inputs, outputs, both; K from 1 to 16; average or mixture loss; diversity (Figures 2-5)."""
    jobs = {job.label: job for job in _jobs(setting)}
    looked_at = frozenset({"rank1-both", "rank1-mixture", "batch_ensemble"})
    return Suite(paper=PAPER, tables=_tables(jobs), studies=_studies(jobs), watched=looked_at)


def _jobs(setting: Setting) -> list[Job]:
    """Return all versions; the one of four components on both sides takes part in every comparison."""
    both = factor_job(setting, "rank1-both", rank1(setting, components=COMPONENTS))
    return [
        *(factor_job(setting, f"rank1-{side}s", rank1(setting, components=COMPONENTS, factors=side)) for side in SIDES),
        both,
        *(factor_job(setting, f"rank1-k{k}", rank1(setting, components=k)) for k in SIZES if k != COMPONENTS),
        replace(both, label="rank1-mixture", recipe=replace(both.recipe, aggregate="mixture")),
        batch_ensemble_job(setting),
    ]


def _tables(jobs: Mapping[str, Job]) -> tuple[Table, ...]:
    sizes = {f"K = {k}": "rank1-both" if k == COMPONENTS else f"rank1-k{k}" for k in SIZES}
    return (
        _table(
            "Figure 2: which factors are random",
            {"s (inputs)": "rank1-inputs", "r (outputs)": "rank1-outputs", "both": "rank1-both"},
            "accuracy is comparable and test NLL and ECE differ slightly; under corruption both factors outperform "
            "either one on all three measures",
            jobs,
        ),
        _table(
            "Figure 3: number of components",
            sizes,
            "all measures improve as K grows from 1 to 8, and decline at 16, where a batch has few unique rows",
            jobs,
        ),
        _table(
            "Figure 4: average or mixture of the components' likelihoods",
            {"average": "rank1-both", "log-mixture": "rank1-mixture"},
            "training metrics are comparable, and the average does better on the test set",
            jobs,
        ),
    )


def _table(title: str, labels: Mapping[str, str], claim: str, jobs: Mapping[str, Job]) -> Table:
    return Table(
        title=f"Rank-1 paper, {title}",
        measures=MEASURES,
        rows=tuple(Row(name=name, job=jobs[label], paper={}) for name, label in labels.items()),
        claim=f"{claim} (a figure without printed numbers).",
    )


def _studies(jobs: Mapping[str, Job]) -> tuple[Study, ...]:
    return (
        Study(
            name="components",
            title="Rank-1 paper, Figure 4: NLL over epochs, of the average and of each component",
            claim="the log-mixture likelihood generalises worse than the average, and so do its components.",
            jobs=(jobs["rank1-both"], jobs["rank1-mixture"]),
            measure=checkpoints.curves,
            draw=checkpoints.draw_components,
            say=checkpoints.say_components,
        ),
        Study(
            name="disagreement",
            title="Rank-1 paper, Figure 5: disagreement over consecutive checkpoints",
            claim="accuracy and diversity are negatively correlated; at the same or better accuracy and likelihood "
            "rank-1 components disagree more than the members of BatchEnsemble.",
            jobs=(jobs["rank1-both"], jobs["batch_ensemble"]),
            measure=checkpoints.curves,
            draw=checkpoints.draw_disagreement,
            say=checkpoints.say_disagreement,
        ),
    )
