"""Three ways to predict with one stochastic network (Neklyudov et al., 2019, section 3); norms are in eval mode.

* deterministic: the network of posterior means (eq. 3);
* stochastic: one draw;
* ensemble: the average over draws (eq. 2).

For a low-variance network they agree. After the phase transition, only the ensemble predicts better than chance.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import own_likelihood
from leanbayes.core.plain import mean
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import NoiseOf, predict
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.metrics import accuracy
from leanbayes.runtime.batches import Inputs

Procedure = Literal["deterministic", "stochastic", "ensemble"]
PROCEDURES: tuple[Procedure, ...] = ("deterministic", "stochastic", "ensemble")


def infer(
    model: nn.Module,
    x: Inputs,
    procedure: Procedure,
    likelihood: Likelihood | None = None,
    *,
    samples: int = 16,
    seed: int = 0,
    noise: NoiseOf = "function",
) -> Prediction:
    """Predict by one of the three procedures; arguments as of `lb.predict`.

    noise="activation" has fresh noise for every row and activation, as in the paper.

    Example:
        >>> lb.phase.infer(bnn, x, "deterministic").mean
    """
    if procedure not in PROCEDURES:
        raise ValueError(f"expected procedure to be one of {', '.join(PROCEDURES)}, got {procedure!r}")
    if procedure == "deterministic":
        return predict(mean(model), x, likelihood or own_likelihood(model), samples=1, keep_samples=False)
    count = 1 if procedure == "stochastic" else samples
    return predict(model, x, likelihood, samples=count, seed=seed, noise=noise, keep_samples=False)


def accuracies(
    model: nn.Module, data: tuple[Inputs, Tensor], *, samples: int = 16, noise: NoiseOf = "function"
) -> dict[str, float]:
    """Return the accuracy of each of the three procedures, as in Table 1 of the paper."""
    x, y = data
    found: dict[str, float] = {}
    for procedure in PROCEDURES:
        p = infer(model, x, procedure, samples=samples, noise=noise).mean
        found[procedure] = float(accuracy(p, torch.as_tensor(y, device=p.device)))
    return found
