"""Parameter groups for an optimiser: shared weights decay, posterior parameters do not and have a rate of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from leanbayes.convert import stochastic_layers, unwrap
from leanbayes.layers.select import choose, Where


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    posterior_lr: float | None = None,
    weight_decay: float = 0.0,
    no_decay: Where = (),
) -> list[dict[str, Any]]:
    """Return groups "weights", "posterior" (no decay) and "no_decay" with every trainable parameter exactly once.

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
