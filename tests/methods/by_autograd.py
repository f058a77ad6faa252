"""Compare a custom function with autograd: the gradients of one fresh pass with it and without."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn, Tensor


class Comparison:
    """Gradients with and without a function; `module.pays` decides whether it is used."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def gradients(
        self, model: nn.Module, x: Tensor, *, used: bool, call: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the output of one fresh pass, the input's gradient and those of all parameters."""
        own, self.module.pays = self.module.pays, lambda *given: used
        model.zero_grad()
        x = x.detach().requires_grad_()
        torch.manual_seed(3)
        output = (call or model)(x)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        (output * weights).sum().backward()
        self.module.pays = own
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return found | {"x": x.grad, "output": output.detach()}

    def assert_equal(self, model: nn.Module, x: Tensor, *, rtol: float = 1e-9, call=None) -> None:
        expected = {name: g.clone() for name, g in self.gradients(model, x, used=False).items()}
        found = self.gradients(model, x, used=True, call=call)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
