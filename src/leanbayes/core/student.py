"""`Student`: a plain network that returns the uncertainty of a stochastic one in a single pass.

The last linear layer of the network has a few more outputs u, next to the usual ones:

    classes        mean p = softmax(logits),   total = H(p),   epistemic = sigmoid(u) H(p)        one u per position
    yes or no      mean p = sigmoid(logit),    total = H(p),   epistemic = sigmoid(u) H(p)        one u per answer
    real targets   mean and aleatoric variance as the likelihood reads them,   epistemic = exp(u)  one u per target

and total = aleatoric + epistemic. A mean and a mutual information below its entropy determine one Dirichlet, and every
Dirichlet has such a pair: the two numbers are its parameters, without digamma functions.

`lb.distill` trains it (`training/distillation.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.prediction import Decomposition, Prediction
from leanbayes.distributions.likelihoods import Bernoulli, Categorical, exact, Gaussian, Likelihood
from leanbayes.runtime.batches import call, Inputs, Output
from leanbayes.runtime.twins import in_eval_mode

NAME = "student"  # in checkpoints, results and the command line
LARGEST_LOG_VARIANCE = 60.0
"""Bound of u for real targets: its exponential stays finite in float32."""

MAPS = (nn.Linear, nn.modules.conv._ConvNd)
REMEDY = "let the network end in a linear layer or convolution whose outputs it returns (logits, not probabilities)"


@dataclass(frozen=True)
class Place:
    """Where the outputs of a student are.

    Attributes:
        path: dotted path of the layer with the further outputs.
        axis: of the network's outputs, counted from the left, that holds them after the usual ones.
        outputs: number of the usual outputs.
        extra: number of the further outputs.
        flat: whether the usual output has no axis for its single number, (B,) instead of (B, 1).
    """

    path: str
    axis: int
    outputs: int
    extra: int
    flat: bool = False


class Student(nn.Module):
    """A network with further outputs, from which `lb.predict` reads all uncertainties after one pass.

    `student(x)` returns the usual outputs of the network, as if it were plain.

    Attributes:
        network: the plain network with the wider layer.
        likelihood: reads the usual outputs; that of the teacher.
        place: where the outputs are.
        report: how well it agrees with its teacher on held-out rows, by name; see `lb.distill`.
        history: of its training, if it was trained in this process.
    """

    def __init__(
        self, network: nn.Module, likelihood: Likelihood, place: Place, report: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.network, self.likelihood, self.place = network, likelihood.requires_grad_(False), place
        self.report = dict(report or {})
        self.history: list[dict[str, Any]] = []
        self.training = network.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        usual = self.split(call(self.network, kwargs or args))[0]
        return usual.squeeze(-1) if self.place.flat else usual

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the usual and the further outputs of the network; those of classes have no axis of their own."""
        place = self.place
        usual, further = torch.split(exact(outputs), [place.outputs, place.extra], place.axis)
        return usual, further.squeeze(place.axis) if isinstance(self.likelihood, Categorical) else further

    def read(self, outputs: Tensor) -> Decomposition:
        """Return the mean and the uncertainties from the outputs of the network, in elementary operations."""
        usual, further = self.split(outputs)
        mean, own = self.likelihood.predictive(usual)
        if self.likelihood.measure == "variance":
            epistemic = further.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE).exp()
            return Decomposition(mean, own + epistemic, own, epistemic)
        epistemic = further.sigmoid() * own
        return Decomposition(mean, own, own - epistemic, epistemic)

    def prediction(self, outputs: Tensor, likelihood: Likelihood) -> Prediction:
        """Return the outputs of the network as a prediction; the likelihood must be of the student's kind.

        For real targets it has one draw, with the whole variance: its density is the Gaussian of mean and total
        variance. For classes it has none; densities need only the mean.
        """
        if type(likelihood) is not type(self.likelihood):
            kind, given = type(self.likelihood).__name__, type(likelihood).__name__
            raise ValueError(f"expected the likelihood of the student, {kind}, got {given}; leave it out")
        found = self.read(outputs)
        real = self.likelihood.measure == "variance"
        samples, variances = (found.mean[None], found.total[None]) if real else (None, None)
        return Prediction(*found, samples=samples, variances=variances, likelihood=likelihood)

    @property
    def extra_parameters(self) -> int:
        """The number of weights and biases of the further outputs."""
        layer: Any = self.network.get_submodule(self.place.path)
        own: int = sum(parameter.numel() for parameter in layer.parameters())
        return own * self.place.extra // (self.place.outputs + self.place.extra)

    def extra_repr(self) -> str:
        """Show the layer with further outputs."""
        return f"further outputs: {self.place.extra} of '{self.place.path}'"


def student_of(network: nn.Module, likelihood: Likelihood, example: Inputs, *, output: Output | None = None) -> Student:
    """Return a copy of a plain network with further outputs, which give zero; its usual outputs are the same.

    Raises:
        ValueError: if its last layer cannot have further outputs, or does not give the outputs of the network.
    """
    if not isinstance(likelihood, (Categorical, Bernoulli, Gaussian)):
        raise ValueError(
            f"expected a teacher with lb.Categorical, lb.Bernoulli or lb.Gaussian, got {type(likelihood).__name__}"
        )
    with torch.no_grad(), in_eval_mode(network):
        path, before = _last_layer(network, example, output)
        size = _outputs_of(network.get_submodule(path))
        extra = 1 if isinstance(likelihood, Categorical) else size
        if isinstance(likelihood, Gaussian) and likelihood.heteroscedastic:
            extra = size // 2
        after = _outputs_with_more(wide := widened(network, path, extra), example, output, path)
    flat = before.dim() == after.dim() - 1
    place = Place(path, _wider_axis(before.unsqueeze(-1) if flat else before, after, path), size, extra, flat)
    student = Student(wide, copy.deepcopy(likelihood), place)
    _check_same(student, before, after, path)
    return student


def widened(network: nn.Module, path: str, extra: int) -> nn.Module:
    """Return a copy of a network whose layer at `path` has further outputs with weights and biases of zero."""
    network = copy.deepcopy(network)
    old: Any = network.get_submodule(path)
    if type(old).forward not in (kind.forward for kind in _kinds()) or old.__dict__.get("parametrizations"):
        raise ValueError(
            f"expected the last layer '{path}' to be a torch.nn.Linear or convolution, got {type(old).__name__}, whose "
            f"weights leanbayes does not extend; {REMEDY}"
        )
    if getattr(old, "groups", 1) != 1:
        raise ValueError(f"expected the last layer '{path}' to have one group of channels, got {old.groups}; {REMEDY}")
    layer = copy.copy(old)
    layer._parameters = dict(old._parameters)
    axis = 1 if isinstance(old, nn.modules.conv._ConvTransposeNd) else 0
    shape = list(old.weight.shape)
    shape[axis] = extra
    bias = old.weight.new_zeros(_outputs_of(old)) if old.bias is None else old.bias.detach()
    layer.weight = nn.Parameter(torch.cat([old.weight.detach(), old.weight.new_zeros(shape)], axis))
    layer.bias = nn.Parameter(torch.cat([bias, bias.new_zeros(extra)]))
    setattr(layer, "out_features" if isinstance(old, nn.Linear) else "out_channels", _outputs_of(old) + extra)
    return _replaced(network, old, layer)


def _kinds() -> tuple[Any, ...]:
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *transposed)


def _replaced(network: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put a layer in the place of another wherever it is registered, and return the root."""
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new
    return new if network is old else network


def _outputs_of(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _last_layer(network: nn.Module, example: Inputs, output: Output | None) -> tuple[str, Tensor]:
    """Return the path of the linear layer or convolution that is called last, and the outputs of the network."""
    called: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, path=path: called.append(path))
        for path, module in network.named_modules()
        if isinstance(module, MAPS)
    ]
    try:
        outputs = call(network, example, output)
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise ValueError(f"expected a network that calls a linear layer or a convolution, got none; {REMEDY}")
    return called[-1], outputs


def _outputs_with_more(wide: nn.Module, example: Inputs, output: Output | None, path: str) -> Tensor:
    try:
        with in_eval_mode(wide):
            return call(wide, example, output)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"the network cannot work with more outputs of its last layer '{path}' ({reason}); {REMEDY}"
        ) from error


def _wider_axis(before: Tensor, after: Tensor, path: str) -> int:
    """Return the axis of the outputs that has grown with the layer."""
    alike = before.dim() == after.dim()
    grown = [axis for axis in range(before.dim()) if alike and before.shape[axis] != after.shape[axis]]
    if len(grown) != 1:
        raise ValueError(
            f"expected the outputs of the last layer '{path}' on one axis of the network's outputs, got outputs of "
            f"shape {tuple(before.shape)}, and {tuple(after.shape)} with more outputs in that layer; {REMEDY}"
        )
    return grown[0]


def _check_same(student: Student, before: Tensor, after: Tensor, path: str) -> None:
    """Raise unless the usual outputs are those of the network without further ones."""
    place = student.place
    if after.shape[place.axis] == place.outputs + place.extra:
        usual = student.split(after)[0]
        if torch.allclose(usual.flatten(), exact(before).flatten(), rtol=1e-4, atol=1e-5):
            return
    raise ValueError(
        f"expected the network to return the outputs of its last layer '{path}' unchanged, got other outputs when that "
        f"layer has more of them; {REMEDY}"
    )
