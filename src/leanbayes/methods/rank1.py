"""Rank-1 factors (Dusenberry et al., 2020): a posterior over a rank-1 subspace of each weight matrix.

Multiplicative (the paper's eq. 1):   y = (W (x * s_k)) * r_k + b_k,          W' = W * (r_k s_k^T)
Additive (its section 3.1):           y = W x + u r_k (s_k . x) + b_k,        W' = W + u r_k s_k^T

with s ~ q_k over the inputs and r ~ q_k over the outputs. A row has the same component k of K in every layer. u is the
root mean square of the layer's weights, so that a standard deviation means the same in both forms. The bias belongs to
the member and is added after the product with r.

KL: mean_k KL(q_k || p), an upper bound on the divergence of the uniform mixture, or the sum over k as in the authors'
code. BatchEnsemble (Wen et al., 2020) has point masses and no KL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, get_args, Literal, Self

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.divergence import kl, prior_on
from leanbayes.distributions.factor import (
    Factor,
    joint_distribution,
    joint_sample,
    materialise,
    random_signs,
    require_positive,
    spread_around,
)
from leanbayes.distributions.law import law, LawName
from leanbayes.layers.family import EMBEDDINGS, LINEAR_MAPS, LinearFamily
from leanbayes.methods._base import factor_noise, Method, Space, StochasticLayer
from leanbayes.methods._checks import (
    check_at_least_zero,
    check_choice,
    check_components,
    check_positive,
    check_share,
    check_std,
)
from leanbayes.methods._scaled_map import first_map, scaled_map, times_inputs, times_outputs
from leanbayes.methods._together import scaled_rows
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Variables, Width

Factors = Literal["both", "input", "output"]
Other = Literal["none", "point"]
Init = Literal["around_one", "random_sign"]
KlOver = Literal["mean", "sum"]
NoiseOf = Literal["row", "component"]
Perturbation = Literal["multiplicative", "additive"]


class Rank1Layer(StochasticLayer):
    """A linear map with random factors on its input and output channels."""

    family: LinearFamily
    sampled_together = True

    def __init__(self, base: Any, method: Method, config: Rank1) -> None:
        """Draw the component centres, which leave a trained function unchanged on average.

        `method` is the method of the user, `config` the same method in terms of rank-1 factors.
        """
        super().__init__(base, method)
        self.config = config
        self.components = config.components
        self.row_noise = config.noise == "row"
        self.log_choices = 0.0 if config.posterior == "point" else math.inf  # points: the rows' component is all
        weight = self.weight_now.detach()
        for side, centre in config.centres(base).items():
            count = self.family.inputs(base) if side == "input" else self.family.outputs(base)
            self.posterior.add_module(side, config.factor(side, count, centre, weight))
            self.nodes += count
        if config.component_bias and self.bias_now is not None:
            # An offset from the shared bias: every member starts at the trained one, and a plain checkpoint fits.
            self.posterior.bias = nn.Parameter(torch.zeros_like(base.bias).repeat(config.components, 1))
        if config.perturbation == "additive":
            self.posterior.register_buffer("unit", weight.square().mean().sqrt().clamp(min=1e-3))

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        variables = self.state.variables_of(self, x.shape[0])
        if self.config.perturbation == "additive":
            return self._add(x, variables, args)
        return self._multiply(x, variables, args)

    @override
    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        config, device = layers[0].config, layers[0].device
        if config.prior == "point":
            return torch.zeros((), device=device)
        sides = {side: centre for side, centre in config.centres().items() if config.is_random(side)}
        totals = []
        for centre in dict.fromkeys(sides.values()):
            own = [side for side, around in sides.items() if around == centre]
            found: list[Any] = [layer.posterior._modules.get(side) for layer in layers for side in own]
            factors = [factor for factor in found if factor is not None]  # embeddings have none of their inputs
            if factors:
                prior = prior_on(device, config.prior, centre, config.prior_std)
                totals.append(kl(joint_distribution(factors), prior).sum())
        total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
        return total if config.kl_over == "sum" else total / config.components

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        specs = tuple(factor_noise(factor) for factor in self.posterior.children())
        if shared or self.config.noise == "row":
            return specs
        return tuple(NoiseSpec(spec.kind, (self.components, *spec.shape), per_row=False) for spec in specs)

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the factors "input" and "output" and the members' "bias", each (R, n), if the layer has them."""
        variables: Variables = {}
        for position, (side, factor) in enumerate(self.posterior.named_children()):
            variables[side] = factor(component, None if noise is None else noise[position])
        offset: Tensor | None = self.posterior._parameters.get("bias")
        if offset is not None:
            own = offset.mean(0, keepdim=True) if component is None else component.take(offset)
            variables["bias"] = self.base.bias + own
        elif self.bias_now is not None:
            variables["bias"] = self.base.bias[None]
        return variables

    @override
    @classmethod
    def sample_of(
        cls, layers: Sequence[Self], component: Assignment, noise: Sequence[Noise], width: Width
    ) -> list[Variables]:
        config = layers[0].config
        found: list[Variables] = [{} for _ in layers]
        slots = [
            (variables, side, factor, part)
            for variables, layer, own in zip(found, layers, noise, strict=True)
            for (side, factor), part in zip(layer.posterior._modules.items(), own, strict=True)
        ]
        # The points of the other side have another distribution.
        for random in (True, False) if config.other == "point" else (True,):
            chosen = [slot for slot in slots if config.is_random(slot[1]) == random]
            factors, parts = [slot[2] for slot in chosen], [slot[3] for slot in chosen]
            drawn = joint_sample(factors, component, parts, layers[0].computed_in)
            for (variables, side, *_), z in zip(chosen, drawn, strict=True):
                variables[side] = z
        own = [layer for layer in layers if "bias" in layer.posterior._parameters]
        members = iter(cls._biases_of(own, component) if own else ())
        for variables, layer in zip(found, layers, strict=True):
            if "bias" in layer.posterior._parameters:
                variables["bias"] = next(members)
            elif layer.bias_now is not None:
                variables["bias"] = layer.base.bias[None]
        return found

    @classmethod
    def _biases_of(cls, layers: Sequence[Self], component: Assignment) -> tuple[Tensor, ...]:
        """Return the biases of the rows (R, n) of several layers."""
        offsets = [layer.posterior.bias for layer in layers]
        biases = component.take(torch.cat([layer.base.bias for layer in layers]) + torch.cat(offsets, 1))
        return materialise(biases).split_with_sizes([offset.shape[1] for offset in offsets], 1)

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = self.weight_now
        s, r = variables.get("input"), variables.get("output")
        if self.config.perturbation == "additive":
            folded = weight + self.posterior.unit * self.family.scaled(self.base, torch.ones_like(weight), s, r)
        else:
            folded = self.family.scaled(self.base, weight, s, r)
        tensors = {"weight": folded} | ({"bias": variables["bias"]} if "bias" in variables else {})
        return {name: tensor.to(weight.dtype) for name, tensor in tensors.items()}

    @override
    def together(self) -> nn.Module | None:
        if self.config.perturbation == "additive" or isinstance(self.base, EMBEDDINGS):
            return None
        names = {side: side for side, _ in self.posterior.named_children()}
        own_bias = self.bias_now is not None and ("output" in names or "bias" in self.posterior._parameters)
        return scaled_rows(self.family, self.base, names | ({"bias": "bias"} if own_bias else {}), own_bias=own_bias)

    def _multiply(self, x: Tensor, variables: Mapping[str, Tensor], args: Any) -> Tensor:
        """Return (W (x * s)) * r + b."""
        s, r, bias = (variables.get(name) for name in ("input", "output", "bias"))
        if r is not None or "bias" not in self.posterior._parameters:
            z = scaled_map(self, x, s, r, self.bias_now if r is None else bias, args)
            if z is not None:
                return z
        plain = r is None and "bias" not in self.posterior._parameters
        y = None if s is None else first_map(self, x, s, self.bias_now if plain else None, args)
        if plain:
            return self.base(x if s is None else times_inputs(self, x, s), *args) if y is None else y
        if y is None:
            x = x if s is None else times_inputs(self, x, s)
            y = self.family.linear(self.base, x, self.weight_now, *args)
        return times_outputs(self, y, r, bias)

    def _add(self, x: Tensor, variables: Mapping[str, Tensor], args: Any) -> Tensor:
        """Return W x + u r (s . x) + b; under a kernel, s . x is summed over its taps."""
        axis = self.family.axis
        y = self.family.linear(self.base, x, self.weight_now, *args)
        scaled = x * self.spread(variables["input"], x) if "input" in variables else x
        pooled = self.family.pool(self.base, scaled, *args)
        # One value a group of output channels.
        pooled = pooled.to(y.dtype).repeat_interleave(y.shape[axis] // pooled.shape[axis], axis)
        r = variables.get("output", pooled.new_ones(1, y.shape[axis]))
        y = torch.addcmul(y, pooled, self.spread(self.posterior.unit * r, y))
        return y + self.spread(variables["bias"], y) if "bias" in variables else y


@dataclass(frozen=True, kw_only=True)
class Rank1(Method):
    """Random factors on the inputs and outputs of each layer, in K components.

    Attributes:
        components: K, the number of mixture components; each row of a batch uses one of them.
        posterior: distribution of a factor; "point" gives BatchEnsemble.
        prior: its prior; pairs with an infinite divergence are refused. Under a "point" posterior the prior acts as a
            penalty (maximum a posteriori); prior "point" is no prior.
        prior_std: scale of the prior (of a half-Cauchy: its median).
        factors: which factors are random; the others are as `other` says.
        other: the factors of the side that is not random: "none", they are one; or "point", each component has trained
            ones without a prior, as in the paper's comparison of both sides. Multiplied factors only.
        init: component centres around one, or random signs. Random signs are the paper's choice for training
            from scratch; **they discard the function of a trained network**, and `convert` warns.
        init_spread: standard deviation of the component centres around one before centring, which multiplies it by
            sqrt(1 - 1/K): 0.87 for K = 4, 0 for K = 1.
        centre: shift the component centres to an average of one (of zero on the additive side), so that the average
            network is the converted one. Without it the standard deviation is `init_spread`, also for K = 1: for
            training from scratch. Random signs are never shifted.
        init_std: initial scale of each factor's posterior (0.0316 in the paper; more is better calibrated after short
            training).
        sign_probability: probability of +1 under random signs (0.5 CIFAR, 0.75 ImageNet in the paper).
        kl_over: "mean" over components is the bound; "sum" is what the authors' code does.
        component_bias: give every component its own bias, if the layer has one.
        perturbation: multiply the weights by the factors, or add their outer product.
        embeddings: convert embeddings, too, with a factor for each feature.
        noise: in training, each "row" has its own noise, or the rows of a "component" share one draw a pass, as in the
            authors' code. Sharing needs fewer random numbers and gives the gradient more variance.

    Example:
        >>> bnn = lb.convert(net, lb.Rank1(components=4, prior_std=0.1))
    """

    name: ClassVar[str] = "rank1"
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS
    later: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"embeddings": False, "noise": "row", "centre": True, "other": "none"}
    )
    space: ClassVar[Space] = MappingProxyType({"prior_std": (0.02, 0.5), "init_std": (0.02, 0.5)})
    scaled: ClassVar[tuple[str, ...]] = ("init_std", "init_spread")

    components: int = 4
    posterior: LawName = "normal"
    prior: LawName = "normal"
    prior_std: float = 0.1
    factors: Factors = "both"
    init: Init = "around_one"
    init_spread: float = 0.1
    init_std: float = 0.1
    sign_probability: float = 0.5
    kl_over: KlOver = "mean"
    component_bias: bool = True
    perturbation: Perturbation = "multiplicative"
    embeddings: bool = False
    noise: NoiseOf = "row"
    centre: bool = True
    other: Other = "none"

    def __post_init__(self) -> None:
        check_components(self.components)
        check_choice("noise", self.noise, get_args(NoiseOf))
        check_positive(prior_std=self.prior_std)
        check_std(init_std=self.init_std)
        check_at_least_zero(init_spread=self.init_spread)
        check_share(sign_probability=self.sign_probability)
        check_choice("factors", self.factors, get_args(Factors))
        check_choice("other", self.other, get_args(Other))
        check_choice("init", self.init, get_args(Init))
        check_choice("kl_over", self.kl_over, get_args(KlOver))
        check_choice("perturbation", self.perturbation, get_args(Perturbation))
        check_choice("posterior", self.posterior, get_args(LawName))
        check_choice("prior", self.prior, get_args(LawName))
        self._check_pair()
        if self.other == "point" and (self.factors == "both" or self.perturbation == "additive"):
            raise ValueError(
                "other='point' is for the side that is not random: expected factors='input' or 'output', and "
                f"perturbation='multiplicative', got {self.factors!r} and {self.perturbation!r}"
            )
        if self.embeddings:
            self._check_embeddings()
            object.__setattr__(self, "targets", (*LINEAR_MAPS, *EMBEDDINGS))

    def _check_embeddings(self) -> None:
        if self.factors == "input" or self.perturbation == "additive":
            raise ValueError(
                "an embedding has factors on its features, which are outputs, and only multiplied: expected "
                f"factors='both' or 'output' and perturbation='multiplicative', got {self.factors!r} and "
                f"{self.perturbation!r}"
            )

    def _check_pair(self) -> None:
        one = torch.ones(1)
        kl(law(self.posterior).distribution(one, one), law(self.prior).distribution(one, one))
        if self._positive() and (self.init == "random_sign" or self.perturbation == "additive"):
            raise ValueError(
                f"a factor under a {self.posterior} posterior and a {self.prior} prior is positive: expected "
                f"init='around_one' and perturbation='multiplicative', got {self.init!r} and {self.perturbation!r}"
            )
        if self.init == "random_sign" and self.perturbation == "additive":
            raise ValueError("additive factors lie around zero: expected init='around_one', got 'random_sign'")

    def _positive(self) -> bool:
        return law(self.posterior).positive or law(self.prior).positive

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

    def centres(self, layer: nn.Module | None = None) -> dict[str, float]:
        """Return the sides that carry factors, of one layer or of any, with the centres of their factors.

        Additive factors are centred at zero on one side, which leaves the function unchanged on average.
        """
        both = self.factors == "both" or self.other == "point"
        sides = ("input", "output") if both else (self.factors,)
        sides = ("output",) if isinstance(layer, EMBEDDINGS) else sides  # words cannot be multiplied
        zero = sides[0] if self.perturbation == "additive" else None
        return {side: 0.0 if side == zero else 1.0 for side in sides}

    def is_random(self, side: str) -> bool:
        """Return whether a side has the posterior and the prior; the other one has points, if any."""
        return self.factors in ("both", side)

    def factor(self, side: str, count: int, centre: float, like: Tensor) -> Factor:
        """Make the factors of one side of a layer whose weights are `like`."""
        shape = (self.components, count)
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.init == "random_sign":
            centres = random_signs(self.sign_probability, shape, device=like.device, dtype=dtype)
        else:
            spread = self.init_spread
            centres = spread_around(centre, spread, shape, device=like.device, dtype=dtype, centre=self.centre)
        if not self.is_random(side):
            return Factor("point", centres, torch.zeros_like(centres))
        if self._positive():
            require_positive(centres)
        return Factor(self.posterior, centres, torch.full_like(centres, self.init_std))


@dataclass(frozen=True, kw_only=True)
class BatchEnsemble(Method):
    """An ensemble whose members share the weights and differ in two vectors and a bias per layer (no KL).

    No prior holds the factors: keep their learning rate low (half of the weights' in the paper). The default spread is
    for long training. To fine-tune a trained network, use `init_spread=0.05`.

    Attributes:
        components: K, the number of members.
        init: member factors around one, or random signs (**which discard a trained function**).
        init_spread: standard deviation of the factors around one before centring, which multiplies it by sqrt(1 - 1/K).
        sign_probability: probability of +1 under random signs.
        component_bias: give every member its own bias, if the layer has one.
        centre: shift the factors to an average of one over the members. Without it the standard deviation is
            `init_spread`: for training from scratch.

    Example:
        >>> bnn = lb.convert(net, lb.BatchEnsemble(components=4))
        >>> tuned = lb.convert(trained, lb.BatchEnsemble(components=4, init_spread=0.05))
    """

    name: ClassVar[str] = "batch_ensemble"
    posterior_rate: ClassVar[float] = 0.5
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS
    later: ClassVar[Mapping[str, Any]] = MappingProxyType({"centre": True})
    space: ClassVar[Space] = MappingProxyType({"init_spread": (0.1, 1.0)})

    components: int = 4
    init: Init = "around_one"
    init_spread: float = 0.4
    sign_probability: float = 0.5
    component_bias: bool = True
    centre: bool = True

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> Rank1:
        """Return the same method in terms of rank-1 factors: point masses without a prior."""
        return Rank1(posterior="point", prior="point", **self.fields())

    @override
    def wrap(self, layer: nn.Module) -> Rank1Layer:
        return Rank1Layer(layer, self, self.config())

    @override
    def notice(self) -> str | None:
        return self.config().notice()
