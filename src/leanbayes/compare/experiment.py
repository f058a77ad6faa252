"""`Experiment`: data, networks, out-of-distribution, shifted and corrupted rows, loaded once for all jobs."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes import data, models
from leanbayes.compare.job import DataSpec, EvaluationSpec, TABLE_FIELDS
from leanbayes.core.conversion import attach_likelihood, convert
from leanbayes.data import DataSet, Split
from leanbayes.data.holdout import held_out
from leanbayes.data.loading import resolve
from leanbayes.data.out_of_distribution import ShiftedRows
from leanbayes.data.table import select
from leanbayes.distributions.likelihoods import Categorical, Gaussian, Likelihood
from leanbayes.methods._base import Method
from leanbayes.models.table import embedded_width
from leanbayes.shift.sweep import Shift

OWN_NETWORK = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""The name of a user's network, package.module:function."""

INITIAL_STD = 0.5  # initial noise of standardised regression targets; it is learned


@dataclass(frozen=True, eq=False)
class CachedShift(Shift):
    """Corruptions that are computed once for all jobs."""

    cache: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    @override
    def corrupted(self, name: str, severity: int) -> Tensor:
        key = (name, severity)
        if key not in self.cache:
            self.cache[key] = super().corrupted(name, severity)
        return self.cache[key]


class Experiment:
    """Data and networks that several jobs share."""

    def __init__(self, source: DataSpec, net: str, evaluation: EvaluationSpec) -> None:
        """Load the data and try the network, so that errors appear before any training."""
        self.evaluation = evaluation
        self.data = load(source)
        self.root = source.root
        shape: dict[str, Any] = {"num_outputs": self.data.num_outputs, "input_shape": self.data.input_shape}
        self.make = maker(net, **shape, embedded=self.data.embedded)
        self._try_network(net)
        self.ood, self.shift_data  # noqa: B018  # an unknown name raises now

    def likelihood(self) -> Likelihood:
        return likelihood_for(self.data)

    def plain(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def model(self, method: Method | None, seed: int, where: tuple[str, ...] = ()) -> nn.Module:
        """Return the model of a method, initialised by the seed."""
        if method is None:
            return self.plain(seed)
        net = method.build(self.plain, seed)
        if not method.targets:  # an ensemble of whole networks has no layers to convert
            attach_likelihood(net, self.likelihood())
            return net
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return convert(net, method, where=where or None, likelihood=self.likelihood())

    @cached_property
    def test(self) -> tuple[Tensor, Tensor, Tensor]:
        """Raw test rows, network inputs, and targets in their own units; all rows, or evenly spaced ones."""
        split = self.data.test
        rows = _evenly(len(split), self.evaluation.test_images)
        return split.x[rows], self.data.inputs(split.x[rows]), split.y[rows]

    @property
    def units(self) -> tuple[Tensor, Tensor] | None:
        return units_of(self.data)

    @cached_property
    def ood(self) -> dict[str, Any]:
        found = {name: data.ood(name, self.data, self.root) for name in self.evaluation.ood}
        limit = self.evaluation.test_images
        return {name: (self.data.inputs(x[_evenly(len(x), limit)]), None) for name, x in found.items()}

    @cached_property
    def shift_data(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows of another origin by name: network inputs, and targets in their own units."""
        found = shifted_rows(self.evaluation.shift_data, self.data, self.root)
        limit = self.evaluation.test_images
        taken = {name: each.rows.take(_evenly(len(each.rows), limit)) for name, each in found.items()}
        return {name: (self.data.inputs(split.x), split.y) for name, split in taken.items()}

    @cached_property
    def shift(self) -> Shift | None:
        """Corrupted test images; None for other data."""
        if not self.evaluation.shift or self.data.kind != "image" or self.data.input_shape[0] not in (1, 3):
            return None
        rows = _evenly(len(self.data.test), self.evaluation.shift_images)
        chosen = {"corruptions": self.evaluation.shift_corruptions, "severities": self.evaluation.shift_severities}
        some: dict[str, Any] = {name: value for name, value in chosen.items() if value}
        images = self.data.test.x[rows]
        return CachedShift(images=images, y=self.data.test.y[rows], inputs=self.data.inputs, **some)

    def _try_network(self, net: str) -> None:
        network = self.plain(0).eval()
        x = self.data.inputs(self.data.test.x[:2])
        try:
            with torch.no_grad():
                y = network(x)
        except Exception as error:
            raise ValueError(
                f"the network {net} cannot take inputs of shape {tuple(x.shape)}: {str(error).splitlines()[0]}"
            ) from error
        if not isinstance(y, Tensor) or y.shape != (len(x), self.data.num_outputs):
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"expected the network {net} to give outputs of shape (rows, {self.data.num_outputs}) for "
                f"{self.data.name}, got {got}. Return one tensor, with one output for each class or target."
            )
        if self.data.task == "classification" and _probabilities(y):
            warnings.warn(
                f"the network {net} seems to end in a softmax: its outputs are not negative, and each row sums to 1. "
                "They are taken for logits. Leave the softmax out",
                stacklevel=2,
            )


def _probabilities(y: Tensor) -> bool:
    """Return whether outputs look like probabilities of classes."""
    return bool((y >= 0).all() and torch.allclose(y.float().sum(1), torch.ones(len(y), device=y.device), atol=1e-4))


def refusal(method: Method | None, net: str, data: DataSet, where: tuple[str, ...] = ()) -> str | None:
    """Return why a method cannot convert the network of a data set, up to the first colon; None if it can."""
    if method is None or not method.targets:
        return None
    try:
        network = maker(net, num_outputs=data.num_outputs, input_shape=data.input_shape, embedded=data.embedded)()
    except ValueError:
        return None  # the experiment says why
    try:
        convert(network, method, where=where or None, likelihood=likelihood_for(data))
    except ValueError as error:
        return str(error).split(": ", 1)[0]
    return None


def likelihood_for(data: DataSet) -> Likelihood:
    """Return a new likelihood for the task of a data set."""
    return Categorical() if data.task == "classification" else Gaussian(std=INITIAL_STD, learn=True)


def units_of(data: DataSet) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of regression targets; None for classes."""
    return None if data.task == "classification" else (data.target_mean, data.target_std)


def load(source: DataSpec) -> DataSet:
    """Return a data set with the rows that its spec asks for."""
    own = {name: getattr(source, name) for name in ("target", "task", "channels", *TABLE_FIELDS)}
    whole = data.load(source.name, source.root, split=source.split, **own)
    if wanted := source.hold_out:
        rows = len(whole.train)
        if wanted >= rows:
            raise ValueError(f"expected --hold-out to be below the {rows:,} training rows, got {wanted:,}")
        held = _hold_out(whole.train, wanted)
        whole = _train_on(whole, ~held, held)
    if 0 < source.train_rows < len(whole.train):
        whole = _train_on(whole, _evenly(len(whole.train), source.train_rows))
    return whole


def shifted_rows(names: Sequence[str], like: DataSet, root: str | None) -> dict[str, ShiftedRows]:
    """Return rows of another origin by name, of a file its name without the ending; equal names raise."""
    found: dict[str, ShiftedRows] = {}
    for name in names:
        own = isinstance(resolve(name), Path) and name not in like.further
        short = Path(name).expanduser().resolve().stem if own else name
        if short in found:
            raise ValueError(f"expected names that differ for --shift-data, got {short!r} twice; rename a file")
        found[short] = data.shifted(name, like, root)
    return found


def _hold_out(split: Split, wanted: int) -> Tensor:
    """Mark evenly spaced rows; of a table with times the latest ones, of one with groups whole groups."""
    if split.time is not None or split.group is not None:
        return held_out(split.y, wanted / len(split), 0, groups=split.group, time=split.time)
    held = torch.zeros(len(split), dtype=torch.bool)
    held[_evenly(len(split), wanted)] = True
    return held


def _train_on(whole: DataSet, rows: Tensor, test: Tensor | None = None) -> DataSet:
    """Return the data set with some of its training rows, others to test on; every class must keep one."""
    some = whole.train.take(rows)
    if whole.task == "classification" and (missing := set(range(len(whole.classes))) - set(some.y.tolist())):
        name = whole.classes[min(missing)]
        raise ValueError(f"{len(some)} training rows leave class {name!r} of {whole.name} without any; take more")
    return select(whole, rows, test)


def _evenly(rows: int, wanted: int) -> Tensor:
    """Return evenly spaced row numbers, so that sets sorted by class keep all classes."""
    if not 0 < wanted < rows:
        return torch.arange(rows)
    return torch.arange(wanted) * rows // wanted


def maker(
    net: str, *, num_outputs: int, input_shape: tuple[int, ...], embedded: Mapping[int, int] | None = None
) -> Callable[[], nn.Module]:
    """Return a function that makes a new network at each call.

    A user's own function receives `num_outputs` and `input_shape` if it accepts them. The current folder is importable.
    Such a name must come from the command line, never from a file: it runs code. Columns of codes (`embedded`, as in
    `DataSet`) become learned vectors, and the network takes these instead.

    Raises:
        ValueError: in one sentence, if the network is unknown or cannot be made.
    """
    if embedded:
        (inputs,) = input_shape
        body = maker(net, num_outputs=num_outputs, input_shape=(embedded_width(inputs, embedded),))
        return lambda: models.TableNet(lambda _: body(), inputs, embedded)
    known: dict[str, Any] = {"num_outputs": num_outputs, "input_shape": input_shape}
    if ":" not in net:
        return lambda: models.build(net, **known)
    function = _import_function(net)
    accepted = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    keywords = {name: value for name, value in known.items() if everything or name in accepted}

    def make() -> nn.Module:
        try:
            made = function(**keywords)
        except Exception as error:
            raise ValueError(f"{net} failed to make a network: {type(error).__name__}: {error}") from error
        if not isinstance(made, nn.Module):
            raise ValueError(f"expected {net} to return a torch.nn.Module, got {type(made).__name__}")
        if any(nn.parameter.is_lazy(parameter) for parameter in made.parameters()):
            with torch.no_grad():  # two rows of zeros give lazy layers their sizes
                made.eval()(torch.zeros(2, *input_shape))
            made.train()
        return made

    return make


def check_network(recorded: str, given: str, place: Path) -> str:
    """Return the network of a run if it is safe to make: a known one, or one that the command line names too.

    `recorded` is the name in a file of the run's folder, `place`. It is compared with the `given` one, never imported.

    Raises:
        ValueError: in one sentence, if a user's own network was not named, or another one was.
    """
    if ":" in recorded and not OWN_NETWORK.fullmatch(recorded):
        raise ValueError(f"'{place}' names a network {recorded!r}, which is neither known nor package.module:function")
    if given and given != recorded:
        raise ValueError(f"expected --net {recorded!r}, which the run was trained on, got {given!r}, for '{place}'")
    if given or ":" not in recorded:
        return recorded
    raise ValueError(
        f"'{place}' was trained on the network {recorded}, which is code outside of leanbayes and is not imported "
        f"because a file names it; add --net {recorded} if you trust {recorded.partition(':')[0]}"
    )


def _import_function(net: str) -> Callable[..., Any]:
    module_name, _, function_name = net.partition(":")
    if not OWN_NETWORK.fullmatch(net):
        raise ValueError(f"expected a network as package.module:function, got {net!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"cannot import {module_name} for the network {net}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{module_name} has no {function_name}; write the network as package.module:function")
    if isinstance(function, nn.Module) or not callable(function):
        kind = type(function).__name__
        raise ValueError(
            f"expected {net} to be a function that makes a network, got a {kind}; write one that returns it"
        )
    return function  # type: ignore[no-any-return]
