"""The tables and figures of the papers, by name: `leanbayes reproduce NAME` runs one and prints ours next to theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanbayes_papers.harness.suite import run_named, SuiteOf
from leanbayes_papers.implicit.cifar import implicit_cifar
from leanbayes_papers.implicit.complexity import implicit_complexity
from leanbayes_papers.implicit.noise import implicit_noise
from leanbayes_papers.implicit.pretrained import implicit_pretrained
from leanbayes_papers.nested.annotators import nested_annotators
from leanbayes_papers.nested.generation import nested_generation
from leanbayes_papers.nested.student import nested_student
from leanbayes_papers.nested.tables import nested_limited
from leanbayes_papers.nested.vgg11 import nested_vgg11
from leanbayes_papers.nested.widths import nested_widths
from leanbayes_papers.patch.overhead import patch_overhead
from leanbayes_papers.patch.samples import patch_samples
from leanbayes_papers.patch.uci import patch_uci
from leanbayes_papers.rank1.ablations import rank1_ablations
from leanbayes_papers.rank1.cifar import rank1_cifar
from leanbayes_papers.rank1.ehr import rank1_ehr
from leanbayes_papers.text.reviews import text_reviews
from leanbayes_papers.variance.adversarial import variance_adversarial
from leanbayes_papers.variance.criterion import variance_criterion
from leanbayes_papers.variance.tables import variance_parameterizations, variance_table1

_SUITES: tuple[SuiteOf, ...] = (
    *(rank1_cifar, rank1_ablations, rank1_ehr),
    *(implicit_cifar, implicit_complexity, implicit_noise, implicit_pretrained),
    *(patch_uci, patch_overhead, patch_samples),
    *(variance_table1, variance_parameterizations, variance_criterion, variance_adversarial),
    *(nested_widths, nested_vgg11, nested_limited, nested_student, nested_annotators, nested_generation),
    text_reviews,
)
# Suites by name, such as "rank1-cifar": functions of a `Run`; their docstrings begin with what they repeat.
SUITES: dict[str, SuiteOf] = {suite.__name__.replace("_", "-"): suite for suite in _SUITES}


def run_suite(options: Any, out: Path) -> int:
    """Run the suite that the flags of `leanbayes reproduce` name; return 0 if every run and study is done."""
    return run_named(SUITES, options, out)
