"""Layers with a forward of their own: which are recognised, how, and that every method treats them rightly."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.layers import recognise
from leanbayes.layers.family import family_of, LINEAR_MAPS, LinearLike, NormLike, NORMS, refusal
from leanbayes.methods import all_methods
from tests.layers import miniatures as mini

MAPS = [layer for layer in mini.MINIATURES if isinstance(layer, LINEAR_MAPS)]
IDS = [f"{type(layer).__module__}.{type(layer).__name__}" for layer in mini.MINIATURES]


def inputs_of(layer: nn.Module) -> torch.Tensor:
    image = isinstance(layer, (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)) or type(layer).__name__.endswith("2d")
    return torch.randn(4, 4, 7, 8) if image else torch.randn(4, 4)


# Recognised


@pytest.mark.parametrize("layer", mini.MINIATURES, ids=IDS)
def test_a_miniature_is_recognised_and_the_table_of_names_says_what_the_probe_finds(layer):
    family = family_of(layer)
    assert family is not None
    assert refusal(layer) is None
    assert family.way == recognise.PROBE
    there = family_of(copy.deepcopy(layer).to("meta"))
    assert (there.form, there.kind, there.way) == (family.form, family.kind, recognise.TABLE)


def test_every_name_in_the_table_has_a_miniature():
    there = [(type(layer).__module__.split(".")[0], type(layer).__name__) for layer in mini.MINIATURES]
    for library, pattern in recognise.NAMES:
        assert any(home == library and fnmatchcase(name, pattern) for home, name in there), (library, pattern)


def test_on_the_meta_device_a_forward_that_no_table_knows_is_refused():
    class Mine(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    assert family_of(Mine(3, 2)) is not None
    assert "on the meta device" in str(refusal(Mine(3, 2, device="meta")))


def test_a_probe_leaves_the_layer_its_hooks_and_the_random_state_alone():
    layer = mini.BatchNormAct2d(4)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    before, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    recognise._BY_SETTINGS.clear()
    assert family_of(layer) is not None
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert layer.training


def test_layers_of_equal_settings_are_run_once_and_others_again(monkeypatch):
    runs = []
    probed = recognise._probed
    monkeypatch.setattr(recognise, "_probed", lambda *args: (runs.append(args[0]), probed(*args))[1])

    class Mine(nn.Linear):
        gain = 1.0

        def forward(self, x):
            return F.linear(x, self.weight, self.bias) * self.gain

    one, other, loud = Mine(3, 2), Mine(5, 4), Mine(3, 2)
    loud.gain = 2.0
    assert family_of(one) is family_of(other) is family_of(copy.deepcopy(one)) is not None
    assert len(runs) == 1
    assert family_of(loud) is None
    assert len(runs) == 2


def test_families_of_recognised_layers_survive_pickling():
    for layer in (mini.Linear(3, 2), mini.StdConv2dSame(3, 2, 3), mini.LlamaRMSNorm(4)):
        family = family_of(layer)
        assert pickle.loads(pickle.dumps(family)) == family


# Refused


class Lora(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x):  # with `up` at zero, it is its parent
        return super().forward(x) + x @ self.down.T @ self.up.T


class FakeQuantised(nn.Linear):
    def forward(self, x):
        return F.linear(x, (self.weight * 8).round() / 8, self.bias)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Activated(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Dropping(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class Ignores(nn.Linear):
    def forward(self, x):
        return x[..., :2] * 0


class Strange(nn.Linear):
    def forward(self, x):
        raise RuntimeError("needs a graph")


REFUSED = [
    (Lora(3, 2), "its output is not linear in its weight"),
    (FakeQuantised(3, 2), "its output is not linear in its weight"),
    (Twice(3, 2), "it does more than add its bias"),
    (Twice(3, 2, bias=False), "it multiplies its output by something of its own"),
    (Activated(3, 2), "its output is not linear in its input"),
    (Dropping(3, 2), "its output is random"),
    (Pair(3, 2), "it returns a tuple"),
    (Ignores(3, 2, bias=False), "it does not read its weight"),
    (Strange(3, 2), r"it could not be run alone (RuntimeError: needs a graph)"),
]


@pytest.mark.parametrize(("layer", "reason"), REFUSED, ids=[type(layer).__name__ for layer, _ in REFUSED])
def test_a_layer_that_computes_something_else_is_refused_with_the_reason(layer, reason):
    assert family_of(layer) is None
    assert refusal(layer) == f"{type(layer).__name__} is a Linear with a forward of its own: {reason}"


def test_a_norm_that_ignores_or_mixes_its_scale_is_refused():
    class DeafNorm(mini.Scales):
        def forward(self, x):
            return x / x.norm(dim=-1, keepdim=True)

    class MixingNorm(mini.Scales):
        def forward(self, x):
            return x * self.weight.mean()

    assert refusal(DeafNorm(4)) == "DeafNorm is a norm of its own, but it does not read its weight"
    assert refusal(MixingNorm(4)) == "MixingNorm is a norm of its own, but its weight does not act on single channels"


def test_other_modules_with_a_weight_are_no_linear_maps():
    class Router(mini.Weights):
        def forward(self, x):
            return F.linear(x, self.weight).softmax(-1)

    others = [Router(3, 2, bias=False), nn.EmbeddingBag(3, 2), nn.PReLU(3), nn.Bilinear(2, 2, 2), nn.ReLU()]
    assert not any(isinstance(layer, (LinearLike, NormLike)) for layer in others)


# Converted


@pytest.mark.parametrize("layer", MAPS, ids=[type(layer).__name__ for layer in MAPS])
@pytest.mark.parametrize(
    "method", [n for n, kind in all_methods().items() if kind.targets and n != "nested" and not kind.post_hoc]
)
def test_every_method_draws_what_it_computes_and_keeps_the_mean(layer, method):
    torch.manual_seed(0)
    net, x = nn.Sequential(copy.deepcopy(layer)), inputs_of(layer)
    for example in all_methods()[method].examples().values():
        bnn = lb.convert(net, example)
        plain = lb.draw(bnn, seed=3)
        with lb.draws(bnn, seed=3):
            torch.testing.assert_close(plain(x), bnn(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lb.mean(bnn)(x), net(x), rtol=1e-4, atol=1e-5)
        assert not type(plain[0]).__module__.startswith("leanbayes")
        (bnn(x).square().sum() + lb.kl(bnn)).backward()
        assert all(p.grad is not None for p in bnn.parameters())


def test_a_draw_of_a_standardised_convolution_is_a_plain_one():
    x = torch.randn(2, 4, 7, 8)
    for layer in (mini.ScaledStdConv2d(4, 6, 3, stride=2), mini.StdConv2dSame(4, 6, 3, stride=2, bias=False)):
        bnn = lb.convert(nn.Sequential(layer), lb.Rank1())
        plain = lb.draw(bnn)[0]
        same = isinstance(layer, mini.StdConv2dSame)
        assert type(plain) is nn.Conv2d or (same and isinstance(plain, torch.fx.GraphModule))
        assert [name for name, _ in plain.named_parameters()] == (["weight"] if same else ["weight", "bias"])
        assert pickle.loads(pickle.dumps(plain))(x).shape == layer(x).shape
        prediction = lb.predict(bnn, x, lb.Gaussian(), samples=3)
        torch.testing.assert_close(prediction.samples[0], lb.draw(bnn)(x))


@pytest.mark.parametrize("layer", [x for x in mini.MINIATURES if isinstance(x, NORMS)], ids=lambda x: type(x).__name__)
def test_norms_are_patched(layer):
    torch.manual_seed(0)
    x = inputs_of(layer)
    net = nn.Sequential(copy.deepcopy(layer)).eval()
    bnn = lb.convert(net, lb.ModelPatch())
    with lb.draws(bnn, seed=1):
        torch.testing.assert_close(lb.draw(bnn, seed=1)(x), bnn(x))
    torch.testing.assert_close(lb.mean(bnn)(x), net(x), rtol=1e-4, atol=1e-5)
    assert not torch.equal(lb.draw(bnn, seed=1)(x), net(x))


def test_modelpatch_takes_the_norms_of_a_small_llama_and_counts_them():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=8))
    said = lb.summary(lb.convert(net, lb.ModelPatch()))
    assert said.headline.startswith("patch: 4 of 4 norms and chosen layers")


def test_convolutions_behave_as_their_base_under_compilation():
    torch.manual_seed(0)
    net = nn.Sequential(mini.Conv2dSame(3, 4, 3, stride=2), nn.ReLU(), mini.ScaledStdConv2d(4, 2, 3))
    bnn, x = lb.convert(net, lb.Rank1()).eval(), torch.randn(2, 3, 9, 9)
    compiled = torch.compile(bnn, backend="eager", fullgraph=True)
    with lb.draws(bnn, seed=0):
        torch.testing.assert_close(compiled(x), bnn(x))
    torch.compiler.reset()


def test_norms_with_an_activation_that_keeps_zeros_can_be_narrowed():
    def network(act):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), mini.BatchNormAct2d(8, act),
            nn.Flatten(), mini.GraphLinear(8 * 16, 12), nn.ReLU(), mini.GraphLinear(12, 3),
        ).eval()  # fmt: skip

    x = torch.randn(2, 3, 6, 6)
    for act, channels in ((nn.ReLU, 4), (nn.SiLU, 4), (nn.Hardsigmoid, 8)):
        bnn = lb.convert(network(act), lb.NestedDropout(groups=4))
        with lb.draws(bnn, seed=0):
            torch.testing.assert_close(lb.draw(bnn, seed=0)(x), bnn(x), rtol=1e-4, atol=1e-5)
        small = lb.slim.extract(bnn, 0.5)
        assert (small[2].out_channels, small[5].out_channels) == (channels, 6)
        with lb.draws(bnn, mean=True, width=0.5):
            torch.testing.assert_close(small(x), bnn(x), rtol=1e-4, atol=1e-5)


# Registered


class Divided(nn.Module):
    """y = W x / sqrt(n) + b: the effective weight is a function of the stored one."""

    def __init__(self, inputs, outputs, power=0.5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.zeros(outputs))
        self.power = power

    def forward(self, x):
        return F.linear(x, self.weight) / x.shape[-1] ** self.power + self.bias


@pytest.fixture
def registered():
    from leanbayes.layers import family

    before = dict(family._TABLE), dict(family._REGISTERED)
    yield lb.layers.register
    for table, old in zip((family._TABLE, family._REGISTERED), before, strict=True):
        table.clear()
        table.update(old)
    family._record.cache_clear()


def test_a_registered_layer_converts_and_is_drawn_as_a_torch_layer(registered):
    net, x = nn.Sequential(Divided(4, 6), nn.ReLU(), Divided(6, 2)), torch.randn(3, 4)
    with pytest.raises(ValueError, match="found no layer to convert"):
        lb.convert(net, lb.Rank1())
    registered(Divided, like=nn.Linear, weight=lambda layer: layer.weight / layer.weight.shape[1] ** 0.5)
    for method in (lb.Rank1(), lb.MeanField(), lb.ModelPatch(patch=("*",))):
        bnn = lb.convert(net, method)
        plain = lb.draw(bnn)
        assert type(plain[0]) is nn.Linear
        with lb.draws(bnn, seed=0):
            torch.testing.assert_close(plain(x), bnn(x))
        torch.testing.assert_close(lb.mean(bnn)(x), net(x))


def test_a_registered_layer_is_run_and_refused_where_it_computes_something_else(registered):
    registered(Divided, like=nn.Linear, weight=lambda layer: layer.weight / layer.weight.shape[1] ** 0.5)
    reason = "Divided is registered as a Linear, but its output is not that of its effective weight"
    assert refusal(Divided(4, 2, power=1.0)) == reason
    assert refusal(Divided(4, 2)) is None


def test_registering_asks_for_a_class_of_torch(registered):
    with pytest.raises(ValueError, match="expected like to be one of torch's classes Linear, Conv1d"):
        registered(Divided, like=Divided)
    with pytest.raises(ValueError, match="has no linear map"):
        registered(Divided, like=nn.LayerNorm, weight=lambda layer: layer.weight)


# Warnings and messages


def test_one_warning_counts_layers_by_reason():
    net = nn.Sequential(*(Twice(4, 4) for _ in range(5)), Lora(4, 4), nn.Linear(4, 40), nn.Linear(40, 40))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bnn = lb.convert(net, lb.Rank1())
    (said,) = (str(w.message) for w in caught)
    assert said.startswith("5 layers ('0', '1', ...) cannot be converted: Twice is a Linear with a forward of its own")
    assert "; layer '5' cannot be converted: Lora is a Linear" in said
    assert "lb.layers.register" in said
    share = 100 * sum(p.numel() for p in net[6:].parameters()) / sum(p.numel() for p in net.parameters())
    headline = lb.summary(bnn).headline
    assert headline.startswith(
        f"rank1: {math.floor(10 * share) / 10} % of the weights, 2 of 8 layers with a linear map"
    )


def test_nothing_to_convert_gives_reasons_with_counts_and_no_list_of_paths():
    net = nn.Sequential(*(Twice(4, 4) for _ in range(20)))
    with pytest.raises(ValueError, match="Rank1 converts nothing: 20 layers") as error:
        lb.convert(net, lb.Rank1())
    assert "'7'" not in str(error.value)
    with pytest.raises(ValueError, match=r"the model has 2 tests\.layers\.miniatures\.Scales, 1 ReLU"):
        lb.convert(nn.Sequential(mini.Scales(3), nn.ReLU(), mini.Scales(3)), lb.Rank1())


def test_phase_tools_see_the_effective_weight_or_refuse_it():
    torch.manual_seed(0)
    net, x = nn.Sequential(mini.StdConv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 2)), torch.randn(2, 3, 5, 5)
    bnn = lb.convert(net, lb.VarianceLayers(), where="0")
    pruned = lb.phase.prune(bnn, log_alpha=100.0).model  # nothing is pruned: the same means
    torch.testing.assert_close(lb.mean(pruned)(x), net(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="layer '0' computes its weight from the stored one"):
        lb.phase.kappa(bnn, (x, torch.tensor([0, 1])))
