"""Rank-1 factors (Dusenberry et al., 2020): a posterior over a rank-1 subspace of each weight matrix.

Multiplicative (the paper's eq. 1):   y = (W (x * s_k)) * r_k + b_k,          W' = W * (r_k s_k^T)
Additive (its section 3.1):           y = W x + u r_k (s_k . x) + b_k,        W' = W + u r_k s_k^T

with s ~ q_k over the inputs, r ~ q_k over the outputs, k one of K components, the same for a row in every layer,
and u the root mean square of the layer's weights, so that a standard deviation means the same in both forms. The
bias belongs to the member and is added after r, never multiplied by it.

KL: mean_k KL(q_k || p), an upper bound on the divergence of the uniform mixture, or the sum over k, as the
authors' code has it. BatchEnsemble (Wen et al., 2020) is the case of a point mass, which pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, get_args, Literal

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.divergence import kl, on
from leanbayes.distributions.factor import Factor, random_signs, spread_around
from leanbayes.distributions.law import law, LawName
from leanbayes.layers.family import LINEAR_MAPS, spread
from leanbayes.methods.base import Method, StochasticLayer
from leanbayes.methods.checks import (
    check_at_least_zero,
    check_choice,
    check_components,
    check_positive,
    check_share,
)

Factors = Literal["both", "input", "output"]
Init = Literal["around_one", "random_sign"]
KlOver = Literal["mean", "sum"]
Perturbation = Literal["multiplicative", "additive"]


class Rank1Layer(StochasticLayer):
    """A linear map with random factors on its input and output channels."""

    def __init__(self, base: Any, method: Method, recipe: Rank1) -> None:
        """Draw the component centres; on average they leave a trained function as it was.

        `method` is what the user passed, `recipe` what it means in terms of rank-1 factors.
        """
        super().__init__(base, method)
        self.recipe = recipe
        self.components = recipe.components
        weight: Tensor = base.weight.detach()
        for side, centre in recipe.centres().items():
            count = self.family.inputs(base) if side == "input" else self.family.outputs(base)
            self.posterior.add_module(side, recipe.factor(count, centre, weight))
            self.nodes += count
        if recipe.component_bias and base.bias is not None:
            # An offset from the shared bias: every member starts at the trained one, and a plain checkpoint fits.
            self.posterior.bias = nn.Parameter(torch.zeros_like(base.bias).repeat(recipe.components, 1))
        if recipe.perturbation == "additive":
            self.posterior.register_buffer("unit", weight.square().mean().sqrt())

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        s, r, bias = self._read(x.shape[0])
        if self.recipe.perturbation == "additive":
            return self._add(x, s, r, bias, args)
        return self._multiply(x, s, r, bias, args)

    @override
    def kl(self) -> Tensor:
        total = torch.zeros((), device=self.device)
        for side, centre in self.recipe.centres().items():
            factor = self.posterior.get_submodule(side)
            assert isinstance(factor, Factor)
            prior = law(self.recipe.prior).prior(centre, self.recipe.prior_std)
            total = total + kl(factor.distribution(), on(prior, self.device)).sum()
        return total if self.recipe.kl_over == "sum" else total / self.components

    @override
    def draw_noise(self, rows: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        return tuple(factor.draw_noise(rows, generator) for factor in self.posterior.children())

    @override
    def fold(self) -> dict[str, Tensor]:
        s, r, bias = self._read(1)
        weight: Tensor = self.base.weight
        assert self.family.scale is not None
        s = weight.new_ones(self.family.inputs(self.base)) if s is None else s[0]
        r = weight.new_ones(self.family.outputs(self.base)) if r is None else r[0]
        if self.recipe.perturbation == "additive":
            weight = weight + self.posterior.unit * self.family.scale(self.base, torch.ones_like(weight), s, r)
        else:
            weight = self.family.scale(self.base, weight, s, r)
        return {"weight": weight.to(self.base.weight.dtype)} | ({} if bias is None else {"bias": bias[0]})

    def _read(self, rows: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return input factors, output factors and biases of the current draw, each (R, n), or None."""
        reading = self.draws.read(self, rows)
        factors: dict[str, Tensor] = {}
        for position, (side, factor) in enumerate(self.posterior.named_children()):
            assert isinstance(factor, Factor)
            if reading.noise is None or reading.component is None:
                factors[side] = factor.centre(reading.component)
            else:
                factors[side] = factor.sample(reading.component, reading.noise[position])
        return factors.get("input"), factors.get("output"), self._bias(reading.component)

    def _bias(self, component: Tensor | None) -> Tensor | None:
        """Return the members' biases (R, out): the shared one plus each member's offset."""
        bias: Tensor | None = self.base.bias
        offset = self.posterior._parameters.get("bias")
        if bias is None or offset is None:
            return None if bias is None else bias[None]
        own: Tensor = offset.mean(0, keepdim=True) if component is None else offset[component]
        return bias + own

    def _multiply(self, x: Tensor, s: Tensor | None, r: Tensor | None, bias: Tensor | None, args: Any) -> Tensor:
        """Return (W (x * s)) * r + b."""
        axis, path = self.family.axis, self.path
        if s is not None:
            x = x * spread(s, x, axis, path)
        if r is None and "bias" not in self.posterior._parameters:
            y: Tensor = self.base(x, *args)
            return y
        y = self._linear(x, args)
        if bias is None:
            return y if r is None else y * spread(r, y, axis, path)
        bias = spread(bias, y, axis, path)
        return y + bias if r is None else torch.addcmul(bias, y, spread(r, y, axis, path))

    def _add(self, x: Tensor, s: Tensor | None, r: Tensor | None, bias: Tensor | None, args: Any) -> Tensor:
        """Return W x + u r (s . x) + b; under a kernel, s . x is summed over its taps."""
        axis, path = self.family.axis, self.path
        y = self._linear(x, args)
        assert self.family.pool is not None
        pooled = self.family.pool(self.base, x if s is None else x * spread(s, x, axis, path), *args)
        # One value a group of output channels.
        pooled = pooled.to(y.dtype).repeat_interleave(y.shape[axis] // pooled.shape[axis], axis)
        gain = self.posterior.unit * (pooled.new_ones(1, y.shape[axis]) if r is None else r)
        y = torch.addcmul(y, pooled, spread(gain, y, axis, path))
        return y if bias is None else y + spread(bias, y, axis, path)

    def _linear(self, x: Tensor, args: Any) -> Tensor:
        assert self.family.linear is not None
        return self.family.linear(self.base, x, self.base.weight, *args)


@dataclass(frozen=True, kw_only=True)
class Rank1(Method):
    """Random factors on the inputs and outputs of each layer, in K components.

    Attributes:
        components: K, the number of mixture components; each row of a batch uses one of them.
        posterior: law of a factor's posterior; "point" gives BatchEnsemble.
        prior: law of its prior; pairs whose divergence is infinite are refused. Under a "point" posterior the
            prior acts as a penalty (maximum a posteriori); prior "point" is no prior.
        prior_std: scale of the prior (of a half-Cauchy: its median).
        factors: which factors are random; the others are one.
        init: component centres around one, or random signs. Random signs are the paper's choice for training
            from scratch; **they discard the function of a trained network**, and `convert` warns.
        init_spread: standard deviation of the component centres around one.
        init_std: initial scale of each factor's posterior.
        sign_probability: probability of +1 under random signs (0.5 CIFAR, 0.75 ImageNet in the paper).
        kl_over: "mean" over components is the bound; "sum" is what the authors' code does.
        component_bias: give every component a bias of its own, where the layer has one.
        perturbation: multiply the weights by the factors, or add their outer product.

    Example:
        >>> bnn = lb.convert(net, lb.Rank1(components=4, prior_std=0.1))
    """

    name: ClassVar[str] = "rank1"
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS

    components: int = 4
    posterior: LawName = "normal"
    prior: LawName = "normal"
    prior_std: float = 0.1
    factors: Factors = "both"
    init: Init = "around_one"
    init_spread: float = 0.1
    init_std: float = 0.0316
    sign_probability: float = 0.5
    kl_over: KlOver = "mean"
    component_bias: bool = True
    perturbation: Perturbation = "multiplicative"

    def __post_init__(self) -> None:
        """Check every field; a wrong one says what was expected."""
        check_components(self.components)
        check_positive(prior_std=self.prior_std, init_std=self.init_std)
        check_at_least_zero(init_spread=self.init_spread)
        check_share(sign_probability=self.sign_probability)
        check_choice("factors", self.factors, get_args(Factors))
        check_choice("init", self.init, get_args(Init))
        check_choice("kl_over", self.kl_over, get_args(KlOver))
        check_choice("perturbation", self.perturbation, get_args(Perturbation))
        check_choice("posterior", self.posterior, get_args(LawName))
        check_choice("prior", self.prior, get_args(LawName))
        self._check_pair()

    def _check_pair(self) -> None:
        one = torch.ones(1)
        kl(law(self.posterior).distribution(one, one), law(self.prior).distribution(one, one))
        positive = law(self.posterior).positive
        if positive and (self.init == "random_sign" or self.perturbation == "additive"):
            raise ValueError(
                f"a {self.posterior} factor is positive: expected init='around_one' and "
                f"perturbation='multiplicative', got {self.init!r} and {self.perturbation!r}"
            )
        if self.init == "random_sign" and self.perturbation == "additive":
            raise ValueError("additive factors lie around zero: expected init='around_one', got 'random_sign'")

    @override
    def wrap(self, layer: nn.Module) -> Rank1Layer:
        return Rank1Layer(layer, self, self)

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {
            "default": cls(),
            "cauchy": cls(posterior="cauchy", prior="cauchy"),
            "log_normal": cls(posterior="log_normal", prior="half_cauchy"),
            "input": cls(factors="input", component_bias=False, kl_over="sum"),
            "output": cls(factors="output", components=1),
            "additive": cls(perturbation="additive", components=3),
        }

    @override
    def notice(self) -> str | None:
        if self.init == "around_one":
            return None
        return (
            "init='random_sign' discards the function of a trained network (every component starts as another one); "
            "use init='around_one' to keep it. `lb.mean` then needs component=k."
        )

    def centres(self) -> dict[str, float]:
        """Return the sides that carry factors, with what their factors lie around.

        Additive factors lie around zero on one side, which leaves the function unchanged on average.
        """
        sides = {"both": ("input", "output"), "input": ("input",), "output": ("output",)}[self.factors]
        zero = sides[0] if self.perturbation == "additive" else None
        return {side: 0.0 if side == zero else 1.0 for side in sides}

    def factor(self, count: int, centre: float, like: Tensor) -> Factor:
        """Make the factors of one side of a layer whose weights are `like`."""
        shape = (self.components, count)
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.init == "random_sign":
            centres = random_signs(self.sign_probability, shape, device=like.device, dtype=dtype)
        else:
            centres = spread_around(centre, self.init_spread, shape, device=like.device, dtype=dtype)
        return Factor(self.posterior, centres, torch.full_like(centres, self.init_std))


@dataclass(frozen=True, kw_only=True)
class BatchEnsemble(Method):
    """An ensemble whose members share the weights and differ in two vectors and a bias per layer (no KL).

    Nothing but the optimiser holds the factors: keep their learning rate low (half of the weights' in the paper).

    Attributes:
        components: K, the number of members.
        init: member factors around one, or random signs (**which discard a trained function**).
        init_spread: standard deviation of the factors around one.
        sign_probability: probability of +1 under random signs.
        component_bias: give every member a bias of its own, where the layer has one.

    Example:
        >>> bnn = lb.convert(net, lb.BatchEnsemble(components=4))
    """

    name: ClassVar[str] = "batch_ensemble"
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS

    components: int = 4
    init: Init = "around_one"
    init_spread: float = 0.25
    sign_probability: float = 0.5
    component_bias: bool = True

    def __post_init__(self) -> None:
        """Check every field by building the rank-1 recipe behind it."""
        self.recipe()

    def recipe(self) -> Rank1:
        """Return the same thing in terms of rank-1 factors: point masses without a prior."""
        return Rank1(posterior="point", prior="point", **self.fields())

    @override
    def wrap(self, layer: nn.Module) -> Rank1Layer:
        return Rank1Layer(layer, self, self.recipe())

    @override
    def notice(self) -> str | None:
        return self.recipe().notice()
