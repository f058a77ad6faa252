"""Ensemble model patching (Chang et al., 2019): K copies of a network's small parameters, chosen at random.

    W = M_z,      z ~ Categorical(p)                                                  (eq. 1 with sigma -> 0)

EMP draws one z for a whole layer (eq. 4), ECMP one for every element of its tensors (eq. 5): K^layers and K^elements
networks that share all their large weights, and the running statistics of their norms. A draw serves a whole batch.
The shape of the noise decides which elements share an index. Dropout, DropConnect and explicit ensembles are other
shapes (Table 2; docs/design/0012-patches.md).

The K copies of a tensor are stored as their mean, which is the plain layer itself, and K - 1 contrasts C_j,

    M_k = M + sum_j A_kj C_j,      A with orthonormal columns that sum to zero.

These are as many numbers as K copies. A plain checkpoint fits, and the average network is exact for any contrasts. The
KL to Normal(0, 1/tau) is, up to a constant (eq. 6),

    sum_k tau p_k / 2 ||M_k||^2   =   tau / 2 ||M||^2 + tau / (2 K) sum_j ||C_j||^2   for uniform p,

of the patched tensors; shared weights have the same term as the optimiser's weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.func import functional_call
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment, cuts, pick_between
from leanbayes.distributions.factor import materialise
from leanbayes.layers.family import LINEAR_MAPS, LinearFamily, NORMS
from leanbayes.layers.select import choose
from leanbayes.methods._base import Method, Space, StochasticLayer, without_autocast
from leanbayes.methods._checks import check_at_least_zero, check_choice, check_components
from leanbayes.methods._together import patched_rows
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Variables, Width

Mixing = Literal["uniform", "learned"]
ROLES = ("norm", "input", "output")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class PatchLayer(StochasticLayer):
    """A norm or linear map with K copies of its weight and bias."""

    method: ModelPatch
    row_noise = False
    sampled_together = True

    def __init__(self, base: Any, method: ModelPatch) -> None:
        """Spread the copies around the given tensors; their mean is exact."""
        super().__init__(base, method)
        self.copies = method.components
        self.names = [name for name in ("weight", "bias") if getattr(base, name, None) is not None]
        like = base.weight.detach()
        self.sizes = [getattr(base, name).numel() for name in self.names]
        self.nodes = sum(self.sizes) if method.crossed else 1
        self.log_choices = self.nodes * math.log(self.copies)
        dtype = self.wide
        self.posterior.register_buffer("basis", contrasts(self.copies).to(like.device, dtype), persistent=False)
        uniform = torch.full((self.copies,), 1 / self.copies, device=like.device)
        self.posterior.register_buffer("cuts", cuts(uniform), persistent=False)
        precisions = [
            torch.full((n,), method.precision_of(name)) for name, n in zip(self.names, self.sizes, strict=True)
        ]
        self.posterior.register_buffer("precisions", torch.cat(precisions).to(like.device), persistent=False)
        noise = torch.randn(self.copies - 1, sum(self.sizes), device=like.device, dtype=dtype)
        self.posterior.contrasts = nn.Parameter(self._start_std() * noise)
        if method.mixing == "learned":
            self.posterior.logits = nn.Parameter(torch.zeros(self.copies, device=like.device, dtype=dtype))

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        variables = self.state.variables_of(self, x.shape[0])
        chosen = {name: tensor.squeeze(0) if len(tensor) == 1 else tensor[0] for name, tensor in variables.items()}
        if not isinstance(self.family, LinearFamily):
            return norm_with(self.base, x, chosen, args)
        y = self.family.linear(self.base, x, chosen["weight"], *args)
        return y + self.spread(chosen["bias"][None], y) if "bias" in chosen else y

    @override
    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        method = layers[0].method
        precisions = torch.cat([layer.posterior.precisions for layer in layers]).float()
        with layers[0]._exact():
            if method.mixing == "uniform":
                centres = torch.cat([tensor for layer in layers for tensor in layer._tensors()]).float()
                apart = torch.cat([layer.posterior.contrasts for layer in layers], 1).float()
                return 0.5 * (precisions @ (centres.square() + apart.square().sum(0) / method.components))
            squares = torch.cat([layer.probabilities.float() @ layer.every_copy().float().square() for layer in layers])
            surprises = torch.stack([layer._surprise() for layer in layers])
            return 0.5 * (precisions @ squares) + surprises.sum()

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (NoiseSpec("uniform", (self.nodes,), per_row=False, choices=self.copies),)

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "weight" and "bias" (R, ...), R = 1 unless several draws are fixed."""
        with self._exact():
            flat = self._average()[None] if noise is None else self._choose(pick_between(noise[0], self._cuts()))
        return self._shaped(torch.split(flat, self.sizes, 1))

    def _shaped(self, parts: Sequence[Tensor]) -> Variables:
        """Return weight and bias (R, ...) out of rows (R, n) of each."""
        likes = {name: getattr(self.base, name) for name in self.names}
        named = zip(self.names, parts, strict=True)
        return {name: part.view(-1, *likes[name].shape).to(likes[name].dtype) for name, part in named}

    @override
    @classmethod
    def sample_of(
        cls, layers: Sequence[Self], component: Assignment, noise: Sequence[Noise], width: Width
    ) -> list[Variables]:
        first = layers[0]
        if first.method.mixing == "learned" or first.base.weight.is_meta:  # each layer has its own probabilities
            return super().sample_of(layers, component, noise, width)
        posteriors, every = [layer.posterior for layer in layers], [sum(layer.sizes) for layer in layers]
        with first._exact():
            index = pick_between(torch.cat([own for (own,) in noise], 1), first._cuts())
            parts = torch.split(index, [layer.nodes for layer in layers], 1)
            index = torch.cat([part.expand(-1, count) for part, count in zip(parts, every, strict=True)], 1)
            centre = torch.cat([tensor for layer in layers for tensor in layer._tensors()])
            contrasts = torch.cat([posterior.contrasts for posterior in posteriors], 1)
            flat = materialise(torch.addmm(centre, posteriors[0].basis, contrasts).gather(0, index))
        pieces = iter(torch.split(flat, [size for layer in layers for size in layer.sizes], 1))
        return [layer._shaped([next(pieces) for _ in layer.sizes]) for layer in layers]

    @override
    def together(self) -> nn.Module | None:
        return patched_rows(self.base, self.names) if self.family.weight is None else None

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(variables)

    @property
    def probabilities(self) -> Tensor:
        """The mixing probabilities p (K,)."""
        if self.method.mixing == "learned":
            return torch.softmax(self.posterior.logits, 0)
        basis: Tensor = self.posterior.basis
        return basis.new_full((self.copies,), 1 / self.copies)

    def every_copy(self, index: Tensor | None = None) -> Tensor:
        """Return the K copies of weight and bias in a row, or those of the indices (R,): (K, n) or (R, n)."""
        basis: Tensor = self.posterior.basis if index is None else self.posterior.basis[index]
        return torch.addmm(self._centre(), basis, self.posterior.contrasts)

    def _exact(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, which would round the products of copies."""
        return without_autocast(self.posterior.contrasts.device)

    def _centre(self) -> Tensor:
        return torch.cat(self._tensors())

    def _tensors(self) -> list[Tensor]:
        """Return weight and bias, flat, in the dtype of the contrasts."""
        dtype = self.posterior.contrasts.dtype
        tensors = [self.weight_now if name == "weight" else self.base.bias for name in self.names]
        return [tensor.flatten().to(dtype) for tensor in tensors]

    def _choose(self, index: Tensor) -> Tensor:
        """Return the copies of the indices, one (R, 1) or one for each element (R, n)."""
        chosen = self.every_copy().gather(0, index) if self.method.crossed else self.every_copy(index[:, 0])
        if self.method.mixing == "learned":
            # Straight through: the value of the chosen copies, the gradient of the average under p.
            chosen = chosen + (self.probabilities - self.probabilities.detach()) @ self.every_copy()
        return chosen

    def _average(self) -> Tensor:
        return self._centre() if self.method.mixing == "uniform" else self.probabilities @ self.every_copy()

    def _start_std(self) -> float:
        """Return the standard deviation of contrasts that spreads copies by `init_spread` times the weights' size."""
        weight = self.weight_now.detach()
        size = 0.0 if weight.is_meta else float(weight.float().square().mean().sqrt())
        if size == 0:  # zero-initialised or on the meta device: the usual size
            linear = isinstance(self.family, LinearFamily)
            size = self.family.inputs(self.base) ** -0.5 if linear else 1.0
        return self.method.init_spread * size * math.sqrt(self.copies / max(self.copies - 1, 1))

    def _cuts(self) -> Tensor:
        if self.method.mixing == "learned":
            return cuts(self.probabilities.detach())
        uniform: Tensor = self.posterior.cuts
        return uniform

    def _surprise(self) -> Tensor:
        p = self.probabilities.float()
        return self.nodes * (p * (p * self.copies).log()).sum()


@dataclass(frozen=True, kw_only=True)
class ModelPatch(Method):
    """K copies of a network's norms and output layer, one chosen at random for each draw.

    Few parameters, and with batch norms the cheapest step of all methods on a CPU (docs/results/cost.md). The defaults
    are for copies that are trained with the network. To fine-tune a trained one, use `init_spread=0.05` and a low rate
    for the copies (`posterior_lr=1e-3` with Adam).

    Attributes:
        components: K, the number of copies of each patched tensor.
        crossed: False draws one copy for a whole layer (EMP), True one for every element (ECMP).
        patch: the layers to patch if `where` names none: "norm", "input" (the first linear map), "output" (the last),
            or globs on dotted paths.
        init_spread: standard deviation of the copies around the given tensors, relative to the size of the weights.
        precision: tau, of the prior Normal(0, 1/tau) over patched weights and scales.
        bias_precision: rho, the precision for biases and shifts; None is `precision`.
        mixing: "uniform", or "learned" probabilities of the copies of each layer, by a straight-through gradient.

    Example:
        >>> bnn = lb.convert(net, lb.ModelPatch(components=5))
        >>> tuned = lb.convert(trained, lb.ModelPatch(components=5, init_spread=0.05))
    """

    name: ClassVar[str] = "patch"
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*NORMS, *LINEAR_MAPS)
    things: ClassVar[str] = "norms and chosen layers"
    partial: ClassVar[bool] = True
    late: ClassVar[float] = 0.0
    space: ClassVar[Space] = MappingProxyType({"init_spread": (0.02, 0.5)})

    components: int = 5
    crossed: bool = False
    patch: tuple[str, ...] = ("norm", "output")
    init_spread: float = 0.1
    precision: float = 1.0
    bias_precision: float | None = None
    mixing: Mixing = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch", (self.patch,) if isinstance(self.patch, str) else tuple(self.patch))
        check_components(self.components)
        check_at_least_zero(init_spread=self.init_spread, precision=self.precision)
        if self.bias_precision is not None:
            check_at_least_zero(bias_precision=self.bias_precision)
        check_choice("mixing", self.mixing, ("uniform", "learned"))
        if not self.patch:
            raise ValueError("expected patch to name layers, such as ('norm', 'output'), got nothing")

    def precision_of(self, name: str) -> float:
        """Return the prior's precision for a "weight" or a "bias"."""
        return self.precision if name == "weight" or self.bias_precision is None else self.bias_precision

    @override
    def wrap(self, layer: nn.Module) -> PatchLayer:
        return PatchLayer(layer, self)

    @override
    def choose(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        maps = [path for path, layer in layers if isinstance(layer, LINEAR_MAPS)]
        roles = {
            "norm": [path for path, layer in layers if isinstance(layer, NORMS)],
            "input": maps[:1],
            "output": maps[-1:],
        }
        chosen = {path for role in self.patch if role in ROLES for path in roles[role]}
        return chosen | choose(layers, [glob for glob in self.patch if glob not in ROLES], argument="patch")

    @override
    def remark(self, layers: Mapping[str, nn.Module]) -> str:
        if "norm" not in self.patch or any(isinstance(layer, NORMS) for layer in layers.values()):
            return ""
        names = ", ".join(f"'{path}'" for path in layers)
        return f"ModelPatch found no norms in this network: only {names} is patched; name more with patch= or where=."

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {
            "default": cls(),
            "crossed": cls(crossed=True, components=3, patch=("*",)),
            "learned": cls(mixing="learned", components=3, bias_precision=0.5),
        }


def norm_with(norm: Any, x: Tensor, tensors: Mapping[str, Tensor], args: Any) -> Tensor:
    """Return the output of a norm with another weight and bias; torch's own classes by their functions."""
    weight, bias = tensors["weight"], tensors.get("bias")
    if type(norm) in BATCH_NORMS:
        return _batch_norm(norm, x, weight, bias)
    if type(norm) is nn.LayerNorm:
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    if type(norm) is nn.GroupNorm:
        return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)
    y: Tensor = functional_call(norm, dict(tensors), (x, *args))
    return y


def _batch_norm(norm: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a batch norm, and update its running statistics as `nn.BatchNorm2d` does."""
    norm._check_input_dim(x)
    momentum = 0.0 if norm.momentum is None else norm.momentum
    tracks = norm.training and norm.track_running_stats
    if tracks and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else momentum
    mean, var = norm.running_mean, norm.running_var
    from_batch = norm.training or (mean is None and var is None)
    mean, var = (mean, var) if not norm.training or norm.track_running_stats else (None, None)
    return F.batch_norm(x, mean, var, weight, bias, from_batch, momentum, norm.eps)


def contrasts(count: int) -> Tensor:
    """Return an orthonormal basis of the vectors that sum to zero, Helmert's: (count, count - 1).

    Example:
        >>> contrasts(2)
        tensor([[ 0.7071], [-0.7071]])
    """
    basis = torch.zeros(count, count - 1, dtype=torch.float64, device="cpu")
    for j in range(1, count):
        basis[:j, j - 1], basis[j, j - 1] = 1.0, -float(j)
        basis[:, j - 1] /= math.sqrt(j * (j + 1))
    return basis
