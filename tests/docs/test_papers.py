"""All five papers are cited: in the README, as BibTeX, and in CITATION.cff."""

from __future__ import annotations

import re

import pytest

import leanbayes
from tests.docs.pages import ROOT, text_of

TITLES = {
    "Rank1": "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors",
    "BatchEnsemble": "BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong Learning",
    "ImplicitNodes": "Scalable Bayesian neural networks by layer-wise input augmentation",
    "ModelPatch": "Ensemble Model Patching: A Parameter-Efficient Variational Bayesian Neural Network",
    "VarianceLayers": "Variance Networks: When Expectation Does Not Meet Your Expectations",
    "NestedDropout": "Variational Nested Dropout",
}


@pytest.mark.parametrize(("method", "title"), TITLES.items())
def test_every_paper_is_cited_with_its_method(method, title):
    assert f"*{title}*: `{method}`" in text_of("README.md")
    assert f"title = {{{title}}}" in text_of("docs/papers.md")
    assert f"| `{method}` |" in text_of("docs/papers.md")
    assert f'title: "{title}"' in text_of("CITATION.cff")


def test_references_of_the_citation_file_are_those_of_the_bibtex():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    references = {
        each["title"]: (each["year"], " and ".join(f"{a['family-names']}, {a['given-names']}" for a in each["authors"]))
        for each in found["references"]
    }
    entries = re.findall(r"title += \{(.+?)\},\n +author += \{(.+?)\},.*?year += \{(\d+)\}", _bibtex(), re.DOTALL)
    assert references == {title: (int(year), authors) for title, authors, year in entries}
    assert set(references) == set(TITLES.values())
    assert found["version"] == leanbayes.__version__


def test_data_are_prepared_before_the_first_example_that_needs_them():
    text = (ROOT / "README.md").read_text()
    assert text.index("leanbayes data prepare fashion-mnist") < text.index("leanbayes compare --data fashion-mnist")


def test_the_readme_opens_with_the_commands_that_show_it():
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:12])
    assert "make demo" in first
    assert "make test" in first


def _bibtex() -> str:
    return (ROOT / "docs" / "papers.md").read_text()
