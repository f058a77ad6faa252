"""Components dealt to rows: balanced, contiguous, fair in the long run, alike on one process and on many."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanbayes.distributions.assignment import Assignment, blocks, cuts, pick, pick_between

many = settings(deadline=None, derandomize=True, max_examples=150)
rows_ = st.integers(1, 60)
components_ = st.integers(1, 9)
worlds = st.integers(1, 4)


@many
@given(rows=rows_, components=components_, seed=st.integers(0, 5))
def test_blocks_are_balanced_within_one(rows, components, seed):
    torch.manual_seed(seed)
    sizes = torch.bincount(blocks(rows, components).rows(), minlength=components)
    assert len(sizes) == components
    assert sizes.sum() == rows
    assert sizes.max() - sizes.min() <= 1


@many
@given(rows=rows_, components=components_, seed=st.integers(0, 5))
def test_rows_of_a_component_are_neighbours(rows, components, seed):
    torch.manual_seed(seed)
    index = blocks(rows, components).rows()
    assert len(torch.unique_consecutive(index)) == len(index.unique())


@many
@given(each=st.integers(1, 9), components=components_)
def test_a_batch_that_divides_is_dealt_in_equal_blocks_and_gathered_by_expansion(each, components):
    torch.manual_seed(0)
    dealt = blocks(each * components, components)
    first = dealt.component[0].item()
    expected = (torch.arange(components) + first) % components
    assert torch.equal(dealt.rows(), expected.repeat_interleave(each))
    values = torch.randn(components, 3)
    assert torch.equal(dealt.take(values), values[dealt.rows()])
    assert torch.equal(dealt.repeat(2).rows(), dealt.rows().repeat(2))
    assert torch.equal(dealt.modulo(2).rows(), dealt.rows() % 2)


@pytest.mark.parametrize(("component", "each"), [([2, 0, 1], 2), ([2, 2, 0, 1, 1], 1)])
def test_repeats_of_a_batch_go_to_consecutive_components_on_request(component, each):
    dealt = Assignment(torch.tensor(component), each)
    first = dealt.rows()
    found = dealt.repeat(4, components=3).rows().view(4, -1)
    assert torch.equal(found, torch.stack([first, (first + 1) % 3, (first + 2) % 3, first]))
    assert [part.rows().tolist() for part in dealt.repeat(4, components=3).split(4)] == found.tolist()


@pytest.mark.parametrize(("rows", "components"), [(1, 4), (3, 5), (5, 4), (7, 3)])
def test_no_component_is_favoured_in_the_long_run(rows, components):
    torch.manual_seed(0)
    batches = 2000
    counts = torch.bincount(torch.cat([blocks(rows, components).rows() for _ in range(batches)]), minlength=components)
    # A batch gives a component its smaller or its larger share, by a fair turn of the wheel.
    extra = rows % components / components
    error = math.sqrt(batches * extra * (1 - extra))
    assert (counts > 0).all()
    assert ((counts - batches * rows / components).abs() < 4 * error).all()


@many
@given(rows=st.integers(1, 30), components=components_, world=worlds, seed=st.integers(0, 5))
def test_processes_together_deal_as_one_process_deals_the_interleaved_batch(rows, components, world, seed):
    torch.manual_seed(seed)
    whole = blocks(rows * world, components).rows()
    parts = []
    for rank in range(world):
        torch.manual_seed(seed)
        parts.append(blocks(rows, components, rank=rank, world=world).rows())
    assert all(len(part) == rows for part in parts)
    assert torch.equal(torch.stack(parts, 1).flatten(), whole)


@many
@given(rows=st.integers(1, 30), components=components_, world=worlds)
def test_every_process_with_enough_rows_sees_every_component(rows, components, world):
    torch.manual_seed(0)
    rows = max(rows, components)
    for rank in range(world):
        assert len(blocks(rows, components, rank=rank, world=world).rows().unique()) == components


def test_a_number_at_a_cut_belongs_to_the_next_component_however_shares_are_given():
    shares = (0.25, 0.25, 0.5)
    uniform = torch.tensor([0.0, 0.25, 0.4, 0.5, 0.9])
    for index in (
        pick(uniform, shares),
        pick(uniform, torch.tensor(shares)),
        pick_between(uniform, cuts(torch.tensor(shares))),
    ):
        assert index.tolist() == [0, 1, 1, 2, 2]
