"""Prediction with S draws, each an ordinary network with the draw folded into its weights.

S frozen networks cost as much as S plain networks: no factor touches an activation. The weights of one plain twin are
replaced draw by draw. Rows run in chunks whose activations stay small. The modules before the first stochastic layer
run once for all draws.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn, Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from leanbayes.core.answer_graphs import Graphs, NotCapturableError, Source
from leanbayes.core.batched import Way
from leanbayes.core.changes import Changes
from leanbayes.core.chunks import check_alike, Chunks
from leanbayes.core.conversion import is_stochastic, layers_of, own_likelihood, unwrap
from leanbayes.core.frozen import Budget, FrozenDraws, Name, RowDraws
from leanbayes.core.prediction import concatenate, Prediction, ROW_AXES, RunningUncertainty
from leanbayes.core.stopping import predict_until
from leanbayes.core.student import Student
from leanbayes.core.summary import Price
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.layers.hooks import every_module
from leanbayes.methods._checks import whole_number
from leanbayes.methods.ensemble import member_of, members_of
from leanbayes.runtime.batches import device_of, Inputs, leading_rows, Output, to_device, without_arrays
from leanbayes.runtime.noise import check_design, Design
from leanbayes.runtime.passes import components_of, Width
from leanbayes.runtime.twins import tensors_of

NoiseOf = Literal["function", "activation"]

MEMORY = 256 * 2**20
"""Bytes of folded weights that a `Predictor` keeps by default."""


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
    design: Design = "independent",
    tolerance: float | None = None,
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
        design: "independent" draws, or "paired": draw 2j + 1 has the mirrored noise of draw 2j, so that errors of the
            first order in the noise cancel. Draw i uses component i mod K in both.
        tolerance: stop a row before S draws, once the others are expected to change its prediction by at most this
            divergence in nats (`core/stopping.py`); `p.draws` has the draws of each row, `p.samples` is None.

    Example:
        >>> p = lb.predict(bnn, x, samples=16)
        >>> p.mean, p.total, p.aleatoric, p.epistemic
    """
    predictor = _OneAnswer(
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
        design=design,
        tolerance=tolerance,
        memory=0,
    )
    return predictor.run(x)


def distinct_draws(model: nn.Module) -> int | None:
    """Return the number of different draws: K for K components without noise, 1 for a plain model.

    None means infinitely many, or an ensemble with stochastic members.
    """
    model = unwrap(model)
    members = members_of(model)
    if members:
        own = {distinct_draws(member) for member in members}
        return len(members) * (own.pop() or 0) if len(own) == 1 and not is_stochastic(model) else None
    noisy = any(layer.log_choices for layer in layers_of(model))
    return None if noisy else components_of(model)


def multiply_adds(run: Callable[[], object]) -> int:
    """Count the multiply-adds of a function: of matrix products, convolutions and attention."""
    from torch.nn.attention import sdpa_kernel, SDPBackend
    from torch.utils.flop_counter import FlopCounterMode

    # Fused layers of attention and LSTM have no count.
    mkldnn: Any = torch.backends.mkldnn
    fast, (fused, *_) = torch.backends.mha.get_fastpath_enabled(), mkldnn.set_flags(_enabled=False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        mkldnn.set_flags(_enabled=fused)
    total: int = counter.get_total_flops()
    return total // 2


class Predictor:
    """Predict repeatedly with S posterior draws: built once, called often.

    It keeps the sampled variables, and folded weights within `memory` bytes. A parameter or buffer that was changed,
    in place or by another tensor, takes effect at the next call. Changes through `.data`, which torch does not count,
    and replaced layers need `refresh`. Calls from several threads run one after the other.

    Small batches run all draws in one pass, large ones draw by draw (docs/design/0018-price.md); that changes
    probabilities by less than 1e-5.

    Args:
        model: the other arguments are those of `predict`.
        likelihood: default the model's own, else `Categorical`.
        memory: bytes of folded weights to keep between calls; 0 folds again at every call.
        capture: on a CUDA device, run calls with inputs of one shape as one CUDA graph, captured at the first of them;
            the graphs of the four latest shapes are kept. Calls that cannot be captured (`tolerance`, networks that
            read values on the host, noise="activation") run as usual, and one warning says why. On a CPU it has no
            effect.

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
        design: Design = "independent",
        tolerance: float | None = None,
        memory: int = MEMORY,
        capture: bool = False,
    ) -> None:
        _check(samples, chunk_size, noise, memory, likelihood)
        check_design(design, shared=noise == "function")
        _check_tolerance(tolerance, noise)
        self.tolerance = tolerance
        self.likelihood = likelihood or own_likelihood(model) or Categorical()
        self.model = unwrap(model)
        self.samples, self.seed, self.chunk_size = samples, whole_number("seed", seed), chunk_size
        self.keep_samples, self.component, self.width = keep_samples, component, width
        self.noise, self.output, self.design, self.limit = noise, output, design, memory
        self.capture, self.lock = capture, threading.RLock()
        self.refresh()

    def refresh(self) -> None:
        """Build the twins again, after layers of the model were replaced or weights changed through `.data`."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.distinct = distinct_draws(self.model) if self.noise == "function" else None
            self.number = min(self.samples, self.distinct or self.samples)  # fewer networks than samples run once each
            self.leaves: list[Chunks] = []
            self.budget = Budget(self.limit)
            network = self.model.network if isinstance(self.model, Student) else self.model
            given = None if self.likelihood is own_likelihood(self.model) else self.likelihood
            self.tree = self._build(network, self.component, self.number, given)
            self.graphs = Graphs()
            self._watch()

    def _watch(self) -> None:
        """Remember the tensors of the model, to notice later changes."""
        self.kind = device_of(self.model).type
        self.changes = Changes([*every_module(self.model), *every_module(self.likelihood)], self.kind)

    def _rest(self) -> None:
        """Drop everything that the next call must not see."""
        for leaf in self.leaves:
            leaf.draws.rest()

    def _caches(self) -> Iterator[Tensor]:
        return (tensor for leaf in self.leaves for tensor in leaf.caches())

    @property
    def memory(self) -> int:
        """The bytes of tensors that are kept between calls, without those of the model itself.

        With `capture`, those that torch has reserved for the graphs are counted, too: intermediate results, outputs
        and fixed inputs.
        """
        theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(self.model)}
        kept = [tensor.untyped_storage() for leaf in self.leaves for tensor in leaf.kept()]
        own = {one.data_ptr(): one.nbytes() for one in kept if one.data_ptr() not in theirs}
        return sum(own.values()) + self.graphs.nbytes

    def __call__(self, x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs]) -> Prediction:
        """Return the prediction for inputs, as `predict` takes them."""
        with self.lock:
            if self.changes.found():
                self.refresh()
            return self.run(x)

    def run(self, x: Inputs | NDArray[Any] | DataLoader[Any] | Iterator[Inputs]) -> Prediction:
        """Return the prediction without a look for changed parameters."""
        with self.lock, torch.inference_mode(False), torch.no_grad():  # tensors of inference mode have no version
            done, parts = 0, []
            for block in _blocks(x, self.model):
                parts.append(self._replayed(block) or self._predict(block, done))
                done += len(parts[-1].mean)
            self._rest()
        if not parts:
            raise ValueError("expected at least one batch of inputs, got an empty loader")
        check_alike([part.mean for part in parts], [len(part.mean) for part in parts], "give all of them at once")
        return concatenate(parts) if len(parts) > 1 else parts[0]

    def price(self, x: Inputs | NDArray[Any]) -> Price:
        """Count the multiply-adds of an answer for one row of x, and of a plain pass.

        A draw after the first of a network does not run the layers before its first stochastic layer again.
        """
        with self.lock, torch.inference_mode(False), torch.no_grad():
            (block,) = _blocks(x, self.model)
            rows, counts = _count_rows(block), []
            calls = Counter(id(self.select(index)) for index in range(self.number))
            for leaf in self.leaves:
                leaf.draws.forget_outputs()
                for index in range(min(2, calls[id(leaf)])):
                    leaf.draws.select(index)
                    run = partial(leaf.run, block, rows)
                    counts.append((multiply_adds(run), 1 if index == 0 else calls[id(leaf)] - 1))
                leaf.draws.rest()
        return Price(self.number, counts[0][0] // rows, sum(one * times for one, times in counts) // rows)

    def select(self, index: int) -> Chunks:
        """Return the source of draw `index`, ready to run; with K members, draw i // K of member i mod K."""
        source: Any = self.tree
        component = self.component
        while isinstance(source, list):  # members may be ensembles themselves
            source, index = member_of(source, index, component)
            component = None
        found: Chunks = source
        found.draws.select(index)
        return found

    def _build(self, model: nn.Module, component: int | None, count: int, likelihood: Likelihood | None) -> Any:
        """Return the source of `count` draws of a model, or a list of its members' ones; default their likelihood."""
        members = members_of(model)
        likelihood = likelihood or (getattr(model, "likelihood", None) if members else own_likelihood(model))
        if members:
            each = count if component is not None else -(-count // len(members))
            parts = [None] * len(members) if likelihood is None else likelihood.split(len(members))
            return [self._build(member, None, each, part) for member, part in zip(members, parts, strict=True)]
        name = Name(self.seed, component, self.width, self.design)
        draws = FrozenDraws(model, name, count, self.budget) if self.noise == "function" else RowDraws(model, name)
        self.leaves.append(Chunks(draws, likelihood or self.likelihood, self.chunk_size, self.output))
        return self.leaves[-1]

    def _replayed(self, x: Inputs) -> Prediction | None:
        """Return the prediction of a CUDA graph; None without `capture`, and where nothing can be captured."""
        if not self.capture or self.kind != "cuda":
            return None
        try:
            if self.tolerance is not None:
                raise NotCapturableError("a tolerance decides between passes which rows are left")
            if self.noise != "function":
                raise NotCapturableError("noise for every row is drawn in every call")
            source = Source(lambda x: _tensors(self._predict(x, 0)), self._rest, self._caches)
            tensors: dict[str, Any] = {"samples": None, "variances": None, **self.graphs(x, source)}
        except NotCapturableError as reason:
            self.capture = False
            warnings.warn(f"answers run without a CUDA graph: {reason}", stacklevel=4)
            return None
        return Prediction(**tensors, likelihood=self.likelihood)

    def _predict(self, x: Inputs, done: int) -> Prediction:
        """Predict for one block of rows, `done` rows after the first."""
        likelihood = self.likelihood
        for leaf in self.leaves:
            leaf.draws.forget_outputs()
        if isinstance(self.model, Student):
            ((_, outputs),) = self._outputs(x, range(1), done)
            return self.model.prediction(outputs[0], likelihood)
        if self.tolerance is not None:
            return self._predict_until(x, done)
        running = RunningUncertainty(likelihood.measure)
        kept: list[tuple[Tensor, Tensor]] = []
        for of, outputs in self._outputs(x, range(self.number), done):
            mean, own = _predictive(of, outputs)
            running.add_all(mean, own)
            if self.keep_samples or self.number < self.samples:
                kept.append((mean, own))
        means, owns = map(_joined, zip(*kept, strict=True)) if kept else (None, None)
        if means is not None and owns is not None and self.number < self.samples:
            again = torch.arange(self.samples, device=means.device) % self.number
            means, owns = means[again], owns[again]
            step = 1 if len(kept) == self.number else self.samples  # one by one, or all together, as before
            for start in range(self.number, self.samples, step):
                running.add_all(means[start : start + step], owns[start : start + step])
        result = running.result()
        return Prediction(
            mean=result.mean,
            total=result.total,
            aleatoric=result.aleatoric,
            epistemic=result.epistemic,
            samples=means if self.keep_samples else None,
            variances=owns if self.keep_samples and likelihood.measure == "variance" else None,
            likelihood=likelihood,
        )

    def _predict_until(self, x: Inputs, done: int) -> Prediction:
        """Predict with as many draws for each row as it needs; rows that depend on each other take all draws."""
        rows, tolerance = _count_rows(x), self.tolerance or 0.0
        if not all(leaf.divisible(x) for leaf in self.leaves):
            tolerance = -1.0

        def run(some: Inputs, draws: range) -> Iterator[tuple[Tensor, Tensor]]:
            for leaf in self.leaves:
                leaf.draws.forget_outputs()  # of other rows
            for likelihood, outputs in self._outputs(some, draws, done):
                yield _predictive(likelihood, outputs)

        # Draws of members alternate, so that neighbours are no pair.
        unit = 2 if self.design == "paired" and not isinstance(self.tree, list) else 1
        return predict_until(run, x, rows, self.number, unit, tolerance, self.likelihood)

    def _outputs(self, x: Inputs, indices: range, done: int) -> Iterator[tuple[Likelihood, Tensor]]:
        """Yield the outputs of these draws in order, of one or several at a time, (G, B, ...), and their likelihood."""
        rows = _count_rows(x)
        leaf = None if isinstance(self.tree, list) else self.tree
        way: Way = "folded" if leaf is None else leaf.way(x, rows)
        index, failed = indices.start, False
        while index < indices.stop:
            together, source = None, leaf
            if leaf is not None and way != "folded":
                group = range(index, min(leaf.draws.group(index).stop, indices.stop))
                together = leaf.run_together(way, group, x)
                failed = together is None
            if together is None:
                way, group = "folded", range(index, index + 1)
                source = self.select(index)
                together = source.run(x, rows, done)[None]
            assert source is not None
            yield source.likelihood, together
            index = group.stop
        if failed and leaf is not None:
            leaf.batched = None  # the draws run, but not together


class _OneAnswer(Predictor):
    """A predictor that is used once: no parameter can change between its calls."""

    @override
    def _watch(self) -> None:
        self.kind = ""


def _tensors(prediction: Prediction) -> dict[str, Tensor]:
    """Return the tensors of a prediction by name."""
    named = {name: getattr(prediction, name) for name in ROW_AXES}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _predictive(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and own uncertainties of several draws (G, B, ...)."""
    if len(outputs) == 1:
        mean, own = likelihood.predictive(outputs[0])
        return mean[None], own[None]
    if type(likelihood) is Categorical and likelihood.axis == 1 and outputs.dim() > 2 and outputs.shape[2] > 1:
        # Draws on the last axis: a softmax over few classes is then vectorised over draws, twenty times as fast.
        mean, own = likelihood.predictive(outputs.movedim(0, -1).contiguous())
        return mean.movedim(-1, 0).contiguous(), own.movedim(-1, 0)
    try:
        mean, own = likelihood.predictive(outputs.flatten(0, 1))
    except ValueError:
        likelihood.predictive(outputs[0])  # its message names the shape of one draw
        raise
    draws = len(outputs)
    return mean.reshape(draws, -1, *mean.shape[1:]), own.reshape(draws, -1, *own.shape[1:])


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


def _dtype(model: nn.Module) -> torch.dtype:
    real = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(real, torch.get_default_dtype())


def _check_tolerance(tolerance: float | None, noise: str) -> None:
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance >= 0):
        raise ValueError(f"expected tolerance to be a divergence in nats of at least 0 or None, got {tolerance!r}")
    if tolerance is not None and noise != "function":
        raise ValueError(
            f"a row's noise depends on the others: expected noise='function' with tolerance, got {noise!r}"
        )


def _check(samples: int, chunk_size: int | None, noise: str, memory: float, likelihood: object) -> None:
    if not (likelihood is None or isinstance(likelihood, Likelihood)):
        raise TypeError(
            f"expected a likelihood such as lb.Gaussian() or lb.Categorical(), got {likelihood!r}; name other "
            "arguments: samples=16"
        )
    if not _counts(samples):
        raise ValueError(f"expected samples to be a whole number of at least 1, got {samples!r}")
    if not (chunk_size is None or _counts(chunk_size)):
        raise ValueError(f"expected chunk_size to be a whole number of at least 1 or None, got {chunk_size!r}")
    if noise not in ("function", "activation"):
        raise ValueError(f"expected noise to be one of function, activation, got {noise!r}")
    if not (isinstance(memory, (int, float)) and memory >= 0):
        raise ValueError(f"expected memory to be a number of bytes of at least 0, got {memory!r}")


def _counts(value: Any) -> bool:
    """Return whether a value is a whole number of Python or NumPy, at least 1."""
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False
