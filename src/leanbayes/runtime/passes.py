"""The forward pass of a converted model: its state (`PassState`), its modes, and the context manager `draws`.

A converted model has one `PassState`, which all its stochastic layers share. A pass begins when the model is called (a
hook on its root) and has one of three modes:

* `Fresh`, outside `draws`: every row of the batch has noise of its own, and components are dealt to the rows;
* `Fixed`, inside `draws(model, seed=..., index=...)`: one function for all rows, named by seed, index and layer path;
* `Mean`, inside `draws(model, mean=True)`: the centres of the posteriors.

Components, all noise of a known size and one key of 64 bits are drawn when a pass begins. Noise of the size of an
activation is a function of the key, the layer's path and the shape. So a layer draws nothing from torch's generator,
and a layer that is called twice in a pass sees the same noise twice. A recomputation during backward (activation
checkpointing) finds its own pass in the `History`, also after later passes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn, Tensor

from leanbayes.distributions.assignment import Assignment, blocks
from leanbayes.layers.hooks import every_module
from leanbayes.runtime.batches import rows_of, tensors_in
from leanbayes.runtime.distributed import has_shards, is_shard, may_have_shards, rank_and_world, refuse_shards
from leanbayes.runtime.history import History, in_backward
from leanbayes.runtime.noise import (
    activation_noise,
    check_design,
    Design,
    designed_noise,
    fresh_noise,
    function_noise,
    generator_of,
    is_captured,
    Noise,
    NoisePool,
    Noisy,
    row_noise,
)

Width = float | int | None
"""Share (float) or number (int) of channel groups to keep, for layers that order their channels; None: as drawn."""

Variables = dict[str, Tensor]
"""Random variables of a layer by name, draws or rows on the first axis."""


class Drawing(Noisy, Protocol):
    """The part of a stochastic layer that its component and noise depend on."""

    components: int
    ordered: bool

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Layer(Drawing, Protocol):
    """The part of a stochastic layer that a pass needs."""

    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables: ...


@dataclass(frozen=True)
class Fresh:
    """New noise at every pass.

    Attributes:
        plan: components of the rows, if the caller has decided them (`elbo` does).
        name: seed, index and ordinal of noise per row that is named, inside `draws(shared=False)`.
    """

    plan: Assignment | None = None
    name: tuple[int, int, int] | None = None
    width: Width = None


@dataclass(frozen=True)
class Fixed:
    """Named functions, one for each index, whose noise was made before the pass."""

    seed: int
    indices: tuple[int, ...]
    width: Width = None


@dataclass(frozen=True)
class Mean:
    """Centres of the posteriors: of one component, or averaged over all."""

    component: Assignment | None = None
    width: Width = None


FRESH = Fresh()


@dataclass
class PassState:
    """The state of the current pass. Layers ask `variables_of`; nothing else in a converted model has state.

    Attributes:
        components: the least common multiple of the layers' component counts.
        mode: the mode of the coming passes.
        rows: rows of the caller's batch in the current pass, None if unknown.
        component: components of the rows of the current pass.
        noise: noise of the current pass by layer path.
        variables: variables that were sampled when the pass began, by identity of the layer.
        region: grad mode and saved-tensor hooks when the variables were sampled.
        key: random key of the current pass, for noise of the size of an activation; None where noise is named, and in
            compiled or captured passes, which draw such noise from torch's generator.
        live: whether a pass is running.
        part: identity of the part of the model that began it, None for the whole.
        rows_known: whether the axis of the rows in each layer is known.
        history: earlier passes, for recomputations.
        plan: the layers of the module that passes begin with, looked up once.
    """

    components: int = 1
    mode: Fresh | Fixed | Mean = FRESH
    rows: int | None = None
    component: Assignment | None = None
    noise: dict[str, Noise] = field(default_factory=dict)
    variables: dict[int, Variables] = field(default_factory=dict, repr=False, compare=False)
    region: Any = field(default=None, repr=False, compare=False)
    key: int | None = None
    live: bool = False
    part: int | None = None
    rows_known: bool = False
    history: History[PassState] = field(default_factory=History, repr=False, compare=False)
    plan: _Plan | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> PassState:
        """Copy the mode and named noise. A copy does not inherit the state of a running pass."""
        copied = PassState(self.components, self.mode, rows_known=self.rows_known)
        if self.fixed:
            copied.rows, copied.component, copied.noise = self.rows, self.component, dict(self.noise)
        return copied

    @property
    def fixed(self) -> bool:
        """Whether `draws` has fixed the noise of passes."""
        return not isinstance(self.mode, Fresh) or self.mode.name is not None

    @property
    def shared(self) -> bool:
        """Whether all rows of the current pass see one function."""
        return not isinstance(self.mode, Fresh)

    def attach(self, root: nn.Module) -> None:
        """Register pass hooks on the root of a model: its call begins a pass, its return ends it."""
        root.register_forward_pre_hook(self.begin, with_kwargs=True)
        root.register_forward_hook(self.end, always_call=True)

    def attach_part(self, part: nn.Module) -> None:
        """Register pass hooks on a module that calls layers repeatedly (an RNN). Called alone, one call is one pass."""
        part.register_forward_pre_hook(self.begin_part, with_kwargs=True)
        part.register_forward_hook(self.end_part, always_call=True)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass. In a fresh one, draw components and noise for all layers of `module`, and sample variables."""
        self.live, self.part, self.variables = True, None, {}
        plan: _Plan | None = None
        if isinstance(self.mode, Fresh):
            self.rows, self.component, self.noise = rows_of(module, (args, kwargs)), self.mode.plan, {}
            if self.mode.name is None:
                self.key = None if is_captured() else self.history.new_key()
                if self.rows is not None:
                    plan = self._plan(module)
                    self._draw_ahead(plan, self.rows)
        if not torch.compiler.is_compiling():
            self.history.begin(replace(self, variables={}))
        if plan is None or not self.noise or self.component is None:
            return
        self.region = None if torch.compiler.is_compiling() else _region()
        for layers in plan.whole_groups():
            own = self.mode is FRESH and layers[0].components == self.components
            component = self.component if own else self.component.modulo(layers[0].components)
            noise = [self.noise[layer.path] for layer in layers]
            sampled = layers[0].sample_of(layers, component, noise, self.mode.width)
            for layer, variables in zip(layers, sampled, strict=True):
                self.variables[id(layer)] = variables

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a pass. Its graph keeps the noise: activation checkpointing needs it again during backward."""
        self.live, self.variables = False, {}
        if torch.compiler.is_compiling():
            self.forget_noise()  # what a compiled pass leaves in Python, it has to return
        else:
            self.history.end(tensors_in(output))

    def forget_noise(self) -> None:
        """Drop the noise and the components of a fresh pass."""
        if not self.fixed:
            self.noise, self.component = {}, None

    def begin_part(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass with a part of the model, unless the pass of the whole is running or recomputed."""
        if not (self.live or (in_backward() and self.history.find() is not None)):
            self.begin(part, args, kwargs)
            self.part = id(part)

    def end_part(self, part: nn.Module, args: Any, output: Any) -> None:
        """End a pass that this part began."""
        if self.part == id(part):
            self.part = None
            self.end(part, args, output)

    def current(self) -> PassState:
        """Return the state of the pass that a layer is called in: this one, or an earlier one that is recomputed."""
        if not self.live and in_backward():
            found = self.history.find()
            return self if found is None else found
        return self

    def variables_of(self, layer: Layer, rows: int) -> Variables:
        """Return the random variables of a layer in the current pass; `rows` is the number of rows that it sees.

        A layer inside a checkpointed region samples its own variables there, as the recomputation will.
        """
        if self.holds_variables_of(layer):
            return self.variables[id(layer)]
        return layer.sample(*self.inputs_of(layer, rows))

    def holds_variables_of(self, layer: Layer) -> bool:
        """Return whether the variables of a layer were sampled when the pass began, and are those of this region."""
        if id(layer) not in self.variables or not self.live:
            return False
        return torch.compiler.is_compiling() or bool(self.region == _region())

    def inputs_of(self, layer: Drawing, rows: int) -> tuple[Assignment | None, Noise | None, Width]:
        """Return component, noise and width of one layer call: the arguments of its `sample`.

        Without a component, all are averaged. Without noise, centres take the place of samples.
        """
        state = self.current()
        if not (state.live or torch.compiler.is_compiling()):
            refuse_shards(layer.parameters(), layer.path)
        mode = state.mode
        if isinstance(mode, Mean):
            return None if mode.component is None else mode.component.modulo(layer.components), None, mode.width
        if not (state.live or state.fixed):
            state = self._alone(layer, rows)
        rows = rows if state.rows is None else state.rows
        if state.component is None:
            state.component = assign_rows(rows, state.components, layer.device, turn=state.key)
        if layer.path not in state.noise:
            state.noise[layer.path] = state._late_noise(layer, rows)
        return state.component.modulo(layer.components), state.noise[layer.path], mode.width

    def activation_noise(self, layer: Drawing, like: Tensor) -> Tensor:
        """Return standard normal noise for every entry of an activation, for passes with noise per row.

        The noise is a function of the pass, the layer's path and the shape. It is made again in a recomputation.
        """
        return activation_noise(like, self.activation_generator(layer, like))

    def activation_generator(self, layer: Drawing, like: Tensor) -> torch.Generator | None:
        """Return the generator that draws `activation_noise`; None for torch's own, in captured passes."""
        state = self.current()
        name = state.mode.name if isinstance(state.mode, Fresh) else None
        if name is not None:
            return generator_of(*name, layer.path)
        if is_captured():
            return None
        key = state.key if state.live else self.history.new_key()
        shape = (len(like) * rank_and_world()[1], *like.shape[1:])  # of the global batch
        return generator_of(key or 0, layer.path, *shape, device=like.device)

    def _draw_ahead(self, plan: _Plan, rows: int) -> None:
        """Deal the components to the rows, and draw all noise of a known size."""
        if self.component is None and plan.layers:
            self.component = assign_rows(rows, self.components, plan.layers[0].device)
        self.noise = plan.pool.draw(rows)

    def _plan(self, module: nn.Module) -> _Plan:
        """Return the plan of a pass that begins with a module; compiled code makes it once, when it is traced."""
        if torch.compiler.is_compiling():
            return _Plan(module, self)
        if self.plan is None or self.plan.root() is not module or not self.plan.holds():
            self.plan = _Plan(module, self)
        return self.plan

    def _alone(self, layer: Drawing, rows: int) -> PassState:
        """Return the state of a pass that is one call of one layer: a submodule was called on its own."""
        key = None if is_captured() else self.history.new_key()
        component = blocks(rows, self.components, device=layer.device)
        return PassState(self.components, self.mode, rows, component, key=key)

    def _late_noise(self, layer: Drawing, rows: int) -> Noise:
        """Draw a layer's noise on request: named by the mode, from the pass's key, or fresh."""
        name = self.mode.name if isinstance(self.mode, Fresh) else None
        if name is not None:
            return row_noise(layer, rows, *name)
        if self.key is None:
            return fresh_noise(layer, rows)
        if layer.noise_specs(shared=False):
            return fresh_noise(layer, rows, generator_of(self.key, layer.path))
        return function_noise(layer, [(self.key,)])


def _region() -> tuple[bool, Any]:
    """Return the state that a checkpointed region changes: grad mode (reentrant) or saved-tensor hooks."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


class _Plan:
    """The layers below a module that share a state, where they are registered, and their pooled noise."""

    def __init__(self, root: nn.Module, state: PassState) -> None:
        self.root = weakref.ref(root)
        self.layers = [layer for found, layers in states_of(root) if found is state for layer in layers]
        self.pool = NoisePool(self.layers)
        groups: dict[Hashable, list[Any]] = {}
        for layer in self.layers:
            if getattr(layer, "sampled_together", False):
                groups.setdefault((type(layer), layer.method, layer.device, layer.base.weight.dtype), []).append(layer)
        self.groups = list(groups.values())
        self.device = self.layers[0].device if self.layers else None
        wanted = {id(layer) for layer in self.layers}
        self.registered = [
            (module._modules, name, child)
            for module in root.modules()
            for name, child in module._modules.items()
            if id(child) in wanted
        ]

    def whole_groups(self) -> Iterator[list[Any]]:
        """Yield the layers of one class and method that are used and whole."""
        root = self.root()
        if root is None or has_shards(root):
            return
        for layers in self.groups:
            used = [layer for layer in layers if layer.used is not False]
            shards = may_have_shards() and any(is_shard(next(layer.posterior.parameters())) for layer in used)
            if used and not shards:
                yield used

    def holds(self) -> bool:
        """Return whether every layer is still where it was, on its device; a new layer draws when it is called."""
        if self.layers and self.layers[0].device != self.device:
            return False
        return all(holder.get(name) is layer for holder, name, layer in self.registered)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def draws(  # noqa: PLR0913, a promised signature
    model: nn.Module,
    *,
    seed: int | None = None,
    index: int = 0,
    component: int | None = None,
    width: Width = None,
    shared: bool = True,
    mean: bool = False,
    design: Design = "independent",
) -> Iterator[nn.Module]:
    """Fix the draw of every forward pass of `model` inside the context.

    Args:
        model: a converted model; for a plain one the context does nothing.
        seed: with `index`, names the draw; None takes a seed and a component from torch's global generator.
        index: number of the draw; draw i uses component i mod K.
        component: use this component instead.
        width: share (float) or number (int) of channel groups to keep, for layers that order their channels.
        shared: one function for all rows (the default), or noise per row.
        mean: use the centres of the posteriors, of one component or averaged over all.
        design: "independent", or "paired": draw 2j + 1 has the mirrored noise of draw 2j.

    Example:
        >>> with draws(bnn, seed=0, index=3):
        ...     y = bnn(x)                      # the same function whenever it is called
    """
    if seed is None and mean:
        seed = 0  # means need no noise, and must not touch torch's generator
    elif seed is None:
        seed = int(torch.randint(2**62, (), device="cpu"))
        index = seed if component is None else index
    wanted: dict[str, Any] = {"shared": shared, "mean": mean, "design": design}
    with many_draws(model, seed, [index], component=component, width=width, **wanted):
        yield model


@contextmanager
def many_draws(  # noqa: PLR0913, the arguments of `draws`
    model: nn.Module,
    seed: int,
    indices: Sequence[int],
    *,
    component: int | None = None,
    width: Width = None,
    shared: bool = True,
    mean: bool = False,
    design: Design = "independent",
) -> Iterator[None]:
    """Fix several draws at once: the variables of a layer have one row per draw."""
    check_design(design, shared=shared)
    owners, strides = states_of(model), _strides(model)
    check_draws(component, width, [layer for _, layers in owners for layer in layers])
    with ExitStack() as stack:
        for ordinal, (state, layers) in enumerate(owners):
            stride = strides.get(id(state), 1)
            own = [index // stride for index in indices]
            ordinal = ordinal if stride == 1 else 0  # a member draws in an ensemble as it does alone
            chosen = own if component is None or stride > 1 else [component] * len(indices)
            component_of = Assignment(torch.tensor(chosen, device=layers[0].device))
            other = replace(state, rows=None, component=component_of, noise={})
            if mean:
                other.mode = Mean(None if component is None else component_of, width)
            elif shared:
                other.mode, other.rows = Fixed(seed, tuple(own), width), len(indices)
                names = [(seed, index, ordinal) for index in own]
                other.noise = {layer.path: designed_noise(layer, names, design) for layer in layers}
            else:
                other.mode = Fresh(component_of, (seed, own[0], ordinal), width)
            stack.enter_context(swapped(state, other))
        yield


@contextmanager
def assigned(model: nn.Module, component: Assignment) -> Iterator[None]:
    """Fix the component of every row of the coming passes; noise stays fresh per row."""
    with ExitStack() as stack:
        inside = _strides(model)
        for state, _ in states_of(model):
            if id(state) not in inside and not state.fixed:  # the members of an ensemble deal out their own rows
                stack.enter_context(swapped(state, replace(state, mode=Fresh(plan=component))))
        yield


def states_of(model: nn.Module) -> list[tuple[PassState, list[Any]]]:
    """Return every `PassState` in a model with its layers; several if the model joins converted models."""
    found: dict[int, tuple[PassState, list[Any]]] = {}
    for module in every_module(model):
        state = vars(module).get("state")
        if isinstance(state, PassState):
            found.setdefault(id(state), (state, []))[1].append(module)
    return list(found.values())


def components_of(model: nn.Module) -> int:
    """Return the number of components of a model; 1 for a plain model."""
    inside = _strides(model)
    return math.lcm(1, *(state.components for state, _ in states_of(model) if id(state) not in inside))


def members_in(model: nn.Module) -> nn.ModuleList | None:
    """Return the members if a model is an explicit ensemble, else None."""
    members = model._modules.get("members")
    is_ensemble = isinstance(members, nn.ModuleList) and isinstance(vars(model).get("state"), PassState)
    return members if is_ensemble else None  # type: ignore[return-value]


def assign_rows(rows: int, components: int, device: torch.device, *, turn: int | None = None) -> Assignment:
    """Deal the components out to this process's rows of the global batch."""
    rank, world = rank_and_world()
    return blocks(rows, components, rank=rank, world=world, device=device, turn=turn)


@contextmanager
def swapped(state: PassState, other: PassState) -> Iterator[None]:
    """Give `state` the contents of `other` inside the context; layers keep the same object."""
    saved = dict(state.__dict__)
    state.__dict__.update(other.__dict__)
    try:
        yield
    finally:
        state.__dict__.update(saved)


def _strides(model: nn.Module) -> dict[int, int]:
    """Return S for every state inside an ensemble of S models: draw i of it is draw i // S of a member."""
    strides: dict[int, int] = {}
    for module in every_module(model):
        members = members_in(module)
        for state, _ in states_of(members) if members is not None else ():
            strides[id(state)] = strides.get(id(state), 1) * len(members or ())
    return strides


def check_draws(component: int | None, width: Width, layers: list[Any]) -> None:
    """Raise unless some layer has this component, and one can be narrowed if a width is given."""
    count = max((layer.components for layer in layers), default=1)
    if component is not None and not 0 <= component < count:
        raise ValueError(f"expected a component from 0 to {count - 1}, got {component}")
    if width is not None and not any(layer.ordered for layer in layers):
        raise ValueError(f"no layer of this model orders its channels: expected no width, got {width}")
