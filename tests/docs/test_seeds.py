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
    "docs/results/cifar10.md": {
        ("Method", "Accuracy %"): "rendered by `leanbayes report`, which lists the seeds below",
    },
}


@pytest.mark.parametrize("page", ["nested", "variance", "annotators", "cifar10"])
def test_tables_of_one_seed_say_so(page):
    path = f"docs/results/{page}.md"
    others = OTHER.get(path, {})
    silent = [
        head
        for head in tables_of(path)
        if not any("seed" in cell.lower() for cell in head)
        and not any(tuple(head[: len(known)]) == known for known in others)
    ]
    assert len(tables_of(path)) >= 3
    assert silent == []
