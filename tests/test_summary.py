"""The counts of `summary`, and the warnings of `convert` on parts that it leaves out."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.compare.job import DataSpec, Job
from leanbayes.methods import all_methods
from tests.networks import Tokens


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(8, 2), nn.Parameter(torch.randn(2, 64, 8))

    def forward(self, x):
        return torch.einsum("be,eod,bd->bo", self.gate(x).softmax(-1), self.w, x)


def said_while(action):
    """Return what an action returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, [str(warning.message) for warning in caught]


def test_the_headline_leads_with_the_share_of_weights_and_convert_names_the_largest_parts():
    net = nn.Sequential(Experts(), nn.Linear(64, 3))
    bnn, said = said_while(lambda: lb.convert(net, lb.Rank1()))
    covered = (8 * 2 + 2) + (64 * 3 + 3)
    share = covered / (covered + 2 * 64 * 8)
    summary = lb.summary(bnn)
    assert summary.covered == pytest.approx(share)
    assert summary.headline.startswith(
        f"rank1: {math.floor(1000 * share) / 10} % of the weights, 2 of 2 layers with a linear map, "
    )
    assert str(summary).splitlines()[0] == summary.headline
    (part,) = summary.left_out
    assert (part.path, part.kind, part.size, part.reason) == ("0", "Experts", 1024, "parameters of its own")
    assert said == [
        "Rank1 covers 17.2 % of the weights; the largest parts left out are '0' (Experts, 1,024 weights: parameters of "
        "its own)."
    ]


def test_layers_that_the_user_leaves_out_need_no_warning():
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    bnn, said = said_while(lambda: lb.convert(net, lb.Rank1(), where="2"))
    assert not said
    assert "left out: '0' (Linear, 576 weights: not chosen)" in str(lb.summary(bnn))


def test_a_weight_that_is_tied_to_a_converted_layer_is_covered_once():
    net = nn.ModuleDict({"embed": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
    net["head"].weight = net["embed"].weight
    summary = lb.summary(lb.convert(net, lb.Rank1()))
    assert (summary.covered, summary.parameters, summary.left_out) == (1.0, 400, ())


def test_modelpatch_without_norms_says_that_only_the_output_is_patched():
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    bnn, said = said_while(lambda: lb.convert(plain, lb.ModelPatch()))
    assert said == ["ModelPatch found no norms in this network: only '2' is patched; name more with patch= or where=."]
    assert lb.summary(bnn).headline.startswith("patch: 1 of 1 norms and chosen layers, ")
    normed = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    assert not said_while(lambda: lb.convert(normed, lb.ModelPatch()))[1]
    assert not said_while(lambda: lb.convert(nn.Linear(8, 3), lb.ModelPatch()))[1]


def test_the_members_of_an_ensemble_are_called_members():
    headline = lb.summary(lb.convert(nn.Linear(2, 2), lb.DeepEnsemble(components=3))).headline
    assert headline.startswith("deep_ensemble: 100.0 % of the weights, 3 of 3 members, 200.00 % extra")


# Embeddings


@pytest.mark.parametrize("method", [lb.Rank1(embeddings=True), lb.ImplicitNodes(embeddings=True)], ids=lambda m: m.name)
def test_embeddings_have_a_factor_for_each_feature(method, tmp_path):
    torch.manual_seed(0)
    net, words = Tokens(), torch.randint(11, (6, 5))
    bnn = lb.convert(net, method)
    assert lb.summary(bnn).covered == 1.0
    assert bnn.embed.nodes == 6
    rows = bnn.embed(words[:1].expand(6, -1))  # equal words: what differs is noise of the row
    ratio = rows / net.embed(words[0])
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4, atol=1e-4)  # one factor for all words
    assert ratio[:, 0].std(0).min() > 1e-3
    with lb.draws(bnn, seed=2):
        torch.testing.assert_close(lb.draw(bnn, seed=2)(words).logits, bnn(words).logits)
    torch.testing.assert_close(lb.mean(bnn)(words).logits, net(words).logits, rtol=1e-4, atol=1e-5)
    (bnn(words).logits.square().sum() + lb.kl(bnn)).backward()
    assert all(p.grad is not None for p in bnn.parameters())
    lb.save(bnn, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", net)
    torch.testing.assert_close(lb.draw(again, seed=2)(words).logits, lb.draw(bnn, seed=2)(words).logits)


def test_the_divergence_of_an_embedding_is_that_of_its_output_factors():
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), lb.Rank1(embeddings=True))
    torch.testing.assert_close(lb.kl(bnn), bnn[0].kl() + bnn[1].kl())
    assert [name for name, _ in bnn[0].posterior.named_children()] == ["output"]


def test_embeddings_stay_plain_by_default_and_options_that_cannot_go_with_them_are_refused():
    assert type(lb.convert(Tokens(), lb.Rank1()).embed) is nn.Embedding
    for options in ({"factors": "input"}, {"perturbation": "additive"}):
        with pytest.raises(ValueError, match="an embedding has factors on its features"):
            lb.Rank1(embeddings=True, **options)


def test_a_younger_field_at_its_default_changes_no_identity_of_a_run():
    for name in ("rank1", "implicit"):
        kind = all_methods()[name]
        assert "embeddings" not in kind().fields()
        assert kind(embeddings=True).fields()["embeddings"] is True
        assert kind(**kind(embeddings=True).fields()) == kind(embeddings=True)
        assert dataclasses.replace(kind(), embeddings=True).targets != kind.targets
    methods = (lb.Rank1(), lb.Rank1(embeddings=True))
    jobs = [Job(source=DataSpec(name="digits"), net="small", method=m, recipe=lb.Recipe()) for m in methods]
    assert "embeddings" not in jobs[0].settings()["method"]["fields"]
    assert jobs[0].id != jobs[1].id
