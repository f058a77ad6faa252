"""The counter of operations counts what a GPU launches: no views, no allocations, backward included."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.launches import count, Launches, measure
from benchmarks.problems import PROBLEMS


def test_views_and_allocations_are_not_counted():
    x = torch.randn(4, 6)
    with Launches() as launches:
        x.view(6, 4).t()[1:, None].expand(3, 2, 6)
        torch.empty(3)
        x.split(2, 1)
    assert not launches.counts


def test_backward_is_counted():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)

    def step() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    found = count(step)
    assert found["aten::addmm"] == 1  # forward
    assert found["aten::mm"] == 1  # the weight's gradient
    assert found["aten::sum"] == 2  # the loss, and the bias's gradient


def test_networks_keep_their_depth_when_they_shrink():
    for name in ("wrn-16-4", "bert-base"):
        full, small = PROBLEMS[name], PROBLEMS[name].shrunk()
        with torch.device("meta"):
            assert len(list(full.network("meta").modules())) == len(list(small.network("meta").modules()))


def test_the_table_has_ratios_to_the_plain_network():
    table = measure("wrn-16-4", ["rank1"], repeats=1)
    assert table["plain"]["ratio"] == table["plain"]["host_ratio"] == 1
    assert table["rank1"]["operations"] > table["plain"]["operations"] > 100
