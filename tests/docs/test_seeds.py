"""A table of one seed says so in its head, not only in the text above it."""

from __future__ import annotations

import pytest

from tests.docs.pages import tables_of

# Tables that have no seed, or whose seeds are named elsewhere, each with its reason.
OTHER = {
    "docs/results/nested.md": {
        ("two seeds", "0.125", "0.25", "0.5", "0.75", "1"): "says two seeds",
        ("repeats", "", "training step, plain = 1 (paper: hours)"): "times of repeats, not of seeds",
    },
    "docs/results/annotators.md": {
        ("images", "two annotators of an image"): "annotators, no network",
    },
    "docs/results/tables.md": {
        (head,): "three splits, one seed a split, as the page says above"
        for head in ("RMSE", "log predictive density", "coverage", "seconds", "set")
    },
    "docs/results/cifar10.md": {
        ("Method", "Accuracy %"): "rendered by `leanbayes report`, which lists the seeds below",
    },
}


PAGES = ("recipes", "results/nested", "results/variance", "results/annotators", "results/cifar10", "results/tables")


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_one_seed_say_so(page):
    path = f"docs/{page}.md"
    others = OTHER.get(path, {})
    silent = [
        head
        for head in tables_of(path)
        if not any("seed" in cell.lower() for cell in head)
        and not any(tuple(head[: len(known)]) == known for known in others)
    ]
    assert len(tables_of(path)) >= 3
    assert silent == []
