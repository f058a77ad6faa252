"""Last-layer Laplace approximation (MacKay, 1992; Daxberger et al., 2021): a Gaussian around the trained last layer.

The network is trained plainly. Then its last linear layer, with weights and bias theta, gets the posterior

    theta ~ Normal(theta*, (H + delta I)^-1),      H = sum_n J_n^T Lambda_n J_n,

where J_n is the Jacobian of the outputs for row n and Lambda_n the Fisher information of the likelihood in the outputs.
With inputs phi_n of the layer (a last entry of one for the bias), H = sum_n Lambda_n (x) phi_n phi_n^T. This is the
generalised Gauss-Newton matrix, for classes the Hessian itself. Large layers use the Kronecker product of sums,

    H  ~  (sum_n Lambda_n) (x) (1/N sum_n phi_n phi_n^T),      exact if all Lambda_n are equal.

The precision delta of the prior Normal(0, 1/delta) maximises the evidence at theta*, whose only stationary point is

    delta ||theta*||^2  =  sum_i lambda_i / (lambda_i + delta),      lambda_i the eigenvalues of H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.likelihoods import Bernoulli, Categorical, exact, Gaussian, Likelihood
from leanbayes.layers.family import Conv1D, LinearFamily, LinearLike, TRANSPOSED
from leanbayes.methods._base import Method, StochasticLayer, Training, without_autocast
from leanbayes.methods._checks import check_positive, whole_number
from leanbayes.runtime.batches import call, device_of, Output, pairs_of, to_device
from leanbayes.runtime.distributed import refuse_shards, summed
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import draws, Variables, Width
from leanbayes.runtime.twins import in_eval_mode

ROWS_AT_ONCE = 1024
"""Rows of a block of tensors that are given whole."""

LARGEST_SIDE = 10_000
"""Largest side of a stored factor, 400 MB."""

PRECISIONS = (1e-6, 1e9)
"""Range of the prior's precision: without curvature or without weights the evidence has no maximum."""

HALVINGS = 100
"""Steps of the search for the precision: they halve the range of its logarithm to the last bit."""


class LaplaceLayer(StochasticLayer):
    """The last linear layer with a Gaussian over its weights and bias; plain until `after_training` has filled it.

    Attributes:
        sides: outputs, and inputs with one for a bias: the shape of all weights as a matrix.
        full: whether the covariance is full, or of Kronecker form.
        fitted: whether the posterior is filled.
    """

    method: LastLayerLaplace
    family: LinearFamily
    row_noise = False

    def __init__(self, base: Any, method: LastLayerLaplace) -> None:
        super().__init__(base, method)
        outputs, inputs = self.family.outputs(base), self.family.inputs(base) + (base.bias is not None)
        self.sides = outputs, inputs
        self.nodes = outputs * inputs
        self.full = self.nodes <= method.full_up_to
        self.fitted, self.log_choices = False, 0.0
        shapes: dict[str, tuple[int, ...]] = {"root": (self.nodes, self.nodes)}
        if not self.full:
            shapes = {"left": (outputs, outputs), "right": (inputs, inputs), "stds": self.sides}
        _check_sides(shapes)
        for name, shape in {**shapes, "prior_precision": ()}.items():
            self.posterior.register_buffer(name, torch.zeros(shape, dtype=self.wide, device=base.weight.device))
        self.stored = sum(buffer.numel() for buffer in self.posterior.buffers())

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        if not self.fitted:
            plain: Tensor = self.base(x, *args)
            return plain
        drawn = self.state.variables_of(self, x.shape[0])
        y = self.family.linear(self.base, x, drawn["weight"][0], *args)
        return y + self.spread(drawn["bias"][:1], y) if "bias" in drawn else y

    @override
    def kl(self) -> Tensor:
        return torch.zeros((), device=self.device)

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (NoiseSpec("normal", self.sides, per_row=False, counted=True),) if self.fitted else ()

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "weight" and "bias" (R, ...), R = 1 unless several draws are fixed."""
        centres = {"weight": self.weight_now} | ({} if self.base.bias is None else {"bias": self.base.bias})
        if not noise:
            return {name: centre[None] for name, centre in centres.items()}
        drawn, inputs = self.deviations(noise[0]), self.family.inputs(self.base)
        weights = drawn[..., :inputs]
        found = {"weight": weights.mT if isinstance(self.base, TRANSPOSED) else weights, "bias": drawn[..., -1]}
        return {name: (centre + found[name]).to(centre.dtype) for name, centre in centres.items()}

    def deviations(self, noise: Tensor) -> Tensor:
        """Return draws of weights and bias (R, outputs, inputs) without their mean, from standard noise."""
        kept = self.posterior
        with self._exact():
            if self.full:
                drawn: Tensor = noise.to(kept.root.dtype).flatten(1) @ kept.root
                return drawn.view(-1, *self.sides)
            return kept.left @ (noise.to(kept.stds.dtype) * kept.stds) @ kept.right.mT  # type: ignore[no-any-return]

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(variables)

    @property
    def centre(self) -> Tensor:
        """The weights, with the bias as last column, as one matrix in float64."""
        weight = self.weight_now.detach().double()
        weight = weight.mT if isinstance(self.base, TRANSPOSED) else weight
        return weight if self.base.bias is None else torch.cat([weight, self.base.bias.detach().double()[:, None]], 1)

    def fill(self, curvature: FullCurvature | KroneckerCurvature) -> None:
        """Set the posterior from the curvature at the trained weights, and the precision that the method asks for."""
        given = self.method.prior_precision
        precision = (
            best_precision(curvature.eigenvalues(), self.centre.to(curvature.device)) if given is None else given
        )
        for name, tensor in {**curvature.posterior(precision), "prior_precision": torch.tensor(precision)}.items():
            self.posterior.get_buffer(name).copy_(tensor)
        self.set_fitted(True)

    def set_fitted(self, fitted: bool) -> None:
        """Turn the noise on or off; passes to come plan their noise again."""
        self.fitted, self.log_choices, self.state.plan = fitted, math.inf if fitted else 0.0, None

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}posterior.prior_precision")
        if isinstance(stored, Tensor) and not stored.is_meta:
            self.set_fitted(bool(stored > 0))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _exact(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, which would round the draws."""
        return without_autocast(self.posterior.prior_precision.device)


class FullCurvature:
    """The sum H over rows of Lambda_n (x) phi_n phi_n^T, in float64."""

    def __init__(self, sides: tuple[int, int], device: torch.device) -> None:
        self.sides, self.device = sides, device
        outputs, inputs = sides
        self.blocks = torch.zeros(outputs, inputs, outputs, inputs, dtype=torch.float64, device=device)

    def add(self, features: Tensor, information: Tensor) -> None:
        """Add rows: their inputs (n, inputs), and their information (n, outputs, outputs)."""
        for one in range(self.sides[0]):
            for other in range(one + 1):
                block = (features * information[:, one, other, None]).mT @ features
                self.blocks[one, :, other] += block
                if other < one:
                    self.blocks[other, :, one] += block

    def share(self) -> None:
        """Sum over all processes."""
        summed(self.blocks)

    @property
    def matrix(self) -> Tensor:
        """H, for weights in the order of a flattened matrix (outputs, inputs)."""
        size = math.prod(self.sides)
        return self.blocks.view(size, size)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of H, at least zero."""
        values: Tensor = torch.linalg.eigvalsh(self.matrix)
        return values.clamp(min=0)

    def posterior(self, precision: float) -> dict[str, Tensor]:
        """Return L^-1 for H + delta I = L L^T: noise times it has the covariance (H + delta I)^-1."""
        identity = torch.eye(len(self.matrix), dtype=torch.float64, device=self.device)
        lower = torch.linalg.cholesky(self.matrix + precision * identity)
        return {"root": torch.linalg.solve_triangular(lower, identity, upper=False)}


class KroneckerCurvature:
    """The sums over rows of Lambda_n and of phi_n phi_n^T, in float64; H is their product divided by N."""

    def __init__(self, sides: tuple[int, int], device: torch.device) -> None:
        self.device = device
        self.information, self.squares = (torch.zeros(n, n, dtype=torch.float64, device=device) for n in sides)
        self.rows = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, features: Tensor, information: Tensor) -> None:
        """Add rows: their inputs (n, inputs), and their information (n, outputs, outputs)."""
        self.information += information.sum(0)
        self.squares += features.mT @ features
        self.rows += len(features)

    def share(self) -> None:
        """Sum over all processes."""
        for tensor in (self.information, self.squares, self.rows):
            summed(tensor)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of H, at least zero, outputs on the first axis."""
        left, right = (torch.linalg.eigvalsh(side).clamp(min=0) for side in (self.information, self.squares))
        return torch.outer(left, right) / self.rows

    def posterior(self, precision: float) -> dict[str, Tensor]:
        """Return the eigenvectors of both sides, and the standard deviations in their basis."""
        (few, left), (many, right) = (torch.linalg.eigh(side) for side in (self.information, self.squares))
        values = torch.outer(few.clamp(min=0), many.clamp(min=0)) / self.rows
        return {"left": left, "right": right, "stds": (values + precision).rsqrt()}


def best_precision(eigenvalues: Tensor, centre: Tensor) -> float:
    """Return the prior precision of the highest evidence, where delta ||theta||^2 = sum lambda / (lambda + delta).

    The left side rises and the right side falls with delta, so there is one solution; its logarithm is bisected.
    """
    size = float(centre.square().sum())
    low, high = (math.log(end) for end in PRECISIONS)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        delta = math.exp(middle)
        if delta * size < float((eigenvalues / (eigenvalues + delta)).sum()):
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def information(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return the Fisher information (n, C, C) of one target in its outputs (n, C).

    Classes: diag(p) - p p^T. Yes or no: p (1 - p) for each. Real numbers: 1 / variance for each mean; where the
    network predicts the variance v from a raw output r, too: (dv/dr)^2 / (2 v^2).
    """
    if isinstance(likelihood, Categorical):
        p = outputs.softmax(1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]
    if isinstance(likelihood, Bernoulli):
        p = outputs.sigmoid()
        return torch.diag_embed(p * (1 - p))
    _, variance = likelihood.predictive(outputs)
    if not isinstance(likelihood, Gaussian) or not likelihood.heteroscedastic:
        return torch.diag_embed(1 / variance)
    slope = torch.sigmoid(outputs.chunk(2, -1)[1])
    return torch.diag_embed(torch.cat([1 / variance, 0.5 * (slope / variance).square()], -1))


@dataclass(frozen=True, kw_only=True)
class LastLayerLaplace(Method):
    """A Gaussian around the trained last layer, computed after a plain training: no KL, no noise in training.

    The last linear layer is the last that the network registers; name another one with `where`. Its outputs must be
    those of the network. `fit` computes the posterior at its end; after a loop of your own, call
    `after_training(model, loader)`. Until then all draws are the plain network. Class weights and label smoothing
    belong to the training loss and do not enter. A network that fits all its training rows has little curvature
    there: the evidence then chooses a wide posterior, whose probabilities are too cautious. Compare the likelihood of
    held-out rows under larger values of `prior_precision` (docs/gotchas.md).

    Attributes:
        prior_precision: of the Normal prior over the weights and the bias; None maximises the evidence.
        full_up_to: most weights of a layer with a full covariance; larger layers have a Kronecker-factored one.

    Example:
        >>> bnn = lb.convert(net, lb.LastLayerLaplace())
        >>> lb.fit(bnn, (x, y))
        >>> p = lb.predict(bnn, x_new)
    """

    name: ClassVar[str] = "laplace"
    targets: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, Conv1D, LinearLike)
    things: ClassVar[str] = "last linear layers"
    partial: ClassVar[bool] = True
    late: ClassVar[float] = 0.0
    post_hoc: ClassVar[bool] = True

    prior_precision: float | None = None
    full_up_to: int = 5000

    def __post_init__(self) -> None:
        if self.prior_precision is not None:
            check_positive(prior_precision=self.prior_precision)
        if whole_number("full_up_to", self.full_up_to) < 0:
            raise ValueError(f"expected full_up_to to be at least 0, got {self.full_up_to!r}")

    @override
    def wrap(self, layer: nn.Module) -> LaplaceLayer:
        return LaplaceLayer(layer, self)

    @override
    def wrap_all(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, StochasticLayer]:
        if len(layers) > 1:
            raise ValueError(
                f"LastLayerLaplace expected one layer, the last, got {len(layers)}: {', '.join(layers)}; name it with "
                "where="
            )
        return super().wrap_all(model, layers)

    @override
    def choose(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        return {path for path, _ in layers[-1:]}

    @override
    @torch.no_grad()
    def before_training(
        self, model: nn.Module, data: Training, likelihood: object = None, *, output: Output | None = None
    ) -> None:
        for layer, loss in self._layers(model, likelihood):
            next(_answers(model, layer, data, loss, output), None)

    @override
    @torch.no_grad()
    def after_training(
        self, model: nn.Module, data: Training, likelihood: object = None, *, output: Output | None = None
    ) -> None:
        for layer, loss in self._layers(model, likelihood):
            refuse_shards(layer.parameters(), layer.path)
            layer.fill(_curvature(model, layer, data, loss, output))

    def _layers(self, model: nn.Module, given: object) -> Iterator[tuple[LaplaceLayer, Likelihood]]:
        """Yield the layers of this method, each with the likelihood, by default the model's own."""
        stochastic = [module for module in model.modules() if isinstance(module, StochasticLayer)]
        kept = next((layer.likelihood for layer in stochastic if layer.likelihood is not None), None)
        loss = given or kept or Categorical()
        if not isinstance(loss, (Categorical, Bernoulli, Gaussian)):
            raise TypeError(
                "LastLayerLaplace needs the curvature of a likelihood, lb.Categorical(), lb.Bernoulli() or "
                f"lb.Gaussian(), got {type(loss).__name__}; pass one of them as likelihood="
            )
        own = [layer for layer in stochastic if isinstance(layer, LaplaceLayer)]
        mine = [layer for layer in own if layer.method == self]
        if not mine:
            found = ", ".join(dict.fromkeys(repr(layer.method) for layer in own)) or "no such layer"
            raise ValueError(f"expected a model that was converted with {self!r}, got {found}; use the same method")
        yield from ((layer, loss) for layer in mine)

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {"default": cls(), "kronecker": cls(full_up_to=0, prior_precision=1.0)}


def _curvature(
    model: nn.Module, layer: LaplaceLayer, data: Any, likelihood: Likelihood, output: Output | None
) -> FullCurvature | KroneckerCurvature:
    """Return the curvature at the trained weights, summed over the training set of all processes."""
    device = layer.device if layer.device.type != "mps" else torch.device("cpu")  # which has no float64
    found = (FullCurvature if layer.full else KroneckerCurvature)(layer.sides, device)
    rows = 0
    for features, outputs, counted in _answers(model, layer, data, likelihood, output):
        if layer.base.bias is not None:
            features = F.pad(features, (0, 1), value=1.0)
        found.add(features[counted].to(device), information(likelihood, outputs[counted]).to(device))
        rows += len(features)
    found.share()
    if not rows:
        raise ValueError("expected training data for the curvature of the last layer, got no batch")
    return found


def _answers(
    model: nn.Module, layer: LaplaceLayer, data: Any, likelihood: Likelihood, output: Output | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs (n, inputs) and outputs (n, C) of the last layer in float64, and which targets count, by batch."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    wide = torch.float64 if layer.device.type != "mps" else torch.float32
    try:
        with in_eval_mode(model), draws(model, mean=True):
            for x, y in pairs_of(data, ROWS_AT_ONCE):
                seen.clear()
                outputs = call(model, to_device(x, device_of(model)), output)
                features, own = _last(layer, seen, outputs, likelihood)
                counted = torch.ones(len(own), dtype=torch.bool, device=own.device)
                if isinstance(likelihood, Categorical):
                    counted = y.to(own.device).long().flatten() != likelihood.ignore_index
                yield features.to(wide), exact(own).to(wide), counted
    finally:
        handle.remove()


def _last(
    layer: LaplaceLayer, seen: Sequence[tuple[Tensor, Tensor]], outputs: Tensor, likelihood: Likelihood
) -> tuple[Tensor, Tensor]:
    """Return inputs and outputs of the layer as matrices; raise unless it is the last layer of the network."""
    own = seen[0][1] if len(seen) == 1 else outputs.new_empty(0)
    same = own.numel() == outputs.numel() and torch.equal(own.flatten(), outputs.flatten().to(own.dtype))
    if not same:
        raise ValueError(
            f"LastLayerLaplace expected the outputs of layer '{layer.path}' to be those of the network, got others "
            f"({len(seen)} calls in a pass); name the last layer with where="
        )
    if isinstance(likelihood, Categorical) and likelihood.axis % outputs.dim() != outputs.dim() - 1:
        raise ValueError(
            f"LastLayerLaplace expected the classes on the last axis, got them on axis {likelihood.axis} of "
            f"{outputs.dim()}; use lb.Categorical(axis=-1)"
        )
    return seen[0][0].flatten(0, -2), own.flatten(0, -2)


def _check_sides(shapes: Mapping[str, tuple[int, ...]]) -> None:
    largest = max(max(shape) for shape in shapes.values())
    if largest > LARGEST_SIDE:
        raise ValueError(
            f"LastLayerLaplace expected a last layer whose covariance has at most {LARGEST_SIDE:,} rows, got "
            f"{largest:,}; name a smaller layer with where=, or lower full_up_to"
        )
