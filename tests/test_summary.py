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


def test_the_price_of_an_mlp_counted_by_hand():
    """4-50-50-3: 200 + 2500 + 150 multiply-adds; the first layers run once if only the last is stochastic."""
    net, x = (
        nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3)),
        torch.ones(2, 4),
    )
    whole, last = lb.convert(net, lb.Rank1()), lb.convert(net, lb.Rank1(), where=lb.layers.head())
    assert lb.summary(whole, example=x).price == (16, 2850, 16 * 2850)
    assert lb.summary(last, example=x).price == (16, 2850, 2700 + 16 * 150)
    assert lb.summary(last, example=x, samples=5).price == (5, 2850, 2700 + 5 * 150)
    assert "16 draws cost 1.79 plain passes: 5,100 multiply-adds a row, 2,850 in a plain pass" in str(
        lb.summary(last, example=x)
    )
    assert lb.summary(last).price is None
    assert str(lb.summary(net, example=x).price).startswith("1 draw costs 1 plain pass:")


def test_the_price_of_a_cnn_counted_by_hand():
    """Kernels of 3 x 3 on 8 x 8 and 4 x 4 positions, then a linear layer."""
    stem, second, head = 8 * 8 * 9 * 3 * 4, 4 * 4 * 9 * (4 // 2) * 6, 6 * 4 * 4 * 5
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)),
    )
    model, x = lb.convert(net, lb.ImplicitNodes(), where="last_stage"), torch.ones(1, 3, 8, 8)
    assert [path for path, _ in lb.stochastic_layers(model)] == ["3", "6"]
    assert lb.summary(model, example=x).price == (16, stem + second + head, stem + 16 * (second + head))


@pytest.mark.parametrize(
    ("method", "draws", "calls"),
    [(lb.BatchEnsemble(components=3), 3, 3), (lb.DeepEnsemble(components=4), 4, 4), (lb.MeanField(), 16, 16)],
    ids=["members", "copies", "noise of weights"],
)
def test_the_price_counts_passes_that_run(method, draws, calls):
    model = lb.convert(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), method)
    assert lb.summary(model, example=torch.ones(3, 6)).price == (draws, 40, 40 * calls)


def test_the_price_of_sequences_and_attention_is_counted():
    """LSTM: 4 gates of 3 inputs and 2 states, 5 steps. Attention: four maps of 4 x 4, and 2 x 5 x 5 x 4."""
    lstm, attention = nn.LSTM(3, 2, batch_first=True), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert lb.summary(lstm, example=torch.ones(1, 5, 3)).price.plain == 5 * 4 * 2 * (3 + 2)
    found = lb.summary(attention, example=torch.ones(1, 5, 4)).price.plain
    assert found == 5 * 4 * (4 * 4) + 2 * 5 * 5 * 4 + 5 * 2 * (4 * 8)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_price_of_a_result_is_that_of_the_summary():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = lb.convert(net, lb.Rank1(), where="head")
    data = (torch.randn(12, 4), torch.zeros(12, dtype=torch.long))
    cost = lb.evaluate(model, data, plain=net, samples=8).cost
    assert (cost.answer_madds, cost.answer_madds_ratio) == (32 + 8 * 24, (32 + 8 * 24) / 56)
