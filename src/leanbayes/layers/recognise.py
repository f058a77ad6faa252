"""Recognise layers with their own forward that compute the map of a known family, by running them.

Examples are a library's `Linear`, a convolution with "same" padding, a batch norm with an activation. `recognise` runs
a float64 copy on the CPU, with random parameters and three random inputs, in eval and training mode, to 1e-6. A linear
map passes if it is linear in inputs and weights, adds its bias to its channels, and turns scaled weights into scaled
inputs and outputs. A norm passes if each number of its weight and bias acts on its own channel alone.

On the meta device no layer can run. There a table of class names decides; tests compare it with the probe.
"""

from __future__ import annotations

import copy
import math
import re
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor
from torch.func import functional_call

from leanbayes.layers.hooks import HOOKS

TOLERANCE = 1e-6
INPUTS = 3
ROWS = 64  # rows of a norm's input, enough that a rectifier hides no channel in all of them
ENTRIES = 4  # outputs whose coefficients are checked

OWN, STANDARDISED, STANDARDISED_SAME = "own", "standardised", "standardised_same"
"""Forms: the layer's own forward with other weights; standardised convolution; the same with "same" padding."""

PROBE, TABLE = "by a probe", "by its name"

_LAYERS = {
    OWN: {
        "timm": "Linear Conv2dSame BatchNormAct2d GroupNorm GroupNorm1 GroupNormAct GroupNorm1Act LayerNorm "
        "LayerNorm2d LayerNormAct LayerNormAct2d RmsNorm RmsNorm2d SimpleNorm SimpleNorm2d",
        "torch_geometric": "Linear",
        "transformers": "FalconLinear *RMSNorm T5LayerNorm NoNorm",
    },
    STANDARDISED: {
        "timm": "StdConv2d StdConv2dSame ScaledStdConv2d ScaledStdConv2dSame",
        "transformers": "WeightStandardizedConv2d",
    },
}
NAMES = {
    (library, name): form
    for form, libraries in _LAYERS.items()
    for library, names in libraries.items()
    for name in names.split()
}
"""Forms of other libraries' classes, by library and class name, for the meta device."""


class Finding(NamedTuple):
    """The result of a probe."""

    form: str = ""  # how the layer computes the map of its family
    way: str = ""  # how this was found: by a probe, or by the name of the class
    reason: str = ""  # why the layer is not recognised; empty if it is
    by_channel: bool = False  # whether a norm treats every channel alone, so that channels can be dropped


class Difference(Exception):
    """The reason why a layer is not recognised, as a clause."""


def recognise(layer: nn.Module, family: Any, forms: dict[str, Any]) -> Finding:
    """Return whether a layer computes the map of a family, and its form; layers of equal settings run once.

    `forms` are further records to try, by form; each computes an effective weight.
    """
    if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
        return by_name(layer)
    known: Any = _BY_SETTINGS
    try:
        key: Any = (family.kind, tuple(forms), _settings(layer))
    except _NotSimple:
        known, key = _BY_LAYER, layer
    if key not in known:
        known[key] = _probed(layer, family, forms)
    found: Finding = known[key]
    return found


_BY_LAYER: weakref.WeakKeyDictionary[nn.Module, Finding] = weakref.WeakKeyDictionary()
_BY_SETTINGS: dict[Any, Finding] = {}


def by_name(layer: nn.Module) -> Finding:
    """Return the entry of the class-name table for a layer that cannot run."""
    own: Any
    for own in type(layer).__mro__:
        library = own.__module__.split(".")[0]
        for (home, pattern), form in NAMES.items():
            if home == library and fnmatchcase(own.__name__, pattern) and own.forward is type(layer).forward:
                padded = getattr(layer, "same_pad", False) or getattr(layer, "pad", None) is not None
                return Finding(STANDARDISED_SAME if padded and form == STANDARDISED else form, TABLE)
    return Finding(reason="a layer on the meta device cannot be run to see what it computes")


def _probed(layer: nn.Module, family: Any, forms: dict[str, Any]) -> Finding:
    """Try the layer's own forward first, then each form with an effective weight."""
    probe = _probe_linear if "linear" in family.__dataclass_fields__ else _probe_norm
    probe = _probe_embedding if issubclass(family.kind, nn.Embedding) else probe
    tries: dict[str, tuple[Any, Callable[..., bool]]] = {OWN: (family, probe)}
    tries |= {form: (record, _compare_effective) for form, record in forms.items()}
    if family.weight is not None:  # registered with an effective weight: no other form counts
        tries = {OWN: (family, _compare_effective)}
    reason = ""
    for form, (record, probe) in tries.items():
        try:
            with _alone():
                generator = torch.Generator().manual_seed(0)
                return Finding(form, PROBE, by_channel=probe(layer, record, generator))
        except Difference as difference:
            reason = reason or str(difference)
        except Exception as error:  # another library's code on random numbers: any error is possible
            said = (str(error).splitlines() or ["no message"])[0]
            reason = reason or f"it could not be run alone ({type(error).__name__}: {said})"
    return Finding(reason=reason)


@contextmanager
def _alone() -> Iterator[None]:
    """Run on the CPU, in full precision, with gradients, and restore torch's random state."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def looks_linear(layer: nn.Module) -> bool:
    """Return whether a layer has the parameters of a linear map of vectors and no others."""
    there = {name: p for name, p in layer._parameters.items() if p is not None}
    if "weight" not in there or not set(there) <= {"weight", "bias"} or layer._modules or _is_of_torch(layer):
        return False
    weight, bias = there["weight"], there.get("bias")
    if nn.parameter.is_lazy(weight):
        return True
    return weight.dim() == 2 and weight.is_floating_point() and (bias is None or bias.shape == weight.shape[:1])


def looks_like_norm(layer: nn.Module) -> bool:
    """Return whether a layer's name ends in Norm and it has one number per channel."""
    sizes = {name: tuple(p.shape) for name, p in layer._parameters.items() if p is not None}
    named = NORM_NAME.search(type(layer).__name__) is not None and not _is_of_torch(layer)
    return named and "weight" in sizes and set(sizes) <= {"weight", "bias"} and len(set(sizes.values())) == 1


NORM_NAME = re.compile(r"Norm(Act)?(\dd)?(Fp32)?$")


def _is_of_torch(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("torch.")


# Linear maps


def _probe_linear(layer: nn.Module, family: Any, generator: torch.Generator) -> bool:
    for training in (False, True):
        twin = _twin(layer, generator).train(training)
        for x in _linear_inputs(layer, family, generator):
            _check_linear(twin, family, x, generator)
    return False


def _check_linear(twin: Any, family: Any, x: Tensor, generator: torch.Generator) -> None:
    shape, outputs = twin.weight.shape, family.outputs(twin)
    biased = twin._parameters.get("bias") is not None

    def f(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        given = {"weight": weight}
        if biased:
            given["bias"] = torch.zeros(outputs, dtype=weight.dtype) if bias is None else bias
        return _run(twin, given, x)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    weight, other, more = new(*shape), new(*shape), new(*x.shape)
    y = f(x, weight)
    _expect_equal(f(x, weight), y, "its output is random")
    _expect_equal(f(2 * x + more, weight), 2 * y + f(more, weight), "its output is not linear in its input")
    _expect_equal(f(x, 2 * weight + other), 2 * y + f(x, other), "its output is not linear in its weight")
    if biased:
        bias = new(outputs)
        _expect_equal(f(x, weight, bias), y + _on_channels(bias, y, family.axis), "it does more than add its bias")
    s, r = new(family.inputs(twin)), new(outputs)
    scaled = f(x * _on_channels(s, x, family.axis), weight) * _on_channels(r, y, family.axis)
    _expect_equal(f(x, family.scale(twin, weight, s, r)), scaled, "scaled weights do not scale inputs and outputs")
    _check_coefficients(f, torch.ones_like(x), weight.requires_grad_(), generator)


def _check_coefficients(f: Callable[..., Tensor], x: Tensor, weight: Tensor, generator: torch.Generator) -> None:
    """Check that each coefficient is 0 or 1: local reparameterisation replaces weights by their squares."""
    y = f(x, weight).flatten()
    if not y.requires_grad:
        raise Difference("it does not read its weight")
    for entry in torch.randperm(len(y), generator=generator)[:ENTRIES]:
        (counts,) = torch.autograd.grad(y[entry], weight, retain_graph=True)
        if not bool(((counts.abs() < TOLERANCE) | ((counts - 1).abs() < TOLERANCE)).all()):
            raise Difference("it multiplies its output by something of its own")


def _compare_effective(layer: nn.Module, family: Any, generator: torch.Generator) -> bool:
    """Compare a layer with the plain map of its effective weight."""
    for training in (False, True):
        twin: Any = _twin(layer, generator).train(training)
        for x in _linear_inputs(layer, family, generator):
            y = _run(twin, {}, x)
            bias = twin._parameters.get("bias")
            expected = family.linear(twin, x, family.weight(twin))
            expected = expected if bias is None else expected + _on_channels(bias, expected, family.axis)
            _expect_equal(y, expected, "its output is not that of its effective weight")
    return False


def _linear_inputs(layer: Any, family: Any, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield three inputs: rows and tokens for maps of vectors, images of several sizes for convolutions."""
    channels = family.inputs(layer)
    for number in range(INPUTS):
        if family.axis == -1:
            shape: tuple[int, ...] = (3, channels) if number < INPUTS - 1 else (2, 3, channels)
        else:
            shape = (2, channels, *(size + number for size in _smallest_image(layer)))
        yield torch.randn(shape, generator=generator, dtype=torch.float64)


def _smallest_image(layer: Any) -> list[int]:
    """Return an image size that fits the kernel with its padding."""
    kernel = layer.weight.shape[2:]
    dilation = layer.dilation
    padding = [0] * len(kernel) if isinstance(layer.padding, str) else layer.padding
    return [max(d * (k - 1) + 1, p + 1) + 2 for k, d, p in zip(kernel, dilation, padding, strict=True)]


def _on_channels(values: Tensor, like: Tensor, axis: int) -> Tensor:
    shape = [1] * like.dim()
    shape[axis] = -1
    return values.view(shape)


def _probe_embedding(layer: Any, family: Any, generator: torch.Generator) -> bool:
    for training in (False, True):
        twin: Any = _twin(layer, generator).train(training)
        for _ in range(INPUTS):
            words = torch.randint(layer.num_embeddings, (3, 4), generator=generator)
            _expect_equal(_run(twin, {}, words), twin.weight[words], "it returns something else than its vectors")
    return False


# Norms


def _probe_norm(layer: nn.Module, family: Any, generator: torch.Generator) -> bool:
    """Find an input shape for which the layer is a norm; return whether it treats every channel alone."""
    found: Exception | None = None
    for shape, axis in _norm_shapes(layer, family):
        try:
            by_channel = [
                _check_norm(_twin(layer, generator).train(training), shape, axis, generator)
                for training in (False, True)
                for _ in range(INPUTS)
            ]
            return all(by_channel) and axis == 1
        except Exception as error:  # an image norm rejects rows, and vice versa
            found = error if found is None or isinstance(error, Difference) else found
    assert found is not None
    raise found


def _norm_shapes(layer: Any, family: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield possible input shapes of a norm, with the channel axis."""
    n = layer.weight.numel()
    if family.axis == -1:
        yield (ROWS, 3, *layer.weight.shape), -1
    yield from (((ROWS, n, *pixels), 1) for pixels in ((3, 3), (3,), (), (2, 2, 2)))


def _check_norm(twin: Any, shape: tuple[int, ...], axis: int, generator: torch.Generator) -> bool:
    """Check that each number of a norm's weight and bias acts on its channel; return whether it scales with them."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    names = [name for name in ("weight", "bias") if twin._parameters.get(name) is not None]
    given = {name: _small(getattr(twin, name).shape, name, generator) for name in names}
    y = _run(twin, given, x.clone())
    if y.shape != x.shape:
        raise Difference("its output has another shape than its input")
    _expect_equal(_run(twin, given, x.clone()), y, "its output is random")
    some = torch.rand(given["weight"].shape, generator=generator) < 0.5
    some.view(-1)[0] = True
    for name in names:
        moved = given | {name: given[name] + some}
        changed = _run(twin, moved, x.clone()) != y
        _check_reads(_by_number(changed, given["weight"], axis), some, name)
    return axis == 1 and _is_by_channel(twin, given, x, y, some)


def _check_reads(changed: Tensor, moved: Tensor, name: str) -> None:
    if not changed.any():
        raise Difference(f"it does not read its {name}")
    if not torch.equal(changed, moved):
        raise Difference(f"its {name} does not act on single channels")


def _is_by_channel(twin: Any, given: dict[str, Tensor], x: Tensor, y: Tensor, some: Tensor) -> bool:
    """Return whether each channel is treated alone, and scaled weights and biases scale the output."""
    there = _on_channels(some.view(-1), x, 1)
    other = _run(twin, given, torch.where(there, x + 1, x))
    alone = not bool((other != y)[~there.expand_as(y)].any())
    factors = torch.linspace(0, 2, some.numel(), dtype=torch.float64)
    scaled = _run(twin, {name: value * factors for name, value in given.items()}, x.clone())
    return alone and _equal(scaled, y * _on_channels(factors, y, 1))


def _by_number(changed: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Return for each number of a weight whether its channel changed."""
    if axis == 1:
        return changed.transpose(0, 1).flatten(1).any(1).view(weight.shape)
    return changed.reshape(-1, *weight.shape).any(0)


def _small(shape: torch.Size, name: str, generator: torch.Generator) -> Tensor:
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    return noise + 0.5 if name == "weight" else (noise - 0.5) / 5


# The copy that runs


def _twin(layer: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy on the CPU, in float64, with random parameters, statistics and eps, and without hooks."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if isinstance(tensor, Tensor):
                memo[id(tensor)] = _random_like(tensor, name, generator)
    twin = copy.deepcopy(layer, memo)
    for module in twin.modules():
        for name in HOOKS:
            setattr(module, name, type(getattr(module, name))())
        if isinstance(vars(module).get("eps"), float):
            module.eps = 0.1 + 0.5 * float(torch.rand((), generator=generator))  # type: ignore[assignment]
    return twin


def _random_like(tensor: Tensor, name: str, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().cpu().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    if name == "running_mean":
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5
    if name == "running_var":
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return tensor.detach().cpu().double()


def _run(twin: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
    y: Any = functional_call(twin, given, (x,))
    if not isinstance(y, Tensor):
        raise Difference(f"it returns a {type(y).__name__}")
    return y


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    size = max(float(one.detach().abs().max()), float(other.detach().abs().max()), 1e-3)
    return math.isfinite(size) and float((one - other).detach().abs().max()) <= TOLERANCE * size


def _expect_equal(one: Tensor, other: Tensor, otherwise: str) -> None:
    if not _equal(one, other):
        raise Difference(otherwise)


# Settings by which layers are alike

SIZES = frozenset(
    {"in_features", "out_features", "in_channels", "out_channels", "num_features", "num_channels", "normalized_shape"}
) | {"num_embeddings", "embedding_dim", "nx", "nf"}
"""Attributes that are sizes: layers that differ in them alone compute the same kind of map."""
STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
INTERNAL = frozenset(nn.Module().__dict__)
SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, types.FunctionType)


class _NotSimple(Exception):
    """Raised for a value that cannot be compared."""


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the hashable settings of a layer's computation."""
    skipped = SIZES | INTERNAL | ({"scale"} if "gain" in module._parameters else set())  # from the size of the kernel
    plain = {name: value for name, value in vars(module).items() if name not in skipped}
    groups = plain.pop("groups", 1)
    grouped = "all" if groups == vars(module).get("in_channels") and groups > 1 else groups > 1
    buffers = {name: value for name, value in module._buffers.items() if name not in STATISTICS}
    return (
        type(module),
        grouped,
        tuple((name, _simple(value)) for name, value in sorted(plain.items())),
        tuple((name, None if p is None else p.dim()) for name, p in module._parameters.items()),
        tuple((name, None if b is None else _digest(b)) for name, b in buffers.items()),
        tuple((name, None if m is None else _settings(m)) for name, m in module._modules.items()),
    )


def _simple(value: Any) -> Any:
    if value is None or isinstance(value, (*SIMPLE, types.BuiltinFunctionType)):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return tuple(_simple(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _simple(item)) for key, item in value.items())
    raise _NotSimple


def _digest(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().flatten()
    return tuple(tensor.shape), hash(tuple(flat.tolist()))
