"""Likelihoods map network outputs to probabilities of targets. All task knowledge is here."""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn, Tensor

Measure = Literal["entropy", "variance"]


class Likelihood(nn.Module, abc.ABC):
    """Distribution of a target given a network's output.

    Attributes:
        measure: of uncertainty: entropies in nats, or variances.
        options: constructor arguments, as checkpoints store them.
    """

    measure: ClassVar[Measure]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    @abc.abstractmethod
    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | outputs) for every target, in float32, or in float64 if the outputs are."""

    @abc.abstractmethod
    def predictive(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prediction of one draw (probabilities or means) and its uncertainty (entropy or variance)."""

    @abc.abstractmethod
    def log_prob_of_mixture(self, mean: Tensor, samples: Tensor | None, noise: Tensor | None, y: Tensor) -> Tensor:
        """Return log mean_s p(y | draw s) from the mean and the samples of `predictive`."""

    def average(self, log_prob: Tensor, y: Tensor) -> Tensor:
        """Average log-probabilities over the targets that count."""
        return log_prob.mean()

    def split(self, count: int) -> Sequence[Likelihood]:
        """Return the likelihood of each member of an ensemble: here the same one, which has nothing to learn."""
        return [self] * count

    def join(self, parts: Sequence[Likelihood]) -> None:
        """Take what the members have learned, each with its part of `split`."""

    def targets_per_row(self, y: Tensor) -> int:
        """Return the number of targets per row that `average` averages over; 1 if `log_prob` is per row.

        The bound of N rows divides the KL by N times this number. Ignored targets count, too.
        """
        return 1

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean of -log p(y | outputs), the training loss."""
        return -self.average(self.log_prob(outputs, y), y)

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.nll(outputs, y)


class Categorical(Likelihood):
    """Classes, from logits on one axis: (B, C) with targets (B,), or dense (B, C, ...) with targets (B, ...).

    `log_prob` is zero for ignored targets. The training loss is the mean of a batch over the targets that count, with
    their class weights. Several processes and accumulated batches average such means by rows.

    Args:
        axis: the class axis of the outputs.
        ignore_index: targets with this value are ignored; targets are whole numbers of any type.
        class_weight: weight of each class in the training loss.
        label_smoothing: of the training loss, as in `torch.nn.CrossEntropyLoss`.
    """

    measure = "entropy"
    class_weight: Tensor | None

    def __init__(
        self,
        axis: int = 1,
        ignore_index: int = -100,
        class_weight: Tensor | list[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        weight = None if class_weight is None else torch.as_tensor(class_weight, dtype=torch.float32)
        if weight is not None and not (weight.dim() == 1 and bool(((weight >= 0) & weight.isfinite()).all())):
            raise ValueError(
                f"expected class_weight to be a number of at least zero for each class, got {class_weight!r}"
            )
        if not (isinstance(label_smoothing, (int, float)) and 0 <= label_smoothing <= 1):
            raise ValueError(f"expected label_smoothing to lie between 0 and 1, got {label_smoothing!r}")
        super().__init__(
            axis=axis,
            ignore_index=ignore_index,
            class_weight=None if weight is None else weight.tolist(),
            label_smoothing=label_smoothing,
        )
        self.axis, self.ignore_index, self.label_smoothing = axis, ignore_index, label_smoothing
        self.register_buffer("class_weight", weight, persistent=False)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        logits = self._logits(outputs)
        y = class_numbers(y, logits)
        return -self._cross_entropy(logits, y, reduction="none")

    def average(self, log_prob: Tensor, y: Tensor) -> Tensor:
        return log_prob.sum() / (y.long() != self.ignore_index).sum()

    def targets_per_row(self, y: Tensor) -> int:
        return y.shape[1:].numel()

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        logits = self._logits(outputs)
        weight = None if self.class_weight is None else self.class_weight.to(logits.dtype)
        y = class_numbers(y, logits)
        return self._cross_entropy(logits, y, weight=weight, label_smoothing=self.label_smoothing)

    def predictive(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self._logits(outputs).softmax(1)
        return probabilities, entropy(probabilities)

    def log_prob_of_mixture(self, mean: Tensor, samples: Tensor | None, noise: Tensor | None, y: Tensor) -> Tensor:
        y = class_numbers(y, mean)
        check_classes(y, mean.shape[1], self.ignore_index)
        ignored = y == self.ignore_index
        picked = mean.gather(1, y.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
        return picked.log().masked_fill(ignored, 0.0)

    def _cross_entropy(self, logits: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Return torch's cross-entropy; if torch notices a class without logit, raise an error that names it."""
        try:
            return F.cross_entropy(logits, y, ignore_index=self.ignore_index, **options)
        except IndexError:
            check_classes(y, logits.shape[1], self.ignore_index)
            raise

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return logits with classes on axis 1, in the type of `exact`."""
        if outputs.dim() < 2 or outputs.shape[self.axis] < 2:
            raise ValueError(
                f"Categorical expected at least two classes on axis {self.axis}, got outputs of shape "
                f"{tuple(outputs.shape)}; for regression use lb.Gaussian(), for one logit lb.Bernoulli()"
            )
        return exact(outputs.movedim(self.axis, 1))


class Bernoulli(Likelihood):
    """Yes or no, from one logit each; targets have the shape of the outputs (a last axis of one may be left out).

    Targets are 0 (no), 1 (yes), or a share between them.
    """

    measure = "entropy"

    def __init__(self) -> None:
        super().__init__()

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        outputs = exact(outputs)
        y = match_shape(y, outputs, "Bernoulli").to(outputs.dtype)
        return -F.binary_cross_entropy_with_logits(outputs, y, reduction="none")

    def targets_per_row(self, y: Tensor) -> int:
        return y.shape[1:].numel()

    def predictive(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        probability = exact(outputs).sigmoid()
        return probability, binary_entropy(probability)

    def log_prob_of_mixture(self, mean: Tensor, samples: Tensor | None, noise: Tensor | None, y: Tensor) -> Tensor:
        y = match_shape(y, mean, "Bernoulli").to(mean.dtype)
        check_answers(y)
        # Near one, 1 - p is rounded to zero although the network's value is small but positive: 2^-25 in float32.
        return torch.xlogy(y, mean) + torch.xlogy(1 - y, (1 - mean).clamp(min=torch.finfo(mean.dtype).eps / 4))


class Gaussian(Likelihood):
    """Real targets (B, D) with Gaussian noise: fixed, learned (one for all), or predicted for each input.

    `log_prob` is joint: summed over all axes but the first. Members of an ensemble that are trained apart learn a noise
    each. `predict` reads each member with its own; where the member of a row is not known, the variance is their mean.

    Args:
        std: standard deviation of the noise; the starting value if it is learned.
        learn: learn the standard deviation with the network.
        heteroscedastic: the network predicts it: outputs are (B, 2 D), means first, then raw values whose softplus
            is the variance.
        members: number of networks with a learned noise each; `fit` sets it for an ensemble.
    """

    measure = "variance"

    def __init__(self, std: float = 1.0, learn: bool = False, heteroscedastic: bool = False, members: int = 1) -> None:
        own = {} if members == 1 else {"members": members}  # files of one noise are those of earlier versions
        super().__init__(std=std, learn=learn, heteroscedastic=heteroscedastic, **own)
        if not (isinstance(std, (int, float)) and 0 < std < math.inf):
            raise ValueError(f"expected std to be a positive number, got {std!r}")
        for name, value in (("learn", learn), ("heteroscedastic", heteroscedastic)):
            if not isinstance(value, bool):
                raise ValueError(f"expected {name} to be True or False, got {value!r}")
        if learn and heteroscedastic:
            raise ValueError("expected one source of noise, got learn=True and heteroscedastic=True; choose one")
        if not (isinstance(members, int) and members >= 1):
            raise ValueError(f"expected members to be a whole number of at least 1, got {members!r}")
        if members > 1 and not learn:
            raise ValueError(f"expected one noise unless it is learned, got members={members}; set learn=True")
        self.heteroscedastic = heteroscedastic
        log_std = torch.tensor(math.log(std)) if members == 1 else torch.full((members,), math.log(std))
        if learn:
            self.log_std = nn.Parameter(log_std)
        else:
            self.register_buffer("log_std", log_std, persistent=False)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.predictive(outputs)
        return _normal_log_prob(match_shape(y, mean, "Gaussian"), mean, variance).flatten(1).sum(1)

    def predictive(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = exact(outputs)
        if outputs.dim() == 1:
            outputs = outputs[:, None]
        if not self.heteroscedastic:
            variance = (2 * self.log_std.to(outputs.dtype)).exp()
            return outputs, (variance.mean() if variance.dim() else variance).expand_as(outputs)
        if outputs.shape[-1] % 2:
            raise ValueError(
                f"a heteroscedastic Gaussian expected means and variances, an even last axis, got outputs of shape "
                f"{tuple(outputs.shape)}"
            )
        mean, raw = outputs.chunk(2, -1)
        return mean, F.softplus(raw) + 1e-6

    def split(self, count: int) -> Sequence[Likelihood]:
        """Return a Gaussian for each member: copies of one noise, or the noise that each has learned."""
        if not isinstance(self.log_std, nn.Parameter):
            return [self] * count
        if self.log_std.dim() and len(self.log_std) % count:
            raise ValueError(
                f"expected the noise of {count} members, or one for all, got that of {len(self.log_std)}; take a new "
                "lb.Gaussian"
            )
        parts = [copy.deepcopy(self) for _ in range(count)]
        for part, own in zip(parts, self.log_std.detach().chunk(count) if self.log_std.dim() else (), strict=False):
            part._assign(own)
        return parts

    def join(self, parts: Sequence[Likelihood]) -> None:
        """Take the noise of every member; then `log_std` has one number for each."""
        learned = [part.log_std.detach().flatten() for part in parts if isinstance(part, Gaussian)]
        if isinstance(self.log_std, nn.Parameter) and all(part is not self for part in parts):
            self._assign(torch.cat(learned).to(self.log_std))

    def _assign(self, log_std: Tensor) -> None:
        self.log_std = nn.Parameter(log_std.clone().squeeze(), requires_grad=self.log_std.requires_grad)
        self.options = {name: value for name, value in self.options.items() if name != "members"}
        self.options |= {"members": log_std.numel()} if log_std.numel() > 1 else {}

    def log_prob_of_mixture(self, mean: Tensor, samples: Tensor | None, noise: Tensor | None, y: Tensor) -> Tensor:
        if samples is None or noise is None:
            raise ValueError("the density of a mixture needs its draws; call predict with keep_samples=True")
        each = _normal_log_prob(match_shape(y, mean, "Gaussian"), samples, noise).flatten(2).sum(2)
        return each.logsumexp(0) - math.log(samples.shape[0])


LIKELIHOODS: dict[str, type[Likelihood]] = {kind.__name__: kind for kind in (Categorical, Gaussian, Bernoulli)}
"""Likelihoods that a checkpoint may name."""


def exact(outputs: Tensor) -> Tensor:
    """Return float64 outputs unchanged, others in float32: those of autocast are shorter."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def check_classes(y: Tensor, classes: int, ignored: int) -> None:
    """Raise if the network has no output for a target."""
    outside = y[((y < 0) | (y >= classes)) & (y != ignored)]
    if len(outside):
        raise ValueError(
            f"expected targets from 0 to {classes - 1}, since the network has {classes} outputs, got "
            f"{int(outside[0])}; renumber the targets, or give the network more outputs"
        )


def check_answers(y: Tensor) -> None:
    """Raise unless targets are between 0 (no) and 1 (yes): the likelihood of others is unbounded."""
    outside = y[(y < 0) | (y > 1)]
    if len(outside):
        raise ValueError(
            f"expected targets of lb.Bernoulli() from 0 (no) to 1 (yes), got {outside[0].item():g}; map no to 0 and "
            "yes to 1"
        )


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy in nats over axis 1; 0 log 0 is 0."""
    each: Tensor = torch.special.entr(probabilities)
    return each.sum(1)


def binary_entropy(probability: Tensor) -> Tensor:
    """Return the entropy in nats of a yes with the given probability."""
    both: Tensor = torch.special.entr(torch.stack((probability, 1 - probability)))
    return both.sum(0)


def match_shape(y: Tensor, like: Tensor, name: str) -> Tensor:
    """Return targets in the shape of predictions; only a last axis of one may be missing.

    Broadcasting (B,) against (B, 1) would compare every target with every prediction.
    """
    if y.shape == like.shape:
        return y
    if y.shape == like.shape[:-1] and like.shape[-1] == 1:
        return y.unsqueeze(-1)
    if y.shape[:-1] == like.shape and y.shape[-1] == 1:
        return y.squeeze(-1)
    raise ValueError(f"{name} expected targets of shape {tuple(like.shape)}, got {tuple(y.shape)}")


def class_numbers(y: Tensor, like: Tensor) -> Tensor:
    """Return classes as int64; raise unless y holds one whole number or bool for every position of (B, C, ...).

    Convert before any comparison: the byte 156 equals an `ignore_index` of -100.
    """
    expected = (like.shape[0], *like.shape[2:])
    if y.shape != expected or y.is_floating_point():
        raise ValueError(
            f"Categorical expected targets of shape {tuple(expected)} with class numbers, got {y.dtype} of shape "
            f"{tuple(y.shape)}; for regression use lb.Gaussian(), for soft labels pass nn.CrossEntropyLoss()"
        )
    return y.long()


def _normal_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))
