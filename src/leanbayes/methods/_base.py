"""The contract of a method: `Method` holds its settings, `StochasticLayer` is a layer with its noise."""

from __future__ import annotations

import abc
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn, Tensor

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.factor import Factor
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.layers.family import Family, family_of
from leanbayes.layers.hooks import copy_hooks, move_hooks
from leanbayes.runtime.batches import Output
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import PassState, Variables, Width
from leanbayes.runtime.rows import align_rows, broadcast_channels, Layout, one_row, ROWS

Training = tuple[Any, Tensor] | Iterable[Any]
"""A training set: one pair (inputs, targets), or batches of such pairs."""

Space = Mapping[str, tuple[float, float]]
"""Fields of a method with the ends of their ranges."""

READ = ("weight", "bias")
"""Parameters that a network may read instead of calling their layer."""


class StochasticLayer(nn.Module, abc.ABC):
    """A layer with noise around the original layer `base`, whose attributes (sizes, stride) it shows as its own.

    Subclasses put their parameters under `posterior`. State-dict keys are `<path>.base.*` and `<path>.posterior.*`.

    Attributes:
        base: the original layer.
        posterior: a module with the method's parameters.
        family: where the channels of `base` are.
        components: number of mixture components of the posterior.
        nodes: number of random variables of one draw.
        stored: number of the posterior's numbers that no gradient trains; they count as parameters of the method.
        state: the state of the current pass, shared by all layers of a model.
        path: dotted path at conversion; names the layer in errors and seeds its noise.
        arguments: names of the arguments of `base.forward`.
        row_noise: whether the first axis of the noise counts rows.
        ordered: whether the layer orders its channels and can be narrowed by `width`.
        layout: the axis that holds the rows of the batch; None until known.
        used: whether a pass calls the layer or reads its weight; None until known.
        sequential: whether the layer serves the steps of a sequence; all steps share one draw.
        sampled_together: whether `sample_of` samples all layers of the method when a pass begins.
        log_choices: log of the number of different draws of the layer; infinite for continuous noise.
        likelihood: the model's own likelihood. One layer keeps it, so that it is saved and trained with the model.
    """

    base: Any  # any user layer: mypy cannot know its attributes
    posterior: Any
    components: int = 1
    nodes: int = 0
    stored: int = 0
    row_noise: bool = True
    ordered: bool = False
    sequential: bool = False
    sampled_together: bool = False
    layout: Layout | None = None
    used: bool | None = None
    log_choices: float = math.inf
    likelihood: Likelihood | None

    def __init__(self, base: nn.Module, method: Method) -> None:
        """Take over `base`, its mode and its hooks. The hooks see the inputs and outputs of the stochastic layer."""
        super().__init__()
        family = family_of(base)
        assert family is not None, "convert offers only layers that have a family"
        self.family: Family = family
        self.method = method
        self.state = PassState()
        self.path = ""
        self.arguments = tuple(inspect.signature(base.forward).parameters)
        self.likelihood = None
        self.base = base
        self.posterior = nn.Module()
        self.training = base.training
        move_hooks(base, self)

    def attach(self, state: PassState, path: str) -> None:
        """Set the pass state of the model and the path of the layer."""
        self.state, self.path = state, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer. Named arguments of `base.forward` (`output_size`) become positional ones."""
        if kwargs:
            args = (*args, *(kwargs.pop(name) for name in self.arguments[len(args) :] if name in kwargs))
        return super().__call__(*args, **kwargs)

    @abc.abstractmethod
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """Return the output under the variables of the current pass."""

    @abc.abstractmethod
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        """Return the noise of one function for all rows (`shared`), or of a pass with noise per row.

        No specs for a pass mean that the noise has the size of an activation (`state.activation_noise`).
        """

    @abc.abstractmethod
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return random variables by name, a function of the parameters and these arguments alone.

        Args:
            component: the component of each of R rows or draws (first axis of the variables); None averages all.
            noise: one tensor per spec; None returns centres instead of samples.
            width: share of the channels to keep, for layers that order them.
        """

    @classmethod
    def sample_of(
        cls, layers: Sequence[Self], component: Assignment, noise: Sequence[Noise], width: Width
    ) -> list[Variables]:
        """Return the variables of several layers of one method. Override it to compute them in one operation."""
        return [layer.sample(component, own, width) for layer, own in zip(layers, noise, strict=True)]

    def variables(self, rows: int = 1) -> Variables:
        """Return the random variables of the current pass for `rows` rows."""
        return self.state.variables_of(self, rows)

    @property
    def is_sampled_ahead(self) -> bool:
        """Whether the variables of the current pass are those of `sample_of`."""
        return self.state.holds_variables_of(self)

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype of activations in a pass that begins now: that of autocast, or that of the weights."""
        weight: Tensor = self.base.weight
        autocast = weight.dtype != torch.float64 and torch.is_autocast_enabled(weight.device.type)
        return torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype

    @abc.abstractmethod
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the plain layer under the variables of one draw (no first axis), by name."""

    def kl(self) -> Tensor:
        """Return the divergence from the prior in nats: a float32 scalar, a function of the parameters alone.

        A subclass defines `kl`, or `kl_of` for several layers in one operation.
        """
        return self.kl_of([self])

    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        """Return the sum of the divergences of several layers of one method."""
        if cls.kl is StochasticLayer.kl:
            raise TypeError(f"expected {cls.__name__} to define kl or kl_of, got neither")
        return torch.stack([layer.kl().float() for layer in layers]).sum()

    def freeze(self) -> nn.Module:
        """Return an ordinary layer with the current draw folded into its weights."""
        return self.twin(one_draw(self.variables(), 0))

    def twin(self, variables: Mapping[str, Tensor]) -> nn.Module:
        """Return an ordinary layer under the variables of one draw; `fold` gives the tensors of another draw."""
        make = self.family.plain or plain_copy
        plain = make(self.base, self.fold(variables))
        plain.train(self.training)
        copy_hooks(self, plain)
        return plain

    def together(self) -> nn.Module | None:
        """Return a `DrawsLayer` for the rows of several draws of `sample`; None if the method or layer has none."""
        return None

    def spread(self, variable: Tensor, x: Tensor) -> Tensor:
        """Return variables (R, n) in a shape that multiplies the channels of x, row by row."""
        if variable.dtype == x.dtype and variable.shape == x.shape and self._has_shape_of_rows(x):
            return variable
        where = self.family.axis, self.layout, self.path, self._turn()
        return broadcast_channels(variable, x, *where, ready=self.is_sampled_ahead)

    def _has_shape_of_rows(self, x: Tensor) -> bool:
        """Return whether variables of the shape of x are those of its rows and channels."""
        first = self.layout is None or self.layout.axis == 0
        return first and x.dim() == 2 and self.family.axis % 2 == 1 and not torch.compiler.is_compiling()

    def align(self, variable: Tensor, x: Tensor, channels: int) -> tuple[Tensor, int]:
        """Return variables with one row for each entry of an axis of x, or a single row, and that axis."""
        return align_rows(variable, x, channels, self.layout, self.path, self._turn())

    def drawn(self, name: str) -> Tensor | None:
        """Return the weight or bias of the current pass, for networks that read it without calling the layer.

        One draw serves the whole batch. Outside a pass the result is None.
        """
        if name not in READ or not self.state.current().live:
            return None
        self.used, turn = True, self.state.current().key
        sampled = {key: one_row(value, turn) for key, value in self.variables().items()}
        return self.fold(one_draw(sampled, 0)).get(name)

    def _turn(self) -> int | None:
        return None if self.layout == ROWS else self.state.current().key

    @property
    def weight_now(self) -> Tensor:
        """The effective weight of `base`: the stored one, or the one that the layer computes from it."""
        weight: Tensor = self.base.weight if self.family.weight is None else self.family.weight(self.base)
        return weight

    @property
    def bias_now(self) -> Tensor | None:
        """The bias of `base`; None for layers without one, such as embeddings."""
        bias: Tensor | None = getattr(self.base, "bias", None)
        return bias

    @property
    def wide(self) -> torch.dtype:
        """The dtype of posterior parameters: that of the weight, but at least float32."""
        return torch.promote_types(self.base.weight.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the layer's parameters."""
        own = next((tensor for tensor in self.base._parameters.values() if tensor is not None), None)
        return next(itertools.chain(self.parameters(), self.buffers())).device if own is None else own.device

    def __getattr__(self, name: str) -> Any:
        """Look up missing attributes (`in_features`, `stride`, ...) in the original layer.

        During a pass, `weight` and `bias` are those of the draw: some networks read them without calling the layer.
        """
        modules = self.__dict__.get("_modules", {})
        if name in modules:  # `base` and `posterior`, in every pass
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = self._modules.get("base")
            if base is None or name.startswith("_"):
                raise
            drawn = self.drawn(name)
            return getattr(base, name) if drawn is None else drawn

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter that `base` has there: `layer.weight = other.weight` ties the weight of `base`."""
        base = self._modules.get("base")
        there = None if base is None else base._parameters.get(name)
        if there is None:
            super().register_parameter(name, param)
            return
        if param is not None and param.shape != there.shape:
            raise ValueError(
                f"expected the {name} of layer '{self.path}' to keep its shape {tuple(there.shape)}, which its "
                f"posterior fits, got {tuple(param.shape)}; resize the network before it is converted"
            )
        setattr(base, name, param)

    def extra_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the posterior and of a learned likelihood."""
        own = list(self.posterior.parameters())
        return own if self.likelihood is None else [*own, *self.likelihood.parameters()]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the keys of the plain network: `<path>.weight` is read as `<path>.base.weight`."""
        for name in list(self.base.state_dict()):
            if prefix + name in state_dict:
                state_dict[f"{prefix}base.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Show the method."""
        return repr(self.method)


@dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """The settings of a method; its fields are hyper-parameters in natural units.

    Attributes:
        name: the name in the command line, checkpoints and results.
        targets: the layer types that it can wrap.
        things: a noun for these layers.
        partial: whether it converts a small part of a network by design, such as its norms.
        later: fields that older results do not have, with their defaults. `fields` leaves them out at the default.
        late: default of `leanbayes compare` for the share of plain epochs before the conversion; 0 converts first.
        posterior_rate: default of `leanbayes compare` for the posterior's learning rate, relative to the weights'.
        space: fields of the noise level that `leanbayes compare --tune` chooses, with the ends of their ranges, which
            are on a log scale if both are positive; default none.
        post_hoc: whether the plain network is trained, and the posterior comes from `after_training`.
        scaled: fields of the initial noise that `leanbayes compare` lowers for real targets with little noise.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[type[nn.Module], ...]]
    things: ClassVar[str] = "layers with a linear map"
    partial: ClassVar[bool] = False
    later: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    late: ClassVar[float] = 0.7
    posterior_rate: ClassVar[float] = 1.0
    space: ClassVar[Space] = MappingProxyType({})
    post_hoc: ClassVar[bool] = False
    scaled: ClassVar[tuple[str, ...]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the method itself, which cannot change: copies of models share it."""
        return self

    @abc.abstractmethod
    def wrap(self, layer: nn.Module) -> StochasticLayer:
        """Return the layer with noise around it."""

    def wrap_all(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, StochasticLayer]:
        """Return the wrapped layers by path; layers that are left out stay plain. Override it for shared parts."""
        return {path: self.wrap(layer) for path, layer in layers.items()}

    def given(self, example: Any) -> Method:
        """Return the method, with the shapes of example inputs if it needs them."""
        return self

    def review(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> str | None:
        """Return a message before layers that the user did not name are converted.

        Raises:
            ValueError: if the method would have no effect.
        """
        return None

    def choose(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        """Return the paths of the layers to convert if the user names none; default all targets."""
        return {path for path, _ in layers}

    def build(self, make_network: Callable[[int], nn.Module], seed: int) -> nn.Module:
        """Return the network that training starts from: `make_network(seed)`, or an ensemble of several."""
        return make_network(seed)

    def whole(self, model: nn.Module) -> nn.Module | None:
        """Return a new model around whole copies of this one; None for methods that wrap layers."""
        return None

    def before_training(  # noqa: B027
        self, model: nn.Module, data: Training, likelihood: object = None, *, output: Output | None = None
    ) -> None:
        """Raise if `after_training` could not use these arguments after the training; by default all are fine."""

    def after_training(  # noqa: B027
        self, model: nn.Module, data: Training, likelihood: object = None, *, output: Output | None = None
    ) -> None:
        """Compute the part of the posterior that no gradient trains, from the trained weights; by default nothing.

        `fit` calls it once, at the end. Call it yourself after a training loop of your own.

        Args:
            model: the trained model, changed in place.
            data: the training set: a pair `(inputs, targets)`, or batches of such pairs, which can be read repeatedly
                (a DataLoader). With several processes, each gives its own rows.
            likelihood: the loss of the training; default the model's own likelihood.
            output: picks the tensor from the model's result.
        """

    def extended(self, recipe: Any) -> Any:
        """Return the recipe of a training, with the further epochs that the method needs."""
        return recipe

    @property
    def training_ratio(self) -> float | None:
        """The cost of a training in plain ones, where the plain network is trained; None if it has to be measured."""
        return 1.0 if self.post_hoc else None

    @classmethod
    def examples(cls) -> dict[str, Method]:
        """Return instances to test by name: the defaults, and each option that changes the mathematics."""
        return {"default": cls()}

    def remark(self, layers: Mapping[str, nn.Module]) -> str:
        """Return a message about the layers that the method chose itself, by path; empty for none."""
        return ""

    def notice(self) -> str | None:
        """Return a warning about these fields, if there is one."""
        return None

    def fields(self) -> dict[str, Any]:
        """Return the fields by name for JSON: tuples as lists, fields of `later` at their default left out."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: value for name, value in named.items() if self.later.get(name, ...) != value}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def factor_noise(factor: Factor) -> NoiseSpec:
    """Return the noise of a factor: one number for each row and channel, none for a point."""
    return NoiseSpec(factor.law.noise, (factor.count if factor.law.has_scale else 0,))


def one_draw(variables: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """Return the variables of one draw; variables that all draws share have one row."""
    return {name: value[row if len(value) > 1 else 0] for name, value in variables.items()}


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would round products; where it is off, an empty one is cheaper."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def plain_copy(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return an ordinary twin of a layer with the given tensors as parameters; it shares all others.

    Parametrised layers (weight norm) lose the parametrisation: their weight is a plain tensor.
    """
    kind: Any = nn.utils.parametrize.type_before_parametrizations(layer)
    twin: nn.Module = kind.__new__(kind)
    twin.__dict__.update(layer.__dict__)
    own = layer._parameters
    twin._parameters = {
        name: nn.Parameter(tensors[name], requires_grad=_trainable(own.get(name))) if name in tensors else own[name]
        for name in dict.fromkeys((*tensors, *own))
    }
    twin._buffers = dict(layer._buffers)
    twin._modules = {n: m for n, m in layer._modules.items() if n != "parametrizations"}
    return twin


def _trainable(old: Tensor | None) -> bool:
    return old is None or old.requires_grad
