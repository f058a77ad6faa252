"""Where a student begins: its teacher cut to a width, with noise in the last layer alone (Cui et al., section 3.5).

Of a teacher's first groups the means and the keep probabilities stay; the noise on the weights goes, except in the last
layer, which stays Bayesian (section 6.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from leanbayes.core.conversion import convert, own_likelihood, unwrap
from leanbayes.core.plain import mean
from leanbayes.methods.nested.config import channels_of, NestedDropout, NestedLayer, NestedNorm
from leanbayes.methods.nested.units import LIMIT, OrderingUnit
from leanbayes.slim.narrow import narrow


def student(model: nn.Module, width: float | int) -> nn.Module:
    """Return a network for a student to begin with: the teacher's means at a width, in the order they had.

    Its full width is the function of `lb.slim.extract(model, width)`, with the teacher's noise on the weights of the
    last layer, where there is any. It is nested itself: its groups are the first groups of the teacher, with their keep
    probabilities, and `lb.slim` cuts it further. Its fixed widths are not rescaled by keep probabilities, as those of
    the teacher are: a student learns at the very widths at which it is used.

    Args:
        model: the teacher, converted with `lb.NestedDropout` and trained; it stays as it is.
        width: the share or the number of its channel groups that the student gets.

    Raises:
        ValueError: if no layer of the model orders its channels, or the width is none.

    Example:
        >>> small = lb.slim.student(bnn, width=0.25)
    """
    model = unwrap(model)
    small = narrow(model, width)
    plain = mean(small)
    ordered = _ordered(model)
    units = {path: layer.posterior.order for path, layer in ordered.items() if isinstance(layer, NestedLayer)}
    method = _narrower(ordered[next(iter(units))].method, list(units.values()), width)
    last = [path for path in channels_of(plain, method.inputs).makers if path not in ordered][-1]
    pupil = convert(plain, method, where=list(ordered), likelihood=own_likelihood(model), copy=False)
    for path, unit in units.items():
        _inherit(_layer(pupil, path).posterior.order, unit)
    noisy = _layer(small, last)
    if isinstance(noisy, NestedLayer):
        pupil = convert(pupil, replace(method, weight_noise=True), where=last, copy=False)
        _layer(pupil, last).posterior.log_alpha = noisy.posterior.log_alpha
    return pupil.to(noisy.weight.device)


def ordering_units(model: nn.Module) -> list[OrderingUnit]:
    """Return the ordering units of a model, the one with most groups first."""
    found = [module for module in model.modules() if isinstance(module, OrderingUnit)]
    return sorted(found, key=lambda unit: -unit.groups)


def _ordered(model: nn.Module) -> dict[str, Any]:
    """Return the layers and norms that have a part in the order of channels, by path."""
    layers = {p: layer for p, layer in model.named_modules() if isinstance(layer, (NestedLayer, NestedNorm))}
    return {path: layer for path, layer in layers.items() if layer.ordered}


def _layer(model: nn.Module, path: str) -> Any:
    return model.get_submodule(path)


def _narrower(method: NestedDropout, units: Sequence[OrderingUnit], width: float | int) -> NestedDropout:
    """Return the method of a student: as many groups as the width has, the same share of them always on.

    It has no divergence: of the tails, because they are the teacher's; of the weights, because they have no noise.
    """
    widest = max(units, key=lambda unit: unit.groups)
    groups = widest.count(width)
    return replace(
        method,
        groups=groups,
        always_on=math.ceil(widest.always_on * groups / widest.groups),
        rescale=False,
        weight_noise=False,
        weight_cost=0.0,
        order_prior=False,
    )


def _inherit(unit: OrderingUnit, teacher: OrderingUnit) -> None:
    """Take over the temperature, and the conditional keep probabilities of the teacher's first groups."""
    with torch.no_grad():
        unit.temperature.copy_(teacher.temperature)
        if teacher.learned:  # what is always on in the teacher is almost always on in the student
            logits = F.pad(teacher.keep_logits, (teacher.always_on, 0), value=LIMIT)
            unit.keep_logits.copy_(logits[unit.always_on : unit.groups])
