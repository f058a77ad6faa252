"""Every method over every kind of layer: the contract of docs/design and of `methods/base.py`."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import leanbayes as lb
from leanbayes.methods._base import StochasticLayer
from tests.readings import reading_of

from .cases import convert, converted, LAYERS, METHODS, pairs, pairs_of

# S draws, B rows, K components
methods = pytest.mark.parametrize("method", METHODS)
LINEAR = LAYERS[0]


def test_every_method_meets_every_linear_map():
    linear = {layer.name for layer in LAYERS if layer.name.startswith(("linear", "conv"))}
    met = {method: {layer.name for layer in layers} for method, layers in pairs_of("freeze", every=True).items()}
    assert len(linear) == 11
    assert all(linear <= names for name, names in met.items() if not METHODS[name].post_hoc)
    assert set().union(*met.values()) == {layer.name for layer in LAYERS}


@pairs("shape")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_keeps_shape_and_dtype_for_any_batch(method, layer, dtype):
    net, bnn = converted(method, layer, dtype)
    plain = lb.draw(bnn)
    for rows in (1, 2, 7):  # fewer rows than components, and numbers that they do not divide
        x = layer.inputs(rows, dtype)
        for y in (bnn(x), plain(x)):
            assert y.shape == net(x).shape
            assert y.dtype == dtype
            assert y.isfinite().all()


@pairs("shape")
def test_arguments_may_be_named_as_the_layers_own_forward_names_them(method, layer):
    net, bnn = converted(method, layer)
    x = layer.inputs(3)
    arguments = dict(zip(inspect.signature(net[0].forward).parameters, (x,), strict=False))
    if layer.name.startswith("conv_transpose"):
        *size, last = net(x).shape[2:]
        arguments["output_size"] = [*size, last - 1 if any(net[0].output_padding) else last + 1]
    expected = net[0](**arguments)
    with lb.draws(bnn, seed=0):
        y = bnn[0](**arguments)
    assert y.shape == expected.shape
    torch.testing.assert_close(lb.draw(bnn, seed=0)[0](**arguments), y, atol=1e-5, rtol=1e-5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        bnn[0](x, size=3)


@pairs("autocast")
def test_bfloat16_autocast_keeps_activations_in_bfloat16(method, layer):
    _, bnn = converted(method, layer)
    with torch.autocast("cpu", torch.bfloat16):
        y = bnn(layer.inputs(4))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in bnn.parameters() if p.grad is not None)


@pairs("kl")
def test_kl_is_a_pure_finite_number_of_nats(method, layer):
    _, bnn = converted(method, layer)
    before = lb.kl(bnn)
    bnn(layer.inputs(3))
    assert before.dtype == torch.float32
    assert before.shape == ()
    assert before.isfinite()
    assert before >= 0
    assert torch.equal(before, lb.kl(bnn))


@methods
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_kl_is_float32_whatever_the_parameters_were_cast_to(method, dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    bnn = lb.convert(net, METHODS[method])
    expected = lb.kl(bnn)
    found = lb.kl(bnn.to(dtype))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)  # bfloat16 keeps three digits
    if found.requires_grad:
        found.backward()


@pairs("gradients")
def test_every_trainable_parameter_gets_a_gradient(method, layer):
    _, bnn = converted(method, layer)
    (bnn(layer.inputs(8)).square().sum() + lb.kl(bnn)).backward()
    missing = [n for n, p in bnn.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing


@pairs("freeze", every=True)
def test_frozen_draw_equals_the_stochastic_pass_of_that_draw(method, layer):
    _, bnn = converted(method, layer)
    with torch.no_grad():
        for p in bnn.parameters():  # as after training: components start with the same biases
            p += 0.05 * torch.randn_like(p)
    x = layer.inputs(5)
    for index in range(3):
        with lb.draws(bnn, seed=3, index=index):
            stochastic = bnn(x)
        plain = lb.draw(bnn, seed=3, index=index)
        assert not any(isinstance(m, StochasticLayer) for m in plain.modules())
        torch.testing.assert_close(plain(x), stochastic, atol=1e-5, rtol=1e-5)


@pairs("mean")
def test_mean_of_a_fresh_conversion_is_the_network_itself(method, layer):
    net, bnn = converted(method, layer)
    x = layer.inputs(5)
    torch.testing.assert_close(lb.mean(bnn)(x), net(x), atol=1e-5, rtol=1e-5)
    with lb.draws(bnn, mean=True):
        torch.testing.assert_close(bnn(x), net(x), atol=1e-5, rtol=1e-5)


@pairs("moments")
def test_monte_carlo_moments_agree_with_the_mean_network_and_with_frozen_draws(method, layer):
    _, bnn = converted(method, layer)
    x, n = layer.inputs(1), 2000
    with torch.no_grad(), lb.draws(bnn, seed=0, component=0, shared=False):
        rows = bnn(x.expand(n, *x.shape[1:]).contiguous()).flatten(1).double()
    expected = lb.mean(bnn, component=0)(x).flatten().double()
    error = rows.std(0) / n**0.5
    # a family of a few dozen outputs: five standard errors each
    assert ((rows.mean(0) - expected).abs() <= 5 * error + 1e-5).all()
    frozen = lb.predict(bnn, x, lb.Gaussian(), samples=200, seed=1, component=0).samples.flatten(1).double()
    gap = rows.var(0) - frozen.var(0)
    fourth = (rows - rows.mean(0)).pow(4).mean(0)
    error = ((fourth - rows.var(0).square()).clamp(min=0) * (1 / n + 1 / 200)).sqrt()
    assert (gap.abs() <= 5 * error + 1e-7).all()


@pairs("round_trip")
def test_round_trips_keep_every_draw(method, layer, tmp_path):
    net, bnn = converted(method, layer)
    x = layer.inputs(3)
    expected = lb.draw(bnn, seed=2)(x)
    fresh = convert(method, net)
    fresh.load_state_dict(bnn.state_dict())
    lb.save(bnn, tmp_path / "m.safetensors")
    loaded = lb.load(tmp_path / "m.safetensors", net, method=METHODS[method])
    for twin in (fresh, loaded, pickle.loads(pickle.dumps(bnn)), copy.deepcopy(bnn)):
        torch.testing.assert_close(lb.draw(twin, seed=2)(x), expected, atol=0, rtol=0)


@pairs("plain_checkpoint")
def test_plain_checkpoint_loads_and_only_posterior_keys_are_missing(method, layer):
    _, bnn = converted(method, layer)
    other = nn.Sequential(layer.make())
    result = bnn.load_state_dict(other.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".posterior." in key for key in result.missing_keys)
    torch.testing.assert_close(lb.mean(bnn)(layer.inputs(2)), other(layer.inputs(2)), atol=1e-5, rtol=1e-5)


@methods
def test_a_layer_used_twice_has_one_posterior_one_kl_and_one_draw(method):
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    net = nn.Sequential(shared, nn.Tanh(), shared)
    bnn = lb.convert(net, METHODS[method])
    assert bnn[0] is bnn[2]
    assert len(list(lb.stochastic_layers(bnn))) == 1
    torch.testing.assert_close(lb.kl(bnn), bnn[0].kl())
    x = torch.randn(4, 5)
    seen = []

    def look(layer, args, y):
        ahead = layer.state.noise.get(layer.path)
        seen.append((layer.state.activation_noise(layer, y.detach()),) if ahead is None else ahead)

    handle = bnn[0].register_forward_hook(look)
    bnn(x)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    plain = lb.draw(bnn)
    assert plain[0] is plain[2]
    with lb.draws(bnn, seed=0):
        expected = bnn(x)
    torch.testing.assert_close(lb.draw(bnn, seed=0)(x), expected, atol=1e-5, rtol=1e-5)


@methods
def test_sampling_is_independent_of_train_and_eval_mode(method):
    _, bnn = converted(method, LINEAR)
    x = LINEAR.inputs(6)
    for mode in (True, False):
        bnn.train(mode)
        with lb.draws(bnn, seed=1, index=1):
            first = bnn(x)
        with lb.draws(bnn, seed=1, index=2):
            assert not torch.equal(bnn(x), first)
        with lb.draws(bnn, seed=1, index=1):
            assert torch.equal(bnn(x), first)


@methods
def test_a_row_has_the_same_component_in_every_layer(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    bnn = lb.convert(net, METHODS[method])
    told = []
    for _, layer in lb.stochastic_layers(bnn):
        layer.register_forward_hook(
            lambda layer, args, y: told.append(reading_of(layer, len(args[0])).component.rows())
        )
    for rows in (6, 7, 2):
        told.clear()
        bnn(torch.randn(rows, 2, 5, 5))
        assert len(told) == len(list(lb.stochastic_layers(bnn)))
        assert len(told[0]) == rows
        assert all(torch.equal(component, told[0]) for component in told)


@methods
def test_parameters_may_be_given_to_a_call_instead_of_being_kept(method):
    _, bnn = converted(method, LINEAR)
    x = LINEAR.inputs(6)
    moved = {name: p.detach() * 1.5 for name, p in bnn.named_parameters()}
    with lb.draws(bnn, seed=0):
        found = functional_call(bnn, moved, (x,))
    bnn.load_state_dict(moved, strict=False)
    with lb.draws(bnn, seed=0):
        torch.testing.assert_close(found, bnn(x))


@pytest.mark.parametrize("method", ["rank1:default", "implicit:default", "patch:default"])
def test_gradients_of_single_rows_add_up_to_that_of_the_batch(method):
    _, bnn = converted(method, LINEAR)
    x = LINEAR.inputs(6)
    parameters = dict(bnn.named_parameters())

    def loss(given, row):
        return functional_call(bnn, given, (row[None],)).square().sum()

    with lb.draws(bnn, seed=0):
        rows = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
        bnn(x).square().sum().backward()
    for name, p in parameters.items():
        torch.testing.assert_close(rows[name].sum(0), p.grad)
