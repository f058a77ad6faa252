"""VND-AE: what it has in common with the VAE, its prior, and images of growing detail."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from leanbayes.distributions.ordered import log_tails_of
from leanbayes.generative import codes, VAE, VNDAutoencoder

from .problems import Encoder, images, small


class Identity(nn.Unflatten):
    """A decoder whose images are the codes."""

    def __init__(self) -> None:
        super().__init__(1, (1, 2, 4))


def transparent() -> VNDAutoencoder:
    """Return a model whose images are its codes."""
    return VNDAutoencoder(
        (1, 8, 8), dimensions=8, encoder=Encoder(), decoder=Identity(), pixels="gaussian", prior_keep=0.7
    )


def twins(keep_logit: float) -> tuple[VNDAutoencoder, VAE]:
    """Return a VND-AE whose chains, prior and posterior, have these logits, and the VAE of its other weights."""
    ordered, plain = small(VNDAutoencoder, pixels="gaussian"), small(VAE, pixels="gaussian")
    shared = {name: tensor for name, tensor in ordered.state_dict().items() if not name.startswith("keep_logits")}
    plain.load_state_dict(shared)
    with torch.no_grad():
        ordered.keep_logits.bias.fill_(keep_logit)
        ordered.prior_log_tails.copy_(log_tails_of(torch.full((5,), keep_logit)))
    return ordered, plain


@pytest.mark.parametrize("keep_logit", [100.0, math.inf])
def test_a_chain_that_keeps_everything_makes_it_a_vae(monkeypatch, keep_logit):
    """With 0 log 0 = 0; the same weights and the same noise give the same bound, and the same gradients."""
    monkeypatch.setattr(codes, "LIMIT", math.inf)
    ordered, plain = twins(keep_logit)
    x = images()
    found = []
    for model in (ordered, plain):
        torch.manual_seed(4)
        found.append(model.bound(x))
        found[-1].loss.mean().backward()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    own = dict(ordered.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert (ordered.encode(x).length == 6).all()
    assert torch.equal(ordered.sample(4, length=6, seed=0), plain.sample(4, seed=0))
    assert torch.equal(ordered.sample(4, seed=0), plain.sample(4, seed=0))


def test_the_same_noise_trains_both_alike_where_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(codes, "LIMIT", math.inf)
    ordered, plain = twins(math.inf)
    ordered.keep_logits.requires_grad_(False)
    x = images()
    for model in (ordered, plain):
        torch.manual_seed(4)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    torch.testing.assert_close(ordered.reconstruct(x), plain.reconstruct(x), rtol=1e-3, atol=1e-4)


def test_it_begins_with_the_lengths_of_the_prior():
    model = small(VNDAutoencoder, prior_keep=0.9)
    tails = model.encode(images()).log_tails
    torch.testing.assert_close(tails, model.prior_log_tails.expand_as(tails))
    expected = [0.9**j * (0.1 if j < 5 else 1) for j in range(6)]
    torch.testing.assert_close(model.prior_log_tails.exp(), torch.tensor(expected))


def test_a_prior_that_nearly_always_goes_on_is_finite():
    model = small(VNDAutoencoder, prior_keep=1 - 1e-9)
    assert model.bound(images()).loss.isfinite().all()


@pytest.mark.parametrize("hard", [True, False])
def test_keep_logits_learn_from_the_likelihood(hard):
    model = small(VNDAutoencoder, beta=0.0, hard=hard, prior_keep=0.6)
    model(images()).mean().backward()
    gradient = model.keep_logits.bias.grad
    assert gradient.isfinite().all()
    assert (gradient.abs() > 0).all()


def test_the_prior_draws_lengths_of_its_tails_apart_from_the_numbers():
    count = 40_000
    model = transparent()
    code = model.prior_codes(count, seed=0).double()
    used = code != 0
    assert (used[:, 1:] <= used[:, :-1]).all()  # once ended, ended
    length = used.sum(1)
    tails = model.prior_log_tails.exp()
    found = torch.bincount(length - 1, minlength=8) / count
    assert ((found - tails).abs() < 4 * (tails * (1 - tails) / count).sqrt()).all()
    numbers = model.prior_codes(count, 8, seed=0).double()  # of the same seed, before anything ended
    torch.testing.assert_close(code, numbers * used)
    for each in (numbers, numbers.square(), numbers.abs()):
        together = torch.corrcoef(torch.cat([each, length[:, None].double()], 1).T)[-1, :-1]
        assert (together.abs() < 4 / math.sqrt(count)).all()


def test_progressive_images_are_one_code_at_growing_lengths():
    model = transparent()
    found = model.progressive(3, [1, 4, 8], seed=2)
    assert found.shape == (3, 3, 1, 2, 4)
    flat = found.flatten(2)
    assert torch.equal(flat[2], model.prior_codes(3, 8, seed=2))
    assert torch.equal(flat[1], flat[2] * (torch.arange(8) < 4))
    assert torch.equal(flat[0], flat[2] * (torch.arange(8) < 1))
    assert small(VNDAutoencoder).progressive(3, [2, 6]).shape == (2, 3, 1, 8, 8)


def test_a_tree_goes_on_from_the_level_above():
    model = transparent()
    levels = [level.flatten(1) for level in model.tree(4, spread=0.5, seed=1)]
    assert [len(level) for level in levels] == [1, 2, 4, 8]
    for i in range(1, 4):
        above, below = levels[i - 1], levels[i].unflatten(0, (-1, 2))
        change = torch.zeros(8)
        change[i] = 0.5
        torch.testing.assert_close(below[:, 0], above - change)
        torch.testing.assert_close(below[:, 1], above + change)
    assert (levels[0][:, 1:] == 0).all()


def test_a_tree_without_spread_repeats_its_root():
    model = small(VNDAutoencoder)
    before = copy.deepcopy(model.state_dict())
    levels = model.tree(6, spread=0.0, seed=1)
    assert [tuple(level.shape) for level in levels] == [(2**i, 1, 8, 8) for i in range(6)]
    for above, below in pairwise(levels):
        torch.testing.assert_close(below[0::2], above)
        torch.testing.assert_close(below[1::2], above)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(model.tree(2, seed=1)[0], model.tree(2, seed=2)[0])


@pytest.mark.parametrize("depth", [0, 7])
def test_a_tree_deeper_than_the_code_is_refused(depth):
    with pytest.raises(ValueError, match=f"expected a code length from 1 to 6, got {depth}"):
        small(VNDAutoencoder).tree(depth)
