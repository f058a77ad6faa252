"""Compiled training steps have the gradients of autograd, though they compute those of factors by `row_sums`."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods import _scaled_map as scaled
from leanbayes.runtime import row_gradients
from leanbayes.runtime.row_gradients import row_sums, sums_of
from tests.contract.cases import LAYERS

MAPS = [layer for layer in LAYERS if layer.name.startswith(("linear", "conv"))]
METHODS = {
    "rank1": lb.Rank1(components=2),
    "input": lb.Rank1(components=2, factors="input", component_bias=False),
    "output": lb.Rank1(components=2, factors="output"),
    "points": lb.BatchEnsemble(components=2),
    "implicit": lb.ImplicitNodes(components=2),
    "bias_node": lb.ImplicitNodes(components=2, bias_node=True),
}


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Note which functions are traced."""
    found: list[str] = []
    for kind in (row_gradients._ScaledInput, row_gradients._ScaledOutput, scaled._FirstMap):
        forward = kind.forward

        def noted(*args, name=kind.__name__, forward=forward):
            found.append(name)
            return forward(*args)

        monkeypatch.setattr(kind, "forward", noted)
    return found


def gradients(
    model: nn.Module, x: Tensor, *, devices: tuple[str, ...], monkeypatch, compiled: bool = False
) -> dict[str, Tensor]:
    """Return output and gradients of one pass, with the functions on these devices.

    Tracing takes seconds. So most passes run the code of compiled steps without the compiler.
    """
    model.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    torch.manual_seed(3)
    with monkeypatch.context() as patched:
        patched.setattr(row_gradients, "COMPILED", devices)
        if compiled:
            torch._dynamo.reset()
            output = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
            torch._dynamo.reset()
        else:
            patched.setattr(torch.compiler, "_is_compiling_flag", True)
            output = model(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"output": output.detach()} | ({"x": x.grad} if x.requires_grad else {})


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("layer", MAPS, ids=lambda layer: layer.name)
def test_gradients_are_those_of_autograd(layer, method, monkeypatch):
    monkeypatch.setattr(row_gradients, "FEW", 1)
    bnn = lb.convert(nn.Sequential(layer.make()), method).double()
    x = layer.inputs(6, torch.float64).requires_grad_()
    expected = gradients(bnn, x, devices=(), monkeypatch=monkeypatch)
    found = gradients(bnn, x, devices=("cpu",), monkeypatch=monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert set(found) == set(expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_images_need_no_gradient(method, calls, monkeypatch):
    """The first convolution computes the gradients of its weight and its factors from those of the rows."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2), nn.Tanh(), nn.Conv2d(4, 5, 3))
    bnn, x = lb.convert(net, method).double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = gradients(bnn, x, devices=(), monkeypatch=monkeypatch)
    assert not calls
    found = gradients(bnn, x, devices=("cpu",), monkeypatch=monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert ("_FirstMap" in calls) == (method not in (METHODS["output"], METHODS["bias_node"]))


@pytest.mark.parametrize(
    ("method", "functions"),
    [("rank1", {"_FirstMap", "_ScaledInput", "_ScaledOutput"}), ("implicit", {"_FirstMap", "_ScaledInput"})],
)
def test_compiled_code_uses_the_functions(method, functions, calls, monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.Flatten(2), nn.Linear(144, 2))
    bnn, x = lb.convert(net, METHODS[method]).double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = gradients(bnn, x, devices=(), compiled=True, monkeypatch=monkeypatch)
    assert not calls
    found = gradients(bnn, x, devices=("cpu",), compiled=True, monkeypatch=monkeypatch)
    assert set(calls) == functions
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_forward_converts_to_other_types_alone(dtype, monkeypatch):
    """Torch 2.11 loses the gradient of a compiled function that returns what a conversion to the same type returns."""
    converted, own = [], Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda x, dtype: converted.append((x.dtype, dtype)) or own(x, dtype))
    x, s = torch.randn(4, 3, 5, 5, dtype=torch.float64), torch.rand(4, 3, 1, 1, dtype=torch.float64)
    assert row_gradients.scaled_input(x, s, 1, dtype).dtype == dtype
    assert all(before != after for before, after in converted)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_bfloat16_is_about_as_close_to_float64_as_autograd(method, channels_last, monkeypatch):
    smooth = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1))
    bnn, x = lb.convert(smooth, method), torch.randn(8, 3, 8, 8)
    exact = gradients(bnn.double(), x.double(), devices=(), monkeypatch=monkeypatch)
    exact = {name: tensor.clone() for name, tensor in exact.items()}
    bnn.float()
    if channels_last:
        bnn, x = bnn.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)

    def error(devices: tuple[str, ...]) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(bnn, x, devices=devices, monkeypatch=monkeypatch)
        return {name: float((g.double() - exact[name]).norm() / exact[name].norm()) for name, g in found.items()}

    ours, plain = error(("cpu",)), error(())
    for name in exact:
        assert ours[name] <= max(2 * plain[name], 0.03), (name, ours[name], plain[name])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("axis", [1, -1])
def test_row_sums_are_those_of_a_loop(axis, both):
    a, b = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    found = row_sums(a, b, axis, both)
    for row in range(2):
        for channel in range(a.shape[axis]):
            own_a, own_b = (
                (t[row].movedim(axis + 1 if axis < 0 else 0, 0)[channel] for t in (a, b))
                if axis > 0
                else (t[row, ..., channel] for t in (a, b))
            )
            assert found[0, row, channel] == pytest.approx(float((own_a * own_b).sum()))
            if both:
                assert found[1, row, channel] == pytest.approx(float(own_a.sum()))
    assert len(found) == 1 + both


def test_row_sums_follow_the_rules_of_operators():
    a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    torch.library.opcheck(row_sums, (a, b, 1, True))
    torch.library.opcheck(row_sums, (a.to(memory_format=torch.channels_last), b, -1, False))


def test_sums_of_half_precision_are_in_float32():
    a = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    assert sums_of(a, a, -1).item() == 4096  # bfloat16 would stay at 256
    assert sums_of(a, a, -1).dtype == torch.float32


def test_empty_batches_are_left_to_torch():
    assert not row_gradients.serves(torch.empty(0, 3, 4, 4), torch.empty(0, 3, 1, 1), 1)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(
    "shape", [(128, 64, 56, 56), (3, 160, 32, 32), (5, 48, 7, 9), (2, 3, 224, 224), (1, 2048, 7, 7)]
)
def test_the_kernel_is_as_exact_as_float64(shape, axis, both, dtype):
    torch.manual_seed(0)
    a, b = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    if axis == -1:
        a, b = a.flatten(2).transpose(1, 2).contiguous(), b.flatten(2).transpose(1, 2).contiguous()
    a, b = a.to(dtype), b.to(dtype)
    each = torch.stack([a.double() * b.double(), a.double()][: 1 + both])
    over = 2 if axis == -1 else (3, 4)
    exact, bound = each.sum(over), 1e-6 * each.abs().sum(over)
    forms = [(a, b)]
    if axis == 1:
        last = [t.to(memory_format=torch.channels_last) for t in (a, b)]
        every_other = torch.stack([a, torch.full_like(a, torch.nan)], 2).flatten(1, 2)[:, ::2]
        forms += [tuple(last), (a, last[1]), (every_other, last[1])]
    for one, other in forms:
        found = row_sums(one, other, axis, both)
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("method", [pytest.param(m, marks=gpu, id=name) for name, m in METHODS.items()])
def test_a_compiled_step_on_a_gpu_is_about_as_close_to_float64_as_autograd(method, monkeypatch):
    """Compiled by inductor, in channels_last and bfloat16; by autograd, the step is traced alone, which is faster."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    # The gradient of a bias before a batch norm is zero: rounding errors alone, in whatever way it is computed.
    norm = nn.BatchNorm2d(32)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), norm, nn.Tanh(), nn.Conv2d(32, 64, 3), nn.Tanh())
    bnn = lb.convert(net, method).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)

    def step(devices: tuple[str, ...], half: bool) -> dict[str, Tensor]:
        monkeypatch.setattr(row_gradients, "COMPILED", devices)
        torch._dynamo.reset()
        bnn.zero_grad()

        def loss(x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                y = bnn(x)
            return (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum()

        torch.manual_seed(3)
        with torch._inductor.config.patch(fallback_random=True):  # the noise of traced code
            torch.compile(loss, backend="inductor" if devices else "aot_eager", fullgraph=True)(x).backward()
        return {name: p.grad.double() for name, p in bnn.named_parameters()}

    exact, plain = step((), False), step((), True)
    single, ours = step(("cuda",), False), step(("cuda",), True)
    for name, right in exact.items():
        assert (single[name] - right).norm() <= 1e-3 * right.norm() + 1e-6, name
        error, bound = (ours[name] - right).norm(), (plain[name] - right).norm()
        assert error <= torch.maximum(3 * bound, 0.05 * right.norm()), (name, error, bound)


@pytest.mark.parametrize("method", ["rank1", "points"])
def test_factors_of_zero_have_finite_gradients(method, monkeypatch):
    """The gradients are sums over a factor: it is moved to a number as good as zero first."""
    bnn = lb.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3)), METHODS[method]).double()
    with torch.no_grad():
        for _, layer in lb.stochastic_layers(bnn):
            for factor in layer.posterior.children():
                factor.loc[:, ::2] = 0
                if "rho" in factor._parameters:
                    factor.rho.fill_(-1000.0)
    monkeypatch.setattr("leanbayes.distributions.positive.SMALLEST", 0.0)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    expected = gradients(bnn, x, devices=(), monkeypatch=monkeypatch)
    found = gradients(bnn, x, devices=("cpu",), monkeypatch=monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
