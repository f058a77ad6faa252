"""Models that tie weights by name, as those of transformers do, find them in a converted model and in its draws."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.core.plain import strip
from tests.needs import need_transformers

pytestmark = pytest.mark.filterwarnings("ignore:Rank1 covers .* of the weights")  # the embeddings of small networks


def gpt2():
    transformers = need_transformers()
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def bert():
    transformers = need_transformers()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=20)).eval()


MAKERS = pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
METHODS = pytest.mark.parametrize(
    "method", [lb.Rank1(components=2), lb.MeanField(), lb.MCDropout(rate=0.1)], ids=lambda m: m.name
)


def weights(model):
    """Return the two weights that are one: of the words, and of the output."""
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def break_tie(model):
    """Give the output a weight of its own, as loading a checkpoint may."""
    layer = model.get_output_embeddings()
    getattr(layer, "base", layer).weight = nn.Parameter(layer.weight.detach().clone() + 1)


@MAKERS
@METHODS
@pytest.mark.parametrize("recompute", [True, False])
def test_weights_are_tied_again(make, method, recompute):
    bnn = lb.convert(make(), method)
    x = torch.arange(10).view(2, 5)
    before = lb.predict(bnn, x, lb.Categorical(axis=-1), samples=2).mean
    break_tie(bnn)
    assert weights(bnn)[0] is not weights(bnn)[1]
    bnn.tie_weights(recompute_mapping=recompute)
    assert weights(bnn)[0] is weights(bnn)[1]
    assert torch.equal(lb.predict(bnn, x, lb.Categorical(axis=-1), samples=2).mean, before)


@MAKERS
@METHODS
def test_names_are_those_of_the_original_in_plain_networks(make, method):
    net = make()
    class_keys, own_keys = type(net)._tied_weights_keys, dict(net.all_tied_weights_keys)
    bnn = lb.convert(net, method)
    for plain in (net, lb.draw(bnn), lb.mean(bnn), strip(bnn)):
        assert plain._tied_weights_keys == class_keys == type(net)._tied_weights_keys
        assert plain.all_tied_weights_keys == own_keys
        assert all(name in dict(plain.named_parameters(remove_duplicate=False)) for name in own_keys)
    again = (
        lb.convert(bnn, lb.ModelPatch(), where="*LayerNorm" if make is bert else "*ln_1")
        if method.name == "rank1"
        else bnn
    )
    assert all(name in dict(again.named_parameters(remove_duplicate=False)) for name in again.all_tied_weights_keys)


@MAKERS
def test_a_converted_model_is_saved_by_its_own_library(make, tmp_path):
    from safetensors.torch import load_file

    bnn = lb.convert(make(), lb.Rank1(components=2))
    bnn.save_pretrained(tmp_path)
    other = lb.convert(make(), lb.Rank1(components=2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    missing = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False).missing_keys
    assert set(missing) <= set(bnn.all_tied_weights_keys)
    assert all(torch.equal(a, b) for a, b in zip(bnn.parameters(), other.parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x))


def test_a_weight_is_put_where_it_is_read():
    bnn = lb.convert(Tied(), lb.Rank1(components=2))
    other = copy.deepcopy(bnn)
    break_tie_of = nn.Parameter(torch.zeros(6, 4))
    bnn.head.weight = break_tie_of
    assert bnn.head.base.weight is break_tie_of
    assert "weight" not in bnn.head._parameters
    bnn.head.weight = bnn.words.weight
    assert bnn.head.weight is bnn.words.weight
    assert list(bnn.state_dict()) == list(other.state_dict())
    with pytest.raises(ValueError, match=r"weight of layer 'head' to keep its shape \(6, 4\).*got \(7, 4\); resize"):
        bnn.head.weight = nn.Parameter(torch.zeros(7, 4))
