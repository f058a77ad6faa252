"""Prediction with S draws, each an ordinary network with the draw folded into its weights.

S frozen networks cost as much as S plain networks: no factor touches an activation. The weights of one plain twin are
replaced draw by draw. Rows run in chunks whose activations stay small. The modules before the first stochastic layer
run once for all draws.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import is_stochastic, own_likelihood, stochastic_layers, unwrap
from leanbayes.core.prediction import concatenate, Prediction, RunningUncertainty
from leanbayes.core.prefix_cache import PrefixCache
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._base import one_draw
from leanbayes.methods._checks import whole_number
from leanbayes.methods.ensemble import member_of, members_of
from leanbayes.runtime.batches import (
    call,
    cloned,
    device_of,
    divisible,
    Inputs,
    leading_rows,
    Output,
    slice_rows,
    to_device,
    versions,
    without_arrays,
)
from leanbayes.runtime.passes import components_of, draws, many_draws, Variables, Width
from leanbayes.runtime.twins import twin

NoiseOf = Literal["function", "activation"]

LARGEST_ACTIVATION = {"cpu": 16 * 2**20, "cuda": 2**30}
"""Bytes of the largest activation of an automatic chunk; on a CPU, larger ones cause page faults at every call."""

DRAWS_AT_ONCE = 16
"""Draws whose random variables are sampled together, in a few large operations."""

MOST_VARIABLES = 2**26
"""Limit of the variables that are sampled together; methods with one per weight take fewer draws at once."""

FIRST_CHUNK = {"cpu": 64, "cuda": 256}
"""Rows of the first automatic chunk, which measures the size of activations."""


def predict(
    model: nn.Module,
    x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs],
    likelihood: Likelihood | None = None,
    *,
    samples: int = 16,
    seed: int = 0,
    chunk_size: int | None = None,
    keep_samples: bool = True,
    component: int | None = None,
    width: Width = None,
    noise: NoiseOf = "function",
    output: Output | None = None,
) -> Prediction:
    """Predict with S posterior draws and split the uncertainty into aleatoric and epistemic.

    The same seed gives the same prediction for any chunk size, batches and order of the rows (with noise="activation",
    for the same chunks). The model runs in eval mode and stays unchanged. A network with batch norms without running
    statistics runs on all rows of `x`, or of a batch of a loader, at once.

    Args:
        model: a converted model; a plain one predicts without epistemic uncertainty.
        x: inputs, a DataLoader that yields `(inputs, target)`, or an iterator over blocks of inputs; tensors, or NumPy
            arrays, whose real numbers get the dtype of the network.
        likelihood: the likelihood of the outputs; default the model's own, else `Categorical`.
        samples: S, the total number of draws, spread evenly over the components.
        seed: names the draws: sample i is `draw(model, seed=seed, index=i)`.
        chunk_size: rows at a time; default as many as keep activations small.
        keep_samples: keep the predictions of all draws in `p.samples`; False uses constant memory.
        component: use this component alone.
        width: share or number of channel groups, for layers that order their channels.
        noise: "function", one network for all rows per draw; "activation", fresh noise for every row.
        output: picks the tensor out of what the model returns; default itself, `.logits`, or item 0.

    Example:
        >>> p = lb.predict(bnn, x, samples=16)
        >>> p.mean, p.total, p.aleatoric, p.epistemic
    """
    predictor = Predictor(
        model,
        likelihood,
        samples=samples,
        seed=seed,
        chunk_size=chunk_size,
        keep_samples=keep_samples,
        component=component,
        width=width,
        noise=noise,
        output=output,
    )
    return predictor(x)


def distinct_draws(model: nn.Module) -> int | None:
    """Return the number of different draws: K for K components without noise, 1 for a plain model.

    None means infinitely many, or an ensemble with stochastic members.
    """
    model = unwrap(model)
    members = members_of(model)
    if members:
        own = {distinct_draws(member) for member in members}
        return len(members) * (own.pop() or 0) if len(own) == 1 and not is_stochastic(model) else None
    noisy = any(layer.log_choices for _, layer in stochastic_layers(model))
    return None if noisy else components_of(model)


class Predictor:
    """Predict repeatedly with S posterior draws: the frozen twin of the model is built once.

    The arguments are those of `predict`. Weights changed in place take effect at the next call.

    Example:
        >>> predictor = lb.Predictor(bnn, samples=16)
        >>> for x in batches:
        ...     p = predictor(x)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | None = None,
        *,
        samples: int = 16,
        seed: int = 0,
        chunk_size: int | None = None,
        keep_samples: bool = True,
        component: int | None = None,
        width: Width = None,
        noise: NoiseOf = "function",
        output: Output | None = None,
    ) -> None:
        _check(samples, chunk_size, noise)
        self.likelihood = likelihood or own_likelihood(model) or Categorical()
        self.model = unwrap(model)
        self.samples, self.seed, self.chunk_size = samples, whole_number("seed", seed), chunk_size
        self.keep_samples, self.component, self.width = keep_samples, component, width
        self.noise, self.output = noise, output
        self.refresh()

    def refresh(self) -> None:
        """Build the twins again, after layers of the model were replaced."""
        self.sources: list[_Chunks] = []
        with torch.no_grad():
            self.tree = self._build(self.model)
        self.distinct = distinct_draws(self.model) if self.noise == "function" else None

    def __call__(self, x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs]) -> Prediction:
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode have no version
            done, parts = 0, []
            for block in _blocks(x, self.model):
                parts.append(self._predict(block, done))
                done += len(parts[-1].mean)
        if not parts:
            raise ValueError("expected at least one batch of inputs, got an empty loader")
        _check_alike([part.mean for part in parts], [len(part.mean) for part in parts], "give all of them at once")
        return concatenate(parts) if len(parts) > 1 else parts[0]

    def select(self, index: int) -> _Chunks:
        """Return the source of draw `index`, ready to run; with K members, draw i // K of member i mod K."""
        source: Any = self.tree
        component = self.component
        while isinstance(source, list):  # members may be ensembles themselves
            source, index = member_of(source, index, component)
            component = None
        found: _Chunks = source
        found.draws.select(self.seed, index, component, self.width)
        return found

    def _build(self, model: nn.Module) -> Any:
        """Return the source of a model's draws, or a list of those of its members."""
        members = members_of(model)
        if members:
            return [self._build(member) for member in members]
        draws = FrozenDraws(model) if self.noise == "function" else RowDraws(model)
        self.sources.append(_Chunks(draws, self.chunk_size, self.output))
        return self.sources[-1]

    def forget(self) -> None:
        """Drop all results of earlier inputs and weights."""
        for source in self.sources:
            source.draws.forget()

    def _predict(self, x: Inputs, done: int) -> Prediction:
        """Predict for one block of rows, `done` rows after the first."""
        rows, likelihood = _count_rows(x), self.likelihood
        self.forget()
        running = RunningUncertainty(likelihood.measure)
        kept: list[tuple[Tensor, Tensor]] = []
        distinct = self.distinct or self.samples
        repeatable = distinct < self.samples  # fewer networks than samples: run each once
        for index in range(self.samples):
            if index < distinct:
                mean, own = likelihood.predictive(self.select(index).run(x, rows, done))
            else:
                mean, own = kept[index % distinct]
            running.add(mean, own)
            if self.keep_samples or (repeatable and index < distinct):
                kept.append((mean, own))
        result = running.result()
        keeps_variances = self.keep_samples and likelihood.measure == "variance"
        return Prediction(
            mean=result.mean,
            total=result.total,
            aleatoric=result.aleatoric,
            epistemic=result.epistemic,
            samples=torch.stack([mean for mean, _ in kept]) if self.keep_samples else None,
            variances=torch.stack([own for _, own in kept]) if keeps_variances else None,
            likelihood=likelihood,
        )


class FrozenDraws:
    """One plain twin of a model whose weights are replaced draw by draw; it shares all other tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model = twin(model, share_plain=True)
        layers = [layer for _, layer in stochastic_layers(model)]
        with draws(model, mean=True):
            plain = {id(layer): layer.twin() for layer in layers}
        self.network = twin(model, plain).eval()
        self.pairs = [(layer, plain[id(layer)]) for layer in layers]
        self.at_once = max(1, min(DRAWS_AT_ONCE, MOST_VARIABLES // max(1, sum(layer.nodes for layer in layers))))
        self.prefix = PrefixCache(self.network, plain.values())
        self.sampled = range(0)
        self.variables: list[Variables] = []

    def select(self, seed: int, index: int, component: int | None, width: Width) -> None:
        """Fold the draw into the twin's weights; sample the variables of the next few draws together."""
        if index not in self.sampled:
            self.sampled = range(index, index + self.at_once)
            with many_draws(self.model, seed, self.sampled, component=component, width=width):
                self.variables = [layer.variables() for layer, _ in self.pairs]
        row = self.sampled.index(index)
        for (layer, plain), variables in zip(self.pairs, self.variables, strict=True):
            for name, tensor in layer.fold(one_draw(variables, row)).items():
                # A new parameter, not new data in the old one: autocast caches weights by identity.
                plain._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the selected draw on the rows from `rows[0]` to `rows[1]`."""
        self.prefix.start(rows)
        return call(self.network, x, output)

    def forget_outputs(self) -> None:
        """Drop the kept outputs of the modules before the first stochastic layer."""
        self.prefix.forget()

    def forget(self) -> None:
        """Drop kept outputs and sampled variables."""
        self.forget_outputs()
        self.sampled = range(0)
        self.variables = []


class RowDraws:
    """The stochastic model itself in eval mode, with seeded noise per row."""

    def __init__(self, model: nn.Module) -> None:
        self.network = twin(model).eval()

    def select(self, seed: int, index: int, component: int | None, width: Width) -> None:
        """Store the draw."""
        self.seed, self.draw = seed, {"index": index, "component": component, "width": width}

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the model with different noise for every row and chunk."""
        wanted: dict[str, Any] = self.draw
        with draws(self.network, seed=hash((self.seed, rows[0])), shared=False, **wanted):
            return call(self.network, x, output)

    def forget_outputs(self) -> None:
        """Do nothing: no output is kept."""

    forget = forget_outputs


class _Chunks:
    """Runs the selected draw over rows in chunks; the first chunk sets the size of the others."""

    def __init__(self, draws: FrozenDraws | RowDraws, chunk_size: int | None, output: Output | None) -> None:
        self.draws, self.chunk_size, self.output = draws, chunk_size, output
        self.largest = 0.0
        self.keeps_inputs = False  # whether a pass left its inputs unchanged
        self.averages = any(_averages_rows(module) for module in draws.network.modules())

    def run(self, x: Inputs, rows: int, done: int = 0) -> Tensor:
        """Return the outputs for all rows of x, `done` rows after the first."""
        outputs: list[Tensor] = []
        sizes: list[int] = []
        start = 0
        whole = self.averages or not divisible(self.draws.network, x)
        while start < rows:
            stop = rows if whole else min(rows, start + self._next_size(outputs, sizes))
            outputs.append(self._run_chunk(slice_rows(x, rows, start, stop), (done + start, done + stop)))
            sizes.append(stop - start)
            start = stop
        _check_alike(outputs, sizes)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _next_size(self, outputs: list[Tensor], sizes: list[int]) -> int:
        if self.chunk_size is None:
            return FIRST_CHUNK.get(device_of(self.draws.network).type, FIRST_CHUNK["cpu"])
        if sizes == [self.chunk_size] and self.chunk_size in outputs[0].shape[1:]:
            # This axis may count examples (similarities of all pairs); a chunk of another size shows that.
            return self.chunk_size - 1 or 2
        return self.chunk_size

    def _run_chunk(self, chunk: Inputs, rows: tuple[int, int]) -> Tensor:
        """Run one chunk; the largest activation of the first one sets the size of the others."""
        if self.chunk_size is not None:
            return self._run_copy(chunk, rows)
        watched = [m for m in self.draws.network.modules() if not any(True for _ in m.children())]
        handles = [module.register_forward_hook(self._measure) for module in watched]
        outputs = self._run_copy(chunk, rows)
        for handle in handles:
            handle.remove()
        limit = LARGEST_ACTIVATION.get(outputs.device.type, LARGEST_ACTIVATION["cuda"])
        self.chunk_size = max(1, int(limit * (rows[1] - rows[0]) / max(self.largest, 1)))
        return outputs

    def _run_copy(self, chunk: Inputs, rows: tuple[int, int]) -> Tensor:
        """Run a copy of one chunk, unless an earlier pass left its inputs unchanged."""
        if self.keeps_inputs:
            return self.draws.run(chunk, rows, self.output)
        chunk = cloned(chunk)
        before = versions(chunk)
        outputs = self.draws.run(chunk, rows, self.output)
        self.keeps_inputs = versions(chunk) == before
        return outputs

    def _measure(self, module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.nbytes)


def _count_rows(x: Inputs) -> int:
    rows = leading_rows(x)
    if rows is None:
        raise ValueError(
            f"expected inputs with a tensor that has rows on its first axis, got {type(x).__name__} without one; make "
            "a tensor of a list (torch.as_tensor) and a DataLoader of a Dataset"
        )
    if rows == 0:
        raise ValueError("expected inputs with at least one row on the first axis of their first tensor, got none")
    return rows


def _blocks(x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs], model: nn.Module) -> Iterator[Inputs]:
    for inputs in _raw_blocks(x):
        yield to_device(without_arrays(inputs, _dtype(model)), device_of(model))


def _raw_blocks(x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs]) -> Iterator[Any]:
    if isinstance(x, Iterator):
        yield from x
    elif isinstance(x, DataLoader):
        yield from (batch if isinstance(batch, (Tensor, Mapping, np.ndarray)) else batch[0] for batch in x)
    else:
        yield x


def _averages_rows(module: nn.Module) -> bool:
    """Return whether a module is a batch norm without running statistics, which averages over rows in eval mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def _check_alike(outputs: list[Tensor], sizes: list[int], remedy: str = "") -> None:
    """Raise if the outputs of chunks cannot be joined: an output then depends on other examples."""
    first = outputs[0]
    for output, size in zip(outputs[1:], sizes[1:], strict=True):
        if not output.dim() or output.shape[1:] != first.shape[1:]:
            remedy = remedy or f"pass chunk_size={sum(sizes)}"
            raise ValueError(
                f"the outputs of {sizes[0]} and of {size} examples have shapes {tuple(first.shape)} and "
                f"{tuple(output.shape)}, which cannot be joined: they depend on the other examples; {remedy}, or "
                "output= for features of one example each"
            )


def _dtype(model: nn.Module) -> torch.dtype:
    real = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(real, torch.get_default_dtype())


def _check(samples: int, chunk_size: int | None, noise: str) -> None:
    if not _counts(samples):
        raise ValueError(f"expected samples to be a whole number of at least 1, got {samples!r}")
    if not (chunk_size is None or _counts(chunk_size)):
        raise ValueError(f"expected chunk_size to be a whole number of at least 1 or None, got {chunk_size!r}")
    if noise not in ("function", "activation"):
        raise ValueError(f"expected noise to be one of function, activation, got {noise!r}")


def _counts(value: Any) -> bool:
    """Return whether a value is a whole number of Python or NumPy, at least 1."""
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False
