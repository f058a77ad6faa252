"""The evidence lower bound:   loss = nll + beta * KL / N,   per data point, so that batch size does not matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes.core.conversion import layers_of, own_likelihood, stochastic_layers, unwrap
from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.layers.select import choose, Where
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime.batches import call, device_of, divisible, Inputs, leading_rows, Output, repeat_rows
from leanbayes.runtime.display import average, html_table
from leanbayes.runtime.distributed import gathered
from leanbayes.runtime.passes import assign_rows, assigned, components_of
from leanbayes.runtime.probe import learn_rows_from

Aggregate = Literal["average", "mixture"]
Deal = Literal["rows", "draws"]
Loss = Likelihood | Callable[[Tensor, Tensor], Tensor]


class ElboTerms(NamedTuple):
    """The terms of the bound; `loss = nll + beta * kl / num_data` is what to minimise.

    Attributes:
        nll: mean negative log-likelihood of a target.
        kl: divergence of the posterior from the prior, in nats, for the whole data set.
        loss: the negative bound per data point.
        outputs: outputs of the network, repeats on the first axis.
    """

    nll: Tensor
    kl: Tensor
    loss: Tensor
    outputs: Tensor

    def __repr__(self) -> str:
        nll, kl, loss = (average(term, digits=4) for term in (self.nll, self.kl, self.loss))
        return f"ElboTerms(nll {nll}, kl {kl}, loss {loss}; outputs of shape {tuple(self.outputs.shape)})"

    def _repr_html_(self) -> str:
        terms = [average(term, digits=4) for term in (self.nll, self.kl, self.loss)]
        return html_table(f"ElboTerms, outputs of shape {tuple(self.outputs.shape)}", self._fields[:3], [terms])


def kl(model: nn.Module) -> Tensor:
    """Return the divergence of all posteriors from their priors in nats: a float32 scalar, 0 for a plain model.

    For an explicit ensemble, a mixture with equal shares, it is the mean over the members.
    """
    inner = unwrap(model)
    members = members_of(inner)
    if members:
        return torch.stack([kl(member) for member in members]).mean()
    groups = _groups(layers_of(model))
    if groups:
        posteriors = [layer.posterior for layers in groups for layer in layers]
        with nullcontext() if torch.compiler.is_compiling() else gathered(posteriors):
            found = [layers[0].kl_of(layers).float() for layers in groups]
            return found[0] if len(found) == 1 else torch.stack(found).sum()
    return torch.zeros((), device=device_of(model))


def _groups(layers: Sequence[StochasticLayer]) -> list[list[StochasticLayer]]:
    """Return the layers of each class and method."""
    if all(type(layer) is type(layers[0]) and layer.method is layers[0].method for layer in layers):
        return [list(layers)] if layers else []  # the usual case, without the hash of a method
    groups: dict[tuple[type, Method], list[StochasticLayer]] = {}
    for layer in layers:
        groups.setdefault((type(layer), layer.method), []).append(layer)
    return list(groups.values())


def elbo(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    likelihood: Loss | None = None,
    *,
    num_data: int,
    beta: float = 1.0,
    samples: int = 1,
    tile: bool = False,
    aggregate: Aggregate = "average",
    deal: Deal = "rows",
    output: Output | None = None,
) -> ElboTerms:
    """Run the model on a batch and return the terms of the evidence lower bound.

    Args:
        model: a converted model; with a plain one the loss is its negative log-likelihood.
        x: inputs, called as model(x), model(*x) or model(**x).
        y: targets.
        likelihood: default the model's own, else `Categorical`; any callable `(outputs, y) -> loss` works, too.
        num_data: number of targets in the whole training set, over all processes; the KL is divided by it. Rows for
            one class or one vector of numbers each; rows times labels for `Bernoulli`, rows times pixels for a dense
            `Categorical` (`likelihood.targets_per_row(y)`).
        beta: weight of the KL; see `linear_beta` for annealing.
        samples: draws per row; as many passes if a draw serves a whole batch.
        tile: give every row to every component (K times the work) instead of one component per row.
        aggregate: "average" the log-likelihoods of the draws of a row, or "mixture", the log of their mean: a tighter
            bound that trains worse (section 3.4 of the rank-1 paper).
        deal: what components are dealt to. "rows": the draws of a row share its component (Algorithm 1 of the
            implicit-nodes paper). "draws": they go to consecutive components, modulo K (code of its authors). Both
            estimate the same average; noise is independent. Tiled rows have every component in any case.
        output: picks the tensor out of what the model returns; default itself, `.logits`, or item 0.

    Example:
        >>> terms = lb.elbo(bnn, x, y, lb.Categorical(), num_data=50_000)
        >>> terms.loss.backward()
    """
    _check(num_data, beta, samples, aggregate, deal)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    check_loss(likelihood)
    _check_tensors(x, y, likelihood)
    check_mixture(likelihood, aggregate)
    learn_rows_from(unwrap(model), x)
    rows = leading_rows(x)
    components = components_of(model) if tile or samples > 1 else 1
    passes = samples if samples > 1 and _draws_by_batch(model) else 1
    inside = samples // passes * (components if tile else 1)  # repeats of a row in one pass
    contexts: list[Any] = [nullcontext()] * passes
    if rows is not None and inside * passes > 1:
        if not divisible(unwrap(model), x):
            raise ValueError("expected rows on the first axis, to repeat them (samples, tile), got them elsewhere")
        every = Assignment(torch.arange(components, device=y.device), each=rows)
        dealt = every if tile else assign_rows(rows, components, y.device)
        repeated = dealt.repeat(samples, components=components if deal == "draws" and not tile else None)
        contexts = [assigned(model, part) for part in repeated.split(passes)]
        y = repeat_rows(y, rows, inside * passes)
    each = []
    for context, some in zip(contexts, _inputs(x, rows, inside, passes), strict=True):
        with context:
            each.append(call(model, some, output))
    outputs = each[0] if passes == 1 else torch.cat(each)
    repeats = inside * passes
    nll = _nll(likelihood, outputs, y, repeats, aggregate)
    divergence = kl(model)
    return ElboTerms(nll, divergence, nll + beta * divergence / num_data, outputs)


def targets_per_row(likelihood: Loss, y: Tensor) -> int:
    """Return the number of targets per row that the loss averages over; 1 for a plain loss."""
    return likelihood.targets_per_row(y) if isinstance(likelihood, Likelihood) else 1


def linear_beta(progress: float, over: float, *, start: float = 0.0, end: float = 1.0) -> float:
    """Return the weight of the KL at `progress`, rising linearly from `start` to `end` over `over`.

    Count in steps or in epochs: `linear_beta(step, 10_000)`, `linear_beta(epoch, 200)`.
    """
    if over <= 0:
        return end
    return start + (end - start) * min(1.0, max(0.0, progress / over))


def check_loss(likelihood: object) -> None:
    """Raise unless a loss can be called, and is no sum over the batch as far as it says."""
    if isinstance(likelihood, Likelihood):
        return
    if isinstance(likelihood, type) or not callable(likelihood):
        raise TypeError(
            f"expected a likelihood such as lb.Categorical(), or a function (outputs, y) -> loss, got {likelihood!r}"
        )
    if getattr(likelihood, "reduction", None) == "sum":
        raise ValueError(
            "expected a loss of one row or a mean, since the KL is divided by num_data, got a sum over the batch; set "
            "reduction='mean'"
        )


def check_mixture(likelihood: Loss, aggregate: str) -> None:
    """Raise if the loss has no log of a mean likelihood: a plain loss, class weights or label smoothing."""
    if aggregate != "mixture":
        return
    if not isinstance(likelihood, Likelihood):
        raise TypeError("aggregate='mixture' needs a Likelihood, which knows log-probabilities, not a plain loss")
    if isinstance(likelihood, Categorical) and (likelihood.class_weight is not None or likelihood.label_smoothing):
        raise ValueError(
            "aggregate='mixture' expected a Categorical without class_weight and label_smoothing, which belong to the "
            "loss of one draw, got one with them; leave them out, or take aggregate='average'"
        )


def _draws_by_batch(model: nn.Module) -> bool:
    """Return whether a layer draws once per batch: repeated rows would all see the same draw."""
    return any(not layer.row_noise for layer in layers_of(model))


def _inputs(x: Inputs, rows: int | None, inside: int, passes: int) -> list[Inputs]:
    """Return the repeated inputs of every pass, each its own copy: a network may change it in place."""
    if rows is None or inside * passes == 1:
        return [x] * passes
    return [repeat_rows(x, rows, inside) for _ in range(passes)]


def _nll(likelihood: Loss, outputs: Tensor, y: Tensor, repeats: int, aggregate: Aggregate) -> Tensor:
    if aggregate == "average" or repeats == 1:
        if not isinstance(likelihood, Likelihood):
            return likelihood(outputs, y).mean()
        return likelihood.nll(outputs, y)
    assert isinstance(likelihood, Likelihood)
    each = likelihood.log_prob(outputs, y)
    each = each.view(repeats, -1, *each.shape[1:])
    mixed = each.logsumexp(0) - math.log(repeats)
    return -likelihood.average(mixed, y[: len(mixed)])


def _check(num_data: int, beta: float | Tensor, samples: int, aggregate: str, deal: str) -> None:
    if not num_data > 0:
        raise ValueError(f"expected num_data to be the size of the training set, got {num_data!r}")
    if not (isinstance(beta, Tensor) or 0 <= beta < math.inf):  # reading a tensor would wait for the GPU
        raise ValueError(f"expected beta to be a finite number of at least 0, got {beta!r}")
    if not (isinstance(samples, int) and samples >= 1):
        raise ValueError(f"expected samples to be a whole number of at least 1, got {samples!r}")
    if aggregate not in ("average", "mixture"):
        raise ValueError(f"expected aggregate to be one of average, mixture, got {aggregate!r}")
    if deal not in ("rows", "draws"):
        raise ValueError(f"expected deal to be one of rows, draws, got {deal!r}")


def _check_tensors(x: object, y: object, likelihood: Loss) -> None:
    """Reject arrays, lists and empty batches early; torch's own error would be obscure."""
    rows = leading_rows(x)
    if isinstance(x, np.ndarray) or (isinstance(x, list) and rows is None):
        kind = "a list without one" if isinstance(x, list) else "a NumPy array"
        raise TypeError(f"expected x as tensors, got {kind}; torch.as_tensor(x) makes one of it")
    if rows == 0:
        raise ValueError("expected a batch of at least one example, got an empty one; leave it out")
    if isinstance(likelihood, Likelihood) and not isinstance(y, Tensor):
        raise TypeError(
            f"expected y as a tensor of targets, got {type(y).__name__}; torch.as_tensor(y) makes one of it"
        )


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    posterior_lr: float | None = None,
    weight_decay: float = 0.0,
    no_decay: Where = (),
) -> list[dict[str, Any]]:
    """Return optimiser groups "weights", "posterior" (no decay) and "no_decay", each trainable parameter once.

    Args:
        model: a converted or plain model.
        lr: learning rate of the shared weights.
        posterior_lr: learning rate of the posterior; default `lr`.
        weight_decay: of the shared weights.
        no_decay: globs on parameter names, or a predicate `(name, owner)`, of weights that do not decay.

    Example:
        >>> groups = lb.parameter_groups(bnn, lr=0.1, posterior_lr=2.4, weight_decay=5e-4, no_decay="*bias")
        >>> opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    """
    model = unwrap(model)
    posterior = {id(p) for _, layer in stochastic_layers(model) for p in layer.extra_parameters()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights = [(name, p) for name, p in named if id(p) not in posterior]
    owners = [(name, model.get_submodule(name.rpartition(".")[0])) for name, _ in weights]
    spared = choose(owners, no_decay, argument="no_decay", things="parameter")
    rate = lr if posterior_lr is None else posterior_lr
    groups: list[dict[str, Any]] = [
        _group("weights", [p for name, p in weights if name not in spared], lr, weight_decay),
        _group("posterior", [p for _, p in named if id(p) in posterior], rate, 0.0),
        _group("no_decay", [p for name, p in weights if name in spared], lr, 0.0),
    ]
    return [group for group in groups if group["params"]]


def _group(name: str, params: list[nn.Parameter], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"name": name, "params": params, "lr": lr, "weight_decay": weight_decay}
