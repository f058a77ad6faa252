"""Prediction with S draws, each an ordinary network with the draw folded into its weights.

S frozen networks cost what S plain networks cost: no factor touches an activation. The weights of one plain twin
are overwritten draw by draw; rows go through in chunks whose activations stay small; what runs before the first
stochastic layer runs once for all draws.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import own_likelihood, stochastic_layers, substitute, tensors_of, unwrap
from leanbayes.core.prediction import concatenate, Prediction, RunningUncertainty
from leanbayes.core.prefix_cache import Prefix
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._base import one_draw
from leanbayes.methods._checks import whole_number
from leanbayes.methods.ensemble import Ensemble
from leanbayes.runtime.batches import (
    call,
    cloned,
    divisible,
    Inputs,
    leading_rows,
    Output,
    slice_rows,
    to_device,
    versions,
    without_arrays,
)
from leanbayes.runtime.passes import apart, components_of, draws, many_draws

Noise = Literal["function", "activation"]

LARGEST_ACTIVATION = {"cpu": 16 * 2**20, "cuda": 2**30}
"""Bytes of the largest activation of an automatic chunk: on a CPU, larger ones are page-faulted at every call."""

DRAWS_AT_ONCE = 16
"""Draws whose random variables are sampled together: a few large operations instead of many small ones."""

MOST_VARIABLES = 2**26
"""Variables that may be sampled together: methods with one for every weight take fewer draws at once."""

FIRST_CHUNK = {"cpu": 64, "cuda": 256}
"""Rows of the first automatic chunk, on which the size of activations is measured."""


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
    width: float | int | None = None,
    noise: Noise = "function",
    output: Output | None = None,
) -> Prediction:
    """Predict with S posterior draws and split the uncertainty into aleatoric and epistemic.

    The same seed gives the same prediction whatever the chunk size, the batches and the order of the rows (with
    noise="activation", for the same chunks). The model is evaluated in eval mode and left as it was. A network with
    batch norms without running statistics runs on all rows of `x`, or of a batch of a loader, at once.

    Args:
        model: a converted model; a plain one predicts without epistemic uncertainty.
        x: inputs, a DataLoader that yields `(inputs, target)`, or an iterator over blocks of inputs; tensors, or NumPy
            arrays, whose real numbers get the type of the network's.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        samples: S, the number of draws in all, spread evenly over the components.
        seed: names the draws: sample i is `draw(model, seed=seed, index=i)`.
        chunk_size: rows at a time; default as many as keep activations small.
        keep_samples: keep what every draw predicted, in `p.samples`; without, memory does not grow with S.
        component: use this component alone.
        width: share or number of channel groups, for layers that order their channels.
        noise: "function", one network for all rows per draw; "activation", fresh noise for every row.
        output: picks the tensor out of what the model returns; default itself, `.logits`, or item 0.

    Example:
        >>> p = lb.predict(bnn, x, samples=16)
        >>> p.mean, p.total, p.aleatoric, p.epistemic
    """
    _check(samples, chunk_size, noise)
    seed = whole_number("seed", seed)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    model = unwrap(model)
    source = source_of(model, noise)
    runner = Runner(source, seed, component, width, chunk_size, output)
    with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode do not tell of changes in place
        parts = [_predict_block(runner, block, likelihood, samples, keep_samples) for block in _blocks(x, model)]
    if not parts:
        raise ValueError("expected at least one batch of inputs, got an empty loader")
    _check_alike([part.mean for part in parts], [len(part.mean) for part in parts], "give all of them at once")
    return concatenate(parts) if len(parts) > 1 else parts[0]


def distinct_draws(model: nn.Module) -> int | None:
    """Return how many different draws a model has: K for K components without noise, 1 for a plain one, or None.

    None where there is no end to them, or where an ensemble has stochastic members.
    """
    model = unwrap(model)
    if isinstance(model, Ensemble):
        return None if any(True for _ in stochastic_layers(model)) else model.components
    noisy = any(layer.log_choices for _, layer in stochastic_layers(model))
    return None if noisy else components_of(model)


class Source(Protocol):
    """Where draws come from: select one, then run rows through it.

    Attributes:
        distinct: number of different draws there are, None where there is no end to them.
    """

    distinct: int | None

    @property
    def network(self) -> nn.Module:
        """What runs."""

    def select(self, seed: int, index: int, component: int | None, width: float | int | None) -> None:
        """Make the next runs those of this draw."""

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the selected draw on the rows from `rows[0]` to `rows[1]`."""

    def forget(self) -> None:
        """Begin other data."""


class FrozenDraws:
    """One plain twin of a model, whose weights become those of draw after draw."""

    def __init__(self, model: nn.Module) -> None:
        """Build the twin once; it shares every tensor that no draw touches."""
        self.model = model = apart(model)
        layers = [layer for _, layer in stochastic_layers(model)]
        with draws(model, mean=True):
            plain = {id(layer): layer.twin() for layer in layers}
        self.network = substitute(model, dict(plain)).eval()
        self.pairs = [(layer, plain[id(layer)]) for layer in layers]
        self.distinct = distinct_draws(model)
        self.at_once = max(1, min(DRAWS_AT_ONCE, MOST_VARIABLES // max(1, sum(layer.nodes for layer in layers))))
        self.prefix = Prefix(self.network, plain.values())
        self.forget = self.prefix.forget
        self.sampled = range(0)
        self.variables: list[dict[str, Tensor]] = []

    def select(self, seed: int, index: int, component: int | None, width: float | int | None) -> None:
        """Fold the draw into the twin's weights; the variables of the next few draws are sampled together."""
        if index not in self.sampled:
            self.sampled = range(index, index + self.at_once)
            with many_draws(self.model, seed, self.sampled, component=component, width=width):
                self.variables = [layer.sample(1) for layer, _ in self.pairs]
        row = self.sampled.index(index)
        for (layer, plain), variables in zip(self.pairs, self.variables, strict=True):
            for name, tensor in layer.fold(one_draw(variables, row)).items():
                # A new parameter, not new data in the old one: autocast keeps its copy of weights by identity.
                plain._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the twin."""
        self.prefix.start(rows)
        return call(self.network, x, output)


class ActivationNoise:
    """The stochastic model itself in eval mode, with seeded noise per row."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the model, not its tensors, so that the modes of the original stay."""
        self.network: nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors_of(model)})
        self.network.eval()
        self.distinct: int | None = None

    def select(self, seed: int, index: int, component: int | None, width: float | int | None) -> None:
        """Remember which draw is wanted."""
        self.wanted: dict[str, Any] = {"index": index, "component": component, "width": width}
        self.seed = seed

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the model with noise that differs from row to row and from chunk to chunk."""
        with draws(self.network, seed=hash((self.seed, rows[0])), shared=False, **self.wanted):
            return call(self.network, x, output)

    def forget(self) -> None:
        """Keep nothing, so forget nothing."""


class MemberDraws:
    """The draws of the members of an ensemble, in turn."""

    def __init__(self, ensemble: Ensemble, noise: Noise) -> None:
        """Make a source of each member."""
        self.sources = [source_of(member, noise) for member in ensemble.members]
        self.current = self.sources[0]
        plain = all(source.distinct == 1 for source in self.sources)
        self.distinct = len(self.sources) if plain else None

    @property
    def network(self) -> nn.Module:
        """The network of the selected member."""
        return self.current.network

    def select(self, seed: int, index: int, component: int | None, width: float | int | None) -> None:
        """Select draw i // K of member i mod K, or of the member that is named."""
        count = len(self.sources)
        if component is not None and not 0 <= component < count:
            raise ValueError(f"expected a component from 0 to {count - 1}, got {component}")
        self.current = self.sources[index % count if component is None else component]
        self.current.select(seed, index // count, None, width)

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the selected draw."""
        return self.current.run(x, rows, output)

    def forget(self) -> None:
        """Begin other data."""
        for source in self.sources:
            source.forget()


def source_of(model: nn.Module, noise: Noise) -> Source:
    """Return where the draws of a model come from."""
    if isinstance(model, Ensemble):
        return MemberDraws(model, noise)
    return FrozenDraws(model) if noise == "function" else ActivationNoise(model)


class Runner:
    """Runs draws over blocks of rows in chunks."""

    def __init__(
        self,
        source: Source,
        seed: int,
        component: int | None,
        width: float | int | None,
        chunk_size: int | None,
        output: Output | None,
    ) -> None:
        """Take what stays the same for all draws and blocks."""
        self.source = source
        self.seed, self.component, self.width, self.output = seed, component, width, output
        self.chunk_size = chunk_size
        self.largest = 0.0
        self.done = 0
        self.gentle: set[int] = set()
        self.whole: dict[int, bool] = {}

    def run(self, x: Inputs, rows: int, index: int) -> Tensor:
        """Return the outputs of draw `index` for all rows."""
        self.source.select(self.seed, index, self.component, self.width)
        outputs: list[Tensor] = []
        sizes: list[int] = []
        start = 0
        whole = self._undivided(x)
        while start < rows:
            stop = rows if whole else min(rows, start + self._rows(outputs, sizes))
            chunk = slice_rows(x, rows, start, stop)
            outputs.append(self._measured(chunk, (self.done + start, self.done + stop)))
            sizes.append(stop - start)
            start = stop
        _check_alike(outputs, sizes)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _undivided(self, x: Inputs) -> bool:
        """Say whether rows must stay together: they lie elsewhere, or norms average over them."""
        network = self.source.network
        if id(network) not in self.whole:
            self.whole[id(network)] = any(_averages_rows(module) for module in network.modules())
        return self.whole[id(network)] or not divisible(network, x)

    def _rows(self, outputs: list[Tensor], sizes: list[int]) -> int:
        """Return the rows of the next chunk."""
        if self.chunk_size is None:
            return FIRST_CHUNK.get(_device(self.source.network).type, FIRST_CHUNK["cpu"])
        if sizes == [self.chunk_size] and self.chunk_size in outputs[0].shape[1:]:
            # This axis may count examples (similarities of all pairs); in a chunk of another size that shows.
            return self.chunk_size - 1 or 2
        return self.chunk_size

    def _measured(self, chunk: Inputs, rows: tuple[int, int]) -> Tensor:
        """Run one chunk; the first time, choose the size of the following ones from its largest activation."""
        if self.chunk_size is not None:
            return self._unchanged(chunk, rows)
        watched = [m for m in self.source.network.modules() if not any(True for _ in m.children())]
        handles = [module.register_forward_hook(self._watch) for module in watched]
        outputs = self._unchanged(chunk, rows)
        for handle in handles:
            handle.remove()
        limit = LARGEST_ACTIVATION.get(outputs.device.type, LARGEST_ACTIVATION["cuda"])
        self.chunk_size = max(1, int(limit * (rows[1] - rows[0]) / max(self.largest, 1)))
        return outputs

    def _unchanged(self, chunk: Inputs, rows: tuple[int, int]) -> Tensor:
        """Run one chunk on a copy, unless the network has shown that it does not change its inputs in place."""
        network = id(self.source.network)
        if network in self.gentle:
            return self.source.run(chunk, rows, self.output)
        chunk = cloned(chunk)
        before = versions(chunk)
        outputs = self.source.run(chunk, rows, self.output)
        if versions(chunk) == before:
            self.gentle.add(network)
        return outputs

    def _watch(self, module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.nbytes)


def _predict_block(runner: Runner, x: Inputs, likelihood: Likelihood, samples: int, keep_samples: bool) -> Prediction:
    """Predict for one block of rows."""
    rows = leading_rows(x)
    if rows is None:
        raise ValueError(
            f"expected inputs with a tensor that has rows on its first axis, got {type(x).__name__} without one; make "
            "a tensor of a list (torch.as_tensor) and a DataLoader of a Dataset"
        )
    if rows == 0:
        raise ValueError("expected inputs with at least one row on the first axis of their first tensor, got none")
    runner.source.forget()
    running = RunningUncertainty(likelihood.measure)
    kept: list[tuple[Tensor, Tensor]] = []
    distinct = runner.source.distinct or samples
    repeatable = distinct < samples  # few networks, many samples: run each once
    for index in range(samples):
        if index < distinct:
            mean, own = likelihood.predictive(runner.run(x, rows, index))
        else:
            mean, own = kept[index % distinct]
        running.add(mean, own)
        if keep_samples or (repeatable and index < distinct):
            kept.append((mean, own))
    runner.done += rows
    result = running.result()
    return Prediction(
        mean=result.mean,
        total=result.total,
        aleatoric=result.aleatoric,
        epistemic=result.epistemic,
        samples=torch.stack([mean for mean, _ in kept]) if keep_samples else None,
        noise=torch.stack([own for _, own in kept]) if keep_samples and likelihood.measure == "variance" else None,
        likelihood=likelihood,
    )


def _blocks(x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs], model: nn.Module) -> Iterator[Inputs]:
    """Yield inputs on the model's device: all at once, or batch by batch."""
    for inputs in _raw_blocks(x):
        yield to_device(without_arrays(inputs, _dtype(model)), _device(model))


def _raw_blocks(x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs]) -> Iterator[Any]:
    if isinstance(x, Iterator):
        yield from x
    elif isinstance(x, DataLoader):
        yield from (batch if isinstance(batch, (Tensor, Mapping, np.ndarray)) else batch[0] for batch in x)
    else:
        yield x


def _averages_rows(module: nn.Module) -> bool:
    """Say whether a module is a batch norm without running statistics, which averages over rows in eval mode, too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def _check_alike(outputs: list[Tensor], sizes: list[int], remedy: str = "") -> None:
    """Raise unless the outputs of several chunks can be joined: then those of an example depend on other examples."""
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
    """Return the type of the numbers of a network."""
    real = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(real, torch.get_default_dtype())


def _device(model: nn.Module) -> torch.device:
    tensor = next((*model.parameters(), *model.buffers()).__iter__(), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _check(samples: int, chunk_size: int | None, noise: str) -> None:
    if not _counts(samples):
        raise ValueError(f"expected samples to be a whole number of at least 1, got {samples!r}")
    if not (chunk_size is None or _counts(chunk_size)):
        raise ValueError(f"expected chunk_size to be a whole number of at least 1 or None, got {chunk_size!r}")
    if noise not in ("function", "activation"):
        raise ValueError(f"expected noise to be one of function, activation, got {noise!r}")


def _counts(value: Any) -> bool:
    """Say whether a value is a whole number of at least 1, of Python's or of NumPy's."""
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False
