"""Conversion: what peers get wrong, what must be refused, what must be said."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import leanbayes as lb
from leanbayes.core.plain import strip
from leanbayes.methods._base import StochasticLayer

from .networks import AlexNetShaped, Nested, Pair, small_net, Tokens

METHODS = [lb.Rank1(), lb.BatchEnsemble(), lb.ImplicitNodes()]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


@each_method
def test_nested_containers_are_converted_and_the_class_stays(method):
    net = Nested()
    bnn = lb.convert(net, method)
    assert type(bnn) is Nested
    assert bnn.greet() == "nested"
    assert [path for path, _ in lb.stochastic_layers(bnn)] == [
        "stem.0.0", "stem.1", "blocks.0.0", "blocks.1.0", "heads.a",
    ]  # fmt: skip
    assert not any(isinstance(m, StochasticLayer) for m in net.modules())
    assert bnn(torch.randn(5, 6)).shape == (5, 3)


@each_method
def test_a_root_that_is_a_target_becomes_a_stochastic_layer(method):
    net = nn.Linear(4, 3)
    bnn = lb.convert(net, method)
    x = torch.randn(5, 4)
    assert isinstance(bnn, StochasticLayer)
    torch.testing.assert_close(lb.mean(bnn)(x), net(x))
    assert type(lb.draw(bnn)) is nn.Linear
    assert lb.predict(bnn, x, lb.Gaussian()).mean.shape == (5, 3)


@each_method
def test_pretrained_weights_are_kept(method):
    net = small_net()
    bnn = lb.convert(net, method)
    for name, tensor in net.state_dict().items():
        path, _, leaf = name.rpartition(".")
        kept = bnn.state_dict().get(f"{path}.base.{leaf}", bnn.state_dict().get(name))
        assert torch.equal(kept, tensor)


@each_method
def test_mean_of_a_converted_network_is_the_network(method):
    net = small_net().eval()
    x = torch.randn(6, 1, 8, 8)
    torch.testing.assert_close(lb.mean(lb.convert(net, method))(x), net(x), atol=1e-5, rtol=1e-5)


def test_copy_false_converts_in_place():
    net = Nested()
    assert lb.convert(net, lb.Rank1(), copy=False) is net
    assert isinstance(net.stem[1], StochasticLayer)


def test_conversions_chain_and_no_layer_is_wrapped_twice():
    bnn = lb.convert(small_net(), lb.Rank1(components=2), where="0")
    bnn = lb.convert(bnn, lb.ImplicitNodes(components=3))
    found = {path: layer for path, layer in lb.stochastic_layers(bnn)}
    assert {path: layer.method.name for path, layer in found.items()} == {
        "0": "rank1",
        "3": "implicit",
        "7": "implicit",
    }
    assert not any(isinstance(layer.base, StochasticLayer) for layer in found.values())
    assert len({id(layer.state) for layer in found.values()}) == 1
    assert found["0"].state.components == 6
    assert lb.predict(bnn.eval(), torch.randn(3, 1, 8, 8), samples=6).mean.shape == (3, 4)
    with pytest.raises(ValueError, match="3 layers that are stochastic already"):
        lb.convert(bnn, lb.Rank1())


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("heads.*", ["heads.a"]),
        (["stem.0.0", "blocks.*"], ["stem.0.0", "blocks.0.0", "blocks.1.0"]),
        (lambda path, layer: layer.in_features == 6, ["stem.0.0"]),
        (lb.layers.first(nn.Linear, 2), ["stem.0.0", "stem.1"]),
        (lb.layers.last(nn.Linear), ["heads.a"]),
    ],
)
def test_where_chooses_layers(where, expected):
    bnn = lb.convert(Nested(), lb.Rank1(), where=where)
    assert [path for path, _ in lb.stochastic_layers(bnn)] == expected


def test_a_glob_that_matches_nothing_raises():
    with pytest.raises(ValueError, match="where='haeds' matches no layer; there are stem"):
        lb.convert(Nested(), lb.Rank1(), where="haeds")


@pytest.mark.parametrize("count", [0, -1, 1.5])
@pytest.mark.parametrize("select", [lb.layers.first, lb.layers.last])
def test_a_selector_picks_one_layer_or_more(select, count):
    with pytest.raises(ValueError, match=f"expected a number of layers of at least 1, got {count}"):
        select(nn.Linear, count)


def test_nothing_to_convert_raises_and_says_what_there_is():
    with pytest.raises(
        ValueError, match=r"Rank1 found no layer to convert: it handles Linear, .* has 1 Embedding, 1 ReLU"
    ):
        lb.convert(nn.Sequential(nn.Embedding(3, 2), nn.ReLU()), lb.Rank1())


def test_a_class_instead_of_a_method_is_refused():
    with pytest.raises(TypeError, match=r"expected a method such as lb.Rank1\(components=4\)"):
        lb.convert(nn.Linear(2, 2), lb.Rank1)


@pytest.mark.parametrize("likelihood", ["gaussian", lb.Gaussian, nn.CrossEntropyLoss()])
def test_what_is_no_likelihood_is_refused_at_once(likelihood):
    with pytest.raises(TypeError, match=r"expected a likelihood such as lb.Gaussian\(\).*got "):
        lb.convert(small_net(), lb.Rank1(), likelihood=likelihood)


@pytest.mark.parametrize("model", [torch.sin, nn.Linear, None])
def test_what_is_no_network_is_refused_at_once(model):
    with pytest.raises(TypeError, match=r"expected a network, an object of a class of nn.Module, got "):
        lb.convert(model, lb.Rank1())


@pytest.mark.parametrize("where", [0, nn.Linear, nn.ReLU(), [nn.Linear], {"0"}])
def test_what_names_no_layers_is_refused_with_what_does(where):
    with pytest.raises(TypeError, match=r"expected where to be a glob .* a predicate .* got "):
        lb.convert(small_net(), lb.Rank1(), where=where)


@each_method
def test_tokens_times_batch_share_the_noise_of_their_row(method):
    bnn = lb.convert(Tokens(), method)
    tokens = torch.randint(11, (4, 1)).expand(4, 5)
    hidden = bnn(tokens=tokens).hidden
    torch.testing.assert_close(hidden, hidden[:, :1].expand_as(hidden))


def test_rows_that_are_left_out_take_one_draw_and_are_said():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x[1:])

    bnn = lb.convert(Cut(), lb.Rank1())
    with pytest.warns(UserWarning, match="mixed or left out before layer 'inner'"):
        bnn(torch.randn(4, 3))
    assert bnn(torch.ones(4, 3)).std(0).max() < 1e-6


def test_an_unbatched_input_is_refused_per_row_and_works_as_one_function():
    bnn = lb.convert(nn.Sequential(nn.Conv2d(4, 2, 3)), lb.Rank1())
    x = torch.randn(4, 5, 5)
    with pytest.raises(ValueError, match="without a batch axis"):
        bnn(x)
    with lb.draws(bnn, seed=0):
        torch.testing.assert_close(bnn(x), bnn(x[None])[0])


@each_method
def test_dict_and_tuple_inputs_and_records_with_logits(method):
    bnn = lb.convert(Tokens(), method)
    tokens, y = torch.randint(11, (8, 5)), torch.randint(4, (8,))
    inputs = {"tokens": tokens, "scale": 0.5}
    lb.elbo(bnn, inputs, y, num_data=8, tile=True).loss.backward()
    assert lb.predict(bnn, inputs, samples=4).mean.shape == (8, 4)
    pair = lb.convert(Pair(), method)
    ab = (torch.randn(6, 3), torch.randn(6, 2))
    assert lb.predict(pair, ab, samples=3).samples.shape == (3, 6, 4)
    second = lb.predict(pair, ab, lb.Gaussian(), output=lambda out: out[1])
    torch.testing.assert_close(second.mean, ab[1])


def test_batch_of_eight_with_three_components_is_balanced_and_keeps_components_across_layers():
    bnn = lb.convert(Nested(), lb.BatchEnsemble(components=3, init_spread=1.0))
    bnn(torch.randn(8, 6))
    component = bnn.stem[1].state.component.rows()
    assert sorted(component.bincount(minlength=3).tolist()) == [2, 3, 3]
    assert (component.diff() % 3 <= 1).all()


def test_convolution_options_survive_conversion():
    layer = nn.Conv2d(4, 6, (3, 1), stride=(2, 1), padding=(1, 0), dilation=1, groups=2, padding_mode="reflect")
    bnn = lb.convert(nn.Sequential(layer), lb.Rank1())
    x = torch.randn(2, 4, 8, 7)
    torch.testing.assert_close(lb.mean(bnn)(x), layer(x), atol=1e-5, rtol=1e-5)
    assert lb.draw(bnn)[0].padding_mode == "reflect"


def test_conv_transpose_accepts_an_output_size():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 2, 3, stride=2)

        def forward(self, x):
            return self.up(x, [10, 10])

    for method in METHODS:
        bnn = lb.convert(Up(), method)
        assert bnn(torch.randn(4, 3, 4, 4)).shape == (4, 2, 10, 10)


@each_method
def test_parametrised_layers_are_converted_right(method):
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), parametrizations.spectral_norm(nn.Linear(4, 3)))
    net.eval()
    bnn = lb.convert(net, method)
    x = torch.randn(6, 5)
    torch.testing.assert_close(lb.mean(bnn)(x), net(x), atol=1e-5, rtol=1e-5)
    (bnn(x).square().sum() + lb.kl(bnn)).backward()
    assert all(p.grad is not None for p in bnn.parameters())
    plain = lb.draw(bnn, seed=1)
    assert type(plain[0]) is nn.Linear
    with lb.draws(bnn, seed=1):
        torch.testing.assert_close(plain(x), bnn(x), atol=1e-5, rtol=1e-5)


def test_hook_based_weight_norm_is_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="layer '0' cannot be converted"):
        lb.convert(net, lb.Rank1(), where="0")
    named = "layer '0' cannot be converted: a hook computes its weight"
    with pytest.raises(ValueError, match="convert in place with copy=False"):
        lb.convert(net, lb.Rank1())
    with pytest.warns(UserWarning, match=named):
        bnn = lb.convert(net, lb.Rank1(), copy=False)
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["1"]


def test_lazy_layers_are_refused_by_name():
    with pytest.raises(ValueError, match="layer '0' cannot be converted: its parameters are not initialised yet"):
        lb.convert(nn.Sequential(nn.LazyLinear(4), nn.ReLU()), lb.Rank1())


def test_a_subclass_with_its_own_forward_is_refused_by_name_and_one_without_is_converted():
    class Lora(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Mine(nn.Linear):
        pass

    with pytest.warns(UserWarning, match="Lora is a Linear with a forward of its own"):
        bnn = lb.convert(nn.Sequential(Lora(3, 3), Mine(3, 3)), lb.Rank1())
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["1"]
    assert type(lb.draw(bnn)[1]) is Mine
    assert "forward of its own" in str(lb.summary(bnn))


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_quantised_layers_are_left_alone_and_summary_says_so():
    quantised = torch.ao.nn.quantized.dynamic.Linear(4, 4)
    bnn = lb.convert(nn.Sequential(quantised, nn.Linear(4, 2)), lb.Rank1())
    row = lb.summary(bnn).rows[0]
    assert (row.method, row.path, row.reason) == (None, "0", "quantised")
    assert bnn(torch.randn(3, 4)).shape == (3, 2)


def test_composites_with_a_forward_of_their_own_are_not_opened():
    class Mine(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    net = nn.ModuleDict({"attention": Mine(8, 2), "head": nn.Linear(8, 2)})
    with pytest.warns(UserWarning, match=r"Rank1 covers 5.8 % .* 'attention' \(Mine, 288 weights: Mine is a Multihead"):
        bnn = lb.convert(net, lb.Rank1())
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["head"]
    assert "forward of its own" in str(lb.summary(bnn))


def test_deepcopies_and_ema_copies_own_their_state():
    bnn = lb.convert(small_net(), lb.Rank1())
    ema = torch.optim.swa_utils.AveragedModel(bnn)
    twin = copy.deepcopy(bnn)
    x = torch.randn(4, 1, 8, 8)
    for other in (ema, twin):
        (layer, *_) = [layer for _, layer in lb.stochastic_layers(other)]
        assert layer.state is not bnn[0].state
        with lb.draws(bnn, seed=0):
            other(x)
            assert not layer.state.fixed
    ema.update_parameters(bnn)
    assert lb.predict(ema, x, samples=4).samples.shape == (4, 4, 4)


def test_hooks_of_a_layer_see_the_whole_stochastic_layer_and_stay_with_draws():
    net = nn.Sequential(nn.Linear(3, 2))
    seen = []
    net[0].register_forward_hook(lambda layer, args, y: seen.append((args[0], y)))
    bnn = lb.convert(net, lb.Rank1())
    x = torch.randn(4, 3)
    y = bnn(x)
    assert len(seen) == 1
    assert seen[0][0] is x
    assert torch.equal(seen[0][1], y)
    lb.draw(bnn)(x)
    assert len(seen) == 2


def test_full_backward_hooks_of_a_layer_see_its_gradients_and_stay_with_draws():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    seen = []
    net[2].register_full_backward_hook(lambda layer, inputs, outputs: seen.append((inputs[0].shape, outputs[0])))
    bnn = lb.convert(net, lb.Rank1())
    for model in (bnn, lb.draw(bnn)):
        seen.clear()
        model(torch.randn(5, 3)).sum().backward()
        assert len(seen) == 1
        assert seen[0][0] == (5, 4)
        assert torch.equal(seen[0][1], torch.ones(5, 2))


def test_foreign_code_may_read_the_attributes_of_the_layer_it_knows():
    bnn = lb.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), lb.Rank1())
    assert bnn[0].weight.shape == (4, 3, 3, 3)
    assert (bnn[0].in_channels, bnn[0].stride) == (3, (1, 1))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = bnn[0].nonsense


def test_random_signs_warn_that_they_discard_a_trained_function():
    with pytest.warns(UserWarning, match="discards the function of a trained network"):
        bnn = lb.convert(small_net(), lb.Rank1(init="random_sign"))
    assert set(bnn[0].posterior.input.loc.unique().tolist()) == {-1.0, 1.0}


def test_strip_gives_the_shared_weights_back():
    net = small_net()
    bnn = lb.convert(net, lb.Rank1())
    plain = strip(bnn)
    assert plain.state_dict().keys() == net.state_dict().keys()
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(plain.eval()(x), net.eval()(x))


def test_draws_share_no_tensor_with_the_model_and_leave_it_unchanged():
    bnn = lb.convert(small_net(), lb.Rank1())
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    plain = lb.draw(bnn)
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
    assert bnn.training


@pytest.mark.parametrize(
    ("net", "nodes"),
    [
        (lambda: lb.models.vgg16(), 5_251),
        (lambda: lb.models.vgg16(num_outputs=1000, input_shape=(3, 224, 224)), 36_995),
        (lambda: lb.models.resnet50(num_outputs=1000, input_shape=(3, 224, 224)), 24_579),
        (lambda: lb.models.WideResNet(depth=28, widen=10), 9_475),
        (AlexNetShaped, 18_307),
        (lambda: lb.models.LeNet(), 207),
    ],
    ids=["vgg16-cifar", "vgg16-imagenet", "resnet50", "wrn-28-10", "alexnet", "lenet"],
)
def test_summary_counts_the_input_nodes_of_table_1(net, nodes):
    with torch.device("meta"):
        bnn = lb.convert(net(), lb.ImplicitNodes(), copy=False)
    assert lb.summary(bnn).nodes == nodes


def test_bias_nodes_add_one_for_every_biased_layer():
    bnn = lb.convert(AlexNetShaped(), lb.ImplicitNodes(bias_node=True), where="features.*")
    assert lb.summary(bnn).nodes == 3 + 64 + 192 + 384 + 256 + 5


def test_rank1_adds_at_most_0_45_percent_to_wrn_28_10():
    with torch.device("meta"):
        bnn = lb.convert(lb.models.WideResNet(depth=28, widen=10), lb.Rank1(components=4), copy=False)
    summary = lb.summary(bnn)
    assert summary.parameters == 36_479_194
    assert 0.40 < summary.extra_percent <= 0.45
    assert summary.headline.startswith("rank1: 99.9 % of the weights, 29 of 29 layers with a linear map")


def test_a_closed_composite_alone_is_named():
    class Mine(nn.LSTM):
        def forward(self, *args):
            return super().forward(*args)

    with pytest.raises(ValueError, match=r"the model has 1 tests\.test_convert\.Mine"):
        lb.convert(Mine(8, 2), lb.Rank1())


def test_width_is_refused_where_no_layer_orders_its_channels():
    bnn = lb.convert(nn.Linear(2, 2), lb.Rank1())
    with pytest.raises(ValueError, match="no layer of this model orders its channels"):
        lb.draw(bnn, width=0.5)


def test_summary_of_a_plain_model_and_str():
    summary = lb.summary(Nested())
    assert (summary.converted, summary.extra_parameters, summary.extra_percent) == (0, 0, 0.0)
    text = str(lb.summary(lb.convert(Nested(), lb.Rank1(), where="heads.a")))
    assert "heads.a" in text
    assert "- not chosen" in text
    assert "not a target of rank1" in str(lb.summary(lb.convert(small_net(), lb.Rank1())))
    assert text.startswith("rank1: 9.0 % of the weights, 1 of 5 layers with a linear map")


def test_parameter_groups_hold_every_trainable_parameter_once():
    bnn = lb.convert(small_net(), lb.Rank1())
    bnn[1].weight.requires_grad_(False)
    groups = lb.parameter_groups(bnn, lr=0.1, posterior_lr=0.5, weight_decay=1e-3, no_decay=["*.bias", "1.*"])
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
        "weights": (0.1, 1e-3), "posterior": (0.5, 0.0), "no_decay": (0.1, 0.0),
    }  # fmt: skip
    found = [id(p) for g in groups for p in g["params"]]
    assert sorted(found) == sorted(id(p) for p in bnn.parameters() if p.requires_grad)
    torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError, match=r"no_decay='\*biass' matches no parameter; there are 0.base.weight"):
        lb.parameter_groups(bnn, lr=0.1, no_decay="*biass")


def test_update_norm_recollects_statistics():
    net = small_net()
    x = torch.randn(64, 1, 8, 8) * 3
    bnn = lb.convert(net, lb.ImplicitNodes(init_spread=0.0, init_std=1e-6)).eval()
    lb.update_norm(bnn, [(x, None), (x, None)], batches=1)
    features = net[0](x)
    torch.testing.assert_close(bnn[1].running_mean, features.mean((0, 2, 3)), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(bnn[1].running_var, features.var((0, 2, 3)), atol=1e-3, rtol=1e-3)
    assert not any(module.training for module in bnn.modules())
    assert bnn[1].momentum == 0.1
    expected = bnn[1].running_mean.clone()
    lb.update_norm(bnn, (x, 100 * torch.ones(64)))
    torch.testing.assert_close(bnn[1].running_mean, expected, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="expected an input with 1 features"):
        lb.update_norm(bnn, torch.randn(2, 5, 8, 8))
    assert bnn[1].momentum == 0.1
    assert not bnn[1].training


@pytest.mark.parametrize(
    ("name", "method"), [("rank1", lb.Rank1()), ("patch", lb.ModelPatch()), ("nested", lb.NestedDropout())]
)
def test_a_name_means_the_method_with_its_defaults(name, method):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    bnn = lb.convert(net, name)
    assert {layer.method for _, layer in lb.stochastic_layers(bnn)} == {method}
    assert len(lb.convert(net, "deep_ensemble").members) == lb.DeepEnsemble().components


@pytest.mark.parametrize("name", ["Rank1", "RANK1", "rank-1"])
def test_a_name_may_be_spelled_in_any_way(name):
    bnn = lb.convert(small_net(), name)
    assert {layer.method for _, layer in lb.stochastic_layers(bnn)} == {lb.Rank1()}


@pytest.mark.parametrize("name", ["rank2", "plain", ""])
def test_an_unknown_name_of_a_method_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=f"expected a method such as .* among batch_ensemble, .*rank1.*, got '{name}'"):
        lb.convert(small_net(), name)
    with pytest.raises(ValueError, match="did you mean 'rank1'"):
        lb.convert(small_net(), "Rank2")


@pytest.mark.parametrize(
    "method", [lb.Rank1(centre="no"), lb.VarianceLayers(learn="no"), lb.NestedDropout(hard=0)], ids=repr
)
def test_a_switch_is_true_or_false(method):
    with pytest.raises(ValueError, match=r"expected (centre|learn|hard) to be True or False, got ('no'|0)"):
        lb.convert(nn.Linear(4, 3), method)
