"""Several processes equal one on the same global batches: two for every method, four for kinds of noise; one KL."""

from __future__ import annotations

import pytest
import torch

import leanbayes as lb
from leanbayes.methods import all_methods

from .problem import batches, Checkpointed, gradients, network, shared, train, trained
from .together import one_worker, together

pytestmark = one_worker

FOUR = ("rank1", "mean_field", "mc_dropout")
"""Methods that four processes train: noise per row, per activation, and masks."""
TRAINED = tuple(name for name, kind in all_methods().items() if not kind.post_hoc)
METHODS = {2: TRAINED, 4: FOUR}
DRAWS = 30
KINDS = {"kept": {}, "not reentrant": {"reentrant": False}, "reentrant": {"reentrant": True}}

methods = pytest.mark.parametrize("name", TRAINED)
pairs = pytest.mark.parametrize(("world", "name"), [(world, name) for world in METHODS for name in METHODS[world]])


def work(rank, world):
    """Do the work of a process for all tests at once: starting it takes longer than most of them."""
    found = {f"{name}/1": trained(name, rank, world, noise=True) for name in METHODS[world]}
    found["components"] = components(rank, world)
    if world == 2:
        found |= {f"{name}/0": trained(name, rank, world, noise=False) for name in TRAINED}
        found["bfloat16"] = in_bfloat16(rank, world)
        found |= {kind: checkpointed(rank, world, **options) for kind, options in KINDS.items()}
        # Seeds of their own, for once: with equal ones the gradients would be one process's to the last digits.
        found |= {f"{name}/gradients": means(name, rank, world, seed=10 + rank) for name in TRAINED}
    return found


def components(rank, world):
    """Return the component, of three, of each row of this process; they do not divide the global batch."""
    bnn = lb.convert(network(), lb.Rank1(components=3))
    torch.manual_seed(7)
    bnn(batches()[0][0][rank::world])
    return bnn[0].state.component.rows()


def checkpointed(rank, world, reentrant=None):
    """Train with noise, under activation checkpointing or without it."""
    bnn = lb.convert(Checkpointed(reentrant), lb.Rank1())
    # The older, reentrant kind runs a backward of its own, and the KL another one through the same parameters.
    train(shared(bnn, world, static_graph=bool(reentrant)), rank, world)
    return {path: p.detach() for path, p in bnn.named_parameters()}


def in_bfloat16(rank, world):
    """Train with noise under autocast."""
    bnn = lb.convert(network(), lb.Rank1())
    with torch.autocast("cpu", torch.bfloat16):
        train(shared(bnn, world), rank, world)
    return {path: p.detach() for path, p in bnn.named_parameters()}


def compiled(rank, world):
    """Train with noise and compiled, without a compiler of C++."""
    bnn = lb.convert(network(), lb.Rank1())
    train(torch.compile(shared(bnn, world), backend="aot_eager"), rank, world)
    return {path: p.detach() for path, p in bnn.named_parameters()}


def means(name, rank, world, seed):
    each = gradients(name, rank, world, count=DRAWS, seed=seed)
    return {"mean": each.mean(0), "variance": each.var(0) / DRAWS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return {world: together(world, work, tmp_path_factory.mktemp("ranks")) for world in METHODS}


def compare(ours, theirs, **tolerance):
    for key in theirs:
        if key.startswith(("parameter/", "kl_gradient")):
            torch.testing.assert_close(ours[key], theirs[key], **tolerance, msg=lambda m, key=key: f"{key}: {m}")


@methods
def test_with_noise_off_two_processes_equal_one(ranks, name):
    one = trained(name, 0, 1, noise=False)
    for found in ranks[2]:
        compare(found[f"{name}/0"], one, atol=1e-5, rtol=0)


@pairs
def test_with_equal_seeds_rows_have_the_noise_that_one_process_gives_them(ranks, world, name):
    compare(ranks[world][0][f"{name}/1"], trained(name, 0, 1, noise=True), atol=1e-5, rtol=0)


@pairs
def test_processes_differ_in_noise_and_agree_in_parameters_and_named_draws(ranks, world, name):
    first, *others = (found[f"{name}/1"] for found in ranks[world])
    for other in others:
        assert not torch.allclose(first["outputs"], other["outputs"])
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first if key != "outputs")


@methods
def test_gradients_agree_in_the_mean(ranks, name):
    one = means(name, 0, 1, seed=0)
    for found in ranks[2]:
        two = found[f"{name}/gradients"]
        error = (one["variance"] + two["variance"]).sqrt()
        assert ((one["mean"] - two["mean"]).abs() <= 4 * error + 1e-6).all()


@pytest.mark.parametrize("world", METHODS)
def test_components_are_balanced_over_the_global_batch(ranks, world):
    counts = torch.cat([found["components"] for found in ranks[world]]).bincount()
    assert sorted(counts.tolist()) == [5, 5, 6]


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant"])
def test_activation_checkpointing_changes_nothing(ranks, kind):
    for found in ranks[2]:
        for path, tensor in found["kept"].items():
            torch.testing.assert_close(found[kind][path], tensor, atol=1e-6, rtol=0)


def check_equal(one, first, second, tolerance):
    for path, tensor in one.items():
        torch.testing.assert_close(first[path], tensor, atol=tolerance, rtol=0)
        assert torch.equal(first[path], second[path])


def test_in_bfloat16_two_processes_equal_one(ranks):
    check_equal(in_bfloat16(0, 1), *(found["bfloat16"] for found in ranks[2]), tolerance=1e-2)


@pytest.mark.slow  # three compilations
def test_compiled_two_processes_equal_one(tmp_path):
    check_equal(compiled(0, 1), *together(2, compiled, tmp_path), tolerance=1e-5)
