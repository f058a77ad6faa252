"""What the next forward pass means: the one stateful object, `Draws`, and the context manager `draws`.

A converted model has one `Draws`, which all its stochastic layers share. A pass begins when the model is called
(a hook on its root says so) and then means one of two things:

* outside `draws`: every row of the batch has noise of its own from torch's global generator, and components are
  dealt to the rows in balanced blocks;
* inside `draws(model, seed=..., index=...)`: one function for all rows. Its noise depends on the seed, the index
  and the layer's path alone, hence on no device, batch, chunk or order of rows.

Components and all noise of a known size are drawn when the pass begins, layer by layer in the order of registration,
and one key of 64 bits. Noise of a size that only an activation shows is a function of the key and the layer's path. So
layers draw nothing from torch's generator, whose numbers belong to the network's own dropout, and a layer that is
called twice in a pass (tied layers, activation checkpointing) sees the same noise twice. A recomputation during
backward finds its own pass in the `History`, also after later passes.
"""

from __future__ import annotations

import copy
import hashlib
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn, Tensor

from leanbayes.distributions.assignment import Assignment, blocks
from leanbayes.distributions.random import normals
from leanbayes.runtime.batches import rows_of, tensors_in
from leanbayes.runtime.distributed import rank_and_world, refuse_shards
from leanbayes.runtime.history import History, in_backward


class Sampled(Protocol):
    """What `Draws` needs to know of a stochastic layer."""

    draws: Draws
    path: str
    components: int
    row_noise: bool
    ordered: bool

    @property
    def noise_ahead(self) -> bool:
        """Whether fresh noise is drawn when a pass begins."""

    @property
    def device(self) -> torch.device:
        """Where the layer's parameters are."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the layer's parameters."""

    def draw_noise(self, rows: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        """Draw standard noise for `rows` rows, first axis first; with a generator, from it alone."""

    def function_noise(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the noise of one function, with a first axis of one."""


class Reading(NamedTuple):
    """What a layer is told for one call.

    Attributes:
        component: the layer's component for each of R rows, R = 1 or the number of rows; None: average them.
        noise: the layer's noise; None: use centres instead of samples.
        width: share of the channels to keep, for layers that order their channels; None: as the method draws it.
    """

    component: Assignment | None
    noise: tuple[Tensor, ...] | None
    width: float | int | None


@dataclass
class Draws:
    """The meaning of the current pass. Layers ask `read`; nothing else in a converted model has state.

    Attributes:
        components: the least common multiple of the layers' component counts.
        rows: rows of the caller's batch in the current pass, None where unknown.
        component: components of the rows of the current pass.
        noise: noise of the current pass by layer path.
        fixed: inside `draws`: passes reuse `component` and `noise` instead of renewing them.
        mean: use the centres of the posteriors.
        width: share of channels for layers that order theirs.
        plan: components of the rows of coming passes, where the caller has decided them (`elbo` does).
        key: seed, index and ordinal of seeded noise per row, which is drawn when a layer first asks.
        stream: random key of the current pass, for noise whose size only an activation shows; None where noise is
            fixed, and in compiled or captured passes, which draw such noise from torch's generator.
        live: a pass is under way.
        part: identity of the part of the model that began it, None for the whole.
        rows_known: whether it was found out where the layers see the rows of the batch.
        history: earlier passes, for recomputations.
        places: the layers of the model that passes begin with, looked up once.
    """

    components: int = 1
    rows: int | None = None
    component: Assignment | None = None
    noise: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    fixed: bool = False
    mean: bool = False
    width: float | int | None = None
    plan: Assignment | None = None
    key: tuple[int, int, int] | None = None
    stream: int | None = None
    live: bool = False
    part: int | None = None
    rows_known: bool = False
    history: History[Draws] = field(default_factory=History, repr=False, compare=False)
    places: _Places | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        """Copy what is fixed. A copy does not inherit the state of a running pass."""
        if self.fixed:
            return replace(self, noise=dict(self.noise), history=History(), places=None)
        return Draws(components=self.components, plan=self.plan, rows_known=self.rows_known)

    @property
    def shared(self) -> bool:
        """Whether all rows of the current pass see one function."""
        return self.fixed and self.key is None

    def attach(self, root: nn.Module) -> None:
        """Watch the root of a model: its call begins a pass, its return ends it."""
        root.register_forward_pre_hook(self.begin, with_kwargs=True)
        root.register_forward_hook(self.end, always_call=True)

    def attach_part(self, part: nn.Module) -> None:
        """Watch a part that calls a layer several times: alone, its call is a pass, or every step had its own draw."""
        part.register_forward_pre_hook(self.begin_part, with_kwargs=True)
        part.register_forward_hook(self.end_part, always_call=True)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass: outside `draws`, draw components and noise for all layers of `module`."""
        self.live, self.part = True, None
        if not self.fixed:
            self.component = self.plan
        if not self.fixed or self.key is not None:
            self.rows = rows_of(module, (args, kwargs))
            self.noise = {}
        if not self.fixed:
            self.stream = None if _captured() else self.history.new_key()
            self._draw_ahead(module)
        if not torch.compiler.is_compiling():
            self.history.begin(copy.copy(self))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a pass. Its graph keeps what was drawn: activation checkpointing will ask again during backward."""
        self.live = False
        if not torch.compiler.is_compiling():
            self.history.end(tensors_in(output))

    def begin_part(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass with a part of the model, unless the pass of the whole is under way or being repeated."""
        if not (self.live or (in_backward() and self.history.find() is not None)):
            self.begin(part, args, kwargs)
            self.part = id(part)

    def end_part(self, part: nn.Module, args: Any, output: Any) -> None:
        """End a pass that this part began."""
        if self.part == id(part):
            self.part = None
            self.end(part, args, output)

    def current(self) -> Draws:
        """Return the state of the pass that a layer is called in: this one, or an earlier one that is recomputed."""
        if not self.live and in_backward():
            found = self.history.find()
            return self if found is None else found
        return self

    def read(self, layer: Sampled, rows: int) -> Reading:
        """Return component, noise and width of one layer call; `rows` is the number of rows that it sees itself."""
        state = self.current()
        if not (state.live or torch.compiler.is_compiling()):
            refuse_shards(layer.parameters(), layer.path)
        if state.mean:
            component = None if state.component is None else state.component.modulo(layer.components)
            return Reading(component, None, state.width)
        if not (state.fixed or state.live):
            state = self._alone(layer, rows)
        return state._reading(layer, rows if state.rows is None else state.rows)

    def activation_noise(self, layer: Sampled, like: Tensor) -> Tensor:
        """Return standard normal noise for every entry of an activation, for passes with noise per row.

        The noise is a function of the pass, the layer's path and the shape. It is made again in a recomputation.
        """
        state = self.current()
        if state.key is not None:
            return _normal_like(like, _generator(*state.key, layer.path, device=torch.device("cpu")))
        if _captured():
            return _normal_like(like, None)
        stream = state.stream if state.live else self.history.new_key()
        shape = (len(like) * rank_and_world()[1], *like.shape[1:])  # of the global batch
        return _normal_like(like, _generator(stream or 0, layer.path, *shape, device=like.device))

    def _draw_ahead(self, module: nn.Module) -> None:
        """Deal the components to the rows, and draw all noise of a known size, in the order of registration."""
        if self.rows is None or torch.compiler.is_compiling():
            return
        layers = self._layers(module)
        if self.component is None and layers:
            self.component = deal(self.rows, self.components, layers[0].device)
        for layer in layers:
            if layer.noise_ahead and layer.path not in self.noise:
                self.noise[layer.path] = _fresh_noise(layer, self.rows)

    def _layers(self, module: nn.Module) -> list[Any]:
        """Return the layers of a module that share this state; they are looked up once, as long as none is replaced."""
        if self.places is None or self.places.root() is not module or not self.places.hold():
            self.places = _Places(module, self)
        return self.places.layers

    def _alone(self, layer: Sampled, rows: int) -> Draws:
        """Return the state of a pass that is one call of one layer: a submodule was called on its own."""
        stream = None if _captured() else self.history.new_key()
        component = blocks(rows, self.components, device=layer.device)
        return Draws(self.components, rows, component, width=self.width, stream=stream)

    def _reading(self, layer: Sampled, rows: int) -> Reading:
        """Return what a layer reads in this pass; noise that was not drawn ahead is a function of the pass's key."""
        if self.component is None:
            self.component = deal(rows, self.components, layer.device, turn=self.stream)
        if layer.path not in self.noise:
            self.noise[layer.path] = self._late_noise(layer, rows)
        return Reading(self.component.modulo(layer.components), self.noise[layer.path], self.width)

    def _late_noise(self, layer: Sampled, rows: int) -> tuple[Tensor, ...]:
        """Draw a layer's noise when it asks for it: as the call names it, from the pass's key, or as fresh noise."""
        if self.key is not None:
            noise = layer.draw_noise(rows, _generator(*self.key, layer.path))
        elif self.stream is None:
            return _fresh_noise(layer, rows)
        elif layer.noise_ahead:
            return _fresh_noise(layer, rows, _generator(self.stream, layer.path))
        else:
            noise = layer.function_noise(_generator(self.stream, layer.path))
        return tuple(part.to(layer.device) for part in noise)


class _Places:
    """The layers below a module that share a state, and where each is registered."""

    def __init__(self, root: nn.Module, state: Draws) -> None:
        self.root = weakref.ref(root)
        self.layers = [layer for found, layers in draws_of(root) if found is state for layer in layers]
        wanted = {id(layer) for layer in self.layers}
        self.registered = [
            (module._modules, name, child)
            for module in root.modules()
            for name, child in module._modules.items()
            if id(child) in wanted
        ]

    def hold(self) -> bool:
        """Return whether every layer is still where it was; a new layer draws when it is called."""
        return all(holder.get(name) is layer for holder, name, layer in self.registered)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle nothing: the next pass looks again."""
        return type(None), ()


@contextmanager
def draws(
    model: nn.Module,
    *,
    seed: int | None = None,
    index: int = 0,
    component: int | None = None,
    width: float | int | None = None,
    shared: bool = True,
    mean: bool = False,
) -> Iterator[nn.Module]:
    """Fix what a forward pass of `model` means while the context is open.

    Args:
        model: a converted model; for a plain one the context does nothing.
        seed: with `index`, names the draw; None takes a seed and a component from torch's global generator.
        index: number of the draw; draw i uses component i mod K.
        component: use this component instead.
        width: share (float) or number (int) of channel groups to keep, for layers that order their channels.
        shared: one function for all rows (the default), or noise per row.
        mean: use the centres of the posteriors, of one component or averaged over all.

    Example:
        >>> with draws(bnn, seed=0, index=3):
        ...     y = bnn(x)                      # the same function whenever it is called
    """
    if seed is None and mean:
        seed = 0  # means need no noise, and must not touch torch's generator
    elif seed is None:
        seed = int(torch.randint(2**62, ()))
        index = seed if component is None else index
    many = many_draws(model, seed, [index], component=component, width=width, shared=shared, mean=mean)
    with many:
        yield model


@contextmanager
def many_draws(
    model: nn.Module,
    seed: int,
    indices: Sequence[int],
    *,
    component: int | None = None,
    width: float | int | None = None,
    shared: bool = True,
    mean: bool = False,
) -> Iterator[None]:
    """Fix several draws at once: `sample` of a layer then has one row for each of them."""
    owners, strides = draws_of(model), _strides(model)
    _check(component, width, [layer for _, layers in owners for layer in layers])
    with ExitStack() as stack:
        for ordinal, (state, layers) in enumerate(owners):
            device = layers[0].device
            stride = strides.get(id(state), 1)
            own = [index // stride for index in indices]
            ordinal = ordinal if stride == 1 else 0  # a member draws in an ensemble as it does alone
            chosen = own if component is None or stride > 1 else [component] * len(indices)
            fixed = replace(
                state,
                fixed=True,
                rows=len(indices) if shared else None,
                component=None if mean and component is None else Assignment(torch.tensor(chosen, device=device)),
                noise={},
                key=None if shared else (seed, own[0], ordinal),
                mean=mean,
                width=width,
            )
            if shared and not mean:
                fixed.noise = {layer.path: _named_noise(layer, seed, own, ordinal) for layer in layers}
            stack.enter_context(_as(state, fixed))
        yield


@contextmanager
def assigned(model: nn.Module, component: Assignment) -> Iterator[None]:
    """Fix the component of every row of the coming passes; noise stays fresh per row."""
    with ExitStack() as stack:
        inside = _strides(model)
        for state, _ in draws_of(model):
            if id(state) not in inside:  # the members of an ensemble deal out what rows they get
                stack.enter_context(_as(state, replace(state, plan=component)))
        yield


def apart(model: nn.Module) -> nn.Module:
    """Return a twin with a `Draws` of its own, which shares all else: what is fixed in it is not fixed in the model.

    So draws are made while other threads use the model, and make draws of their own.
    """
    for _, layers in draws_of(model):
        for layer in layers:
            refuse_shards(layer.parameters(), layer.path)
    shared: dict[int, Any] = {}
    _share_plain(model, shared)
    return copy.deepcopy(model, shared)


def _share_plain(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Note modules without a `Draws` anywhere, and the tensors of others; say whether this one is among the former."""
    plain = [_share_plain(child, shared) for child in module.children()]
    if all(plain) and not isinstance(getattr(module, "draws", None), Draws):
        shared[id(module)] = module
        return True
    tensors = (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values())
    shared.update((id(tensor), tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return False


def draws_of(model: nn.Module) -> list[tuple[Draws, list[Any]]]:
    """Return every `Draws` in a model with its layers; more than one where converted models were put together."""
    found: dict[int, tuple[Draws, list[Any]]] = {}
    for module in model.modules():
        state = getattr(module, "draws", None)
        if isinstance(state, Draws):
            found.setdefault(id(state), (state, []))[1].append(module)
    return list(found.values())


def components_of(model: nn.Module) -> int:
    """Return how many components a model cycles through; 1 for a plain model."""
    inside = _strides(model)
    return math.lcm(1, *(state.components for state, _ in draws_of(model) if id(state) not in inside))


def _strides(model: nn.Module) -> dict[int, int]:
    """Return S for every `Draws` inside an ensemble of S models: draw i of the whole is draw i // S of a member."""
    strides: dict[int, int] = {}
    for module in model.modules():
        members = module._modules.get("members")
        if isinstance(members, nn.ModuleList) and isinstance(getattr(module, "draws", None), Draws):
            for state, _ in draws_of(members):
                strides[id(state)] = strides.get(id(state), 1) * len(members)
    return strides


def deal(rows: int, components: int, device: torch.device, *, turn: int | None = None) -> Assignment:
    """Deal the components out to this process's rows of the global batch."""
    rank, world = rank_and_world()
    return blocks(rows, components, rank=rank, world=world, device=device, turn=turn)


@contextmanager
def _as(state: Draws, other: Draws) -> Iterator[None]:
    """Give `state` the contents of `other` for a while; layers keep pointing at the same object."""
    saved = dict(state.__dict__)
    state.__dict__.update(other.__dict__)
    try:
        yield
    finally:
        state.__dict__.update(saved)


def _named_noise(layer: Sampled, seed: int, indices: Sequence[int], ordinal: int) -> tuple[Tensor, ...]:
    """Return the noise of named draws, one row each."""
    rows = [layer.function_noise(_generator(seed, index, ordinal, layer.path)) for index in indices]
    return tuple(torch.cat(parts).to(layer.device) for parts in zip(*rows, strict=True))


def _fresh_noise(layer: Sampled, rows: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    """Draw a layer's noise for this pass, by default from torch's global generator."""
    rank, world = rank_and_world()
    all_rows = world if layer.row_noise else 1
    # Noise of the global batch, of which this process takes its rows: equal seeds on all ranks do not mean equal noise.
    noise = tuple(part.to(layer.device) for part in layer.draw_noise(rows * all_rows, generator))
    if all_rows == 1:
        return noise
    return tuple(part[rank::world].contiguous() if len(part) == rows * world else part for part in noise)


def _normal_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw noise for the entries of x: this process's rows of the noise of the global batch."""
    if generator is not None and generator.device != x.device:
        return normals(tuple(x.shape), generator, x.device)
    rank, world = rank_and_world()
    shape = tuple(x.shape) if world == 1 else (len(x), world, *x.shape[1:])
    if generator is None:  # compiled code must not name a generator, not even as None
        drawn = torch.randn(shape, device=x.device)
    else:
        drawn = torch.randn(shape, device=x.device, generator=generator)
    return drawn if world == 1 else drawn[:, rank].contiguous()


def _generator(*name: int | str, device: torch.device | None = None) -> torch.Generator:
    """Make a generator from the name of a draw and of a layer; a hash keeps neighbouring names independent."""
    digest = hashlib.blake2b("/".join(map(str, name)).encode(), digest_size=8).digest()
    return torch.Generator(device or "cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def _captured() -> bool:
    """Return whether the pass is traced or captured: numbers that Python draws would be the same in every replay."""
    if torch.compiler.is_compiling():
        return True
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _check(component: int | None, width: float | int | None, layers: list[Any]) -> None:
    count = max((layer.components for layer in layers), default=1)
    if component is not None and not 0 <= component < count:
        raise ValueError(f"expected a component from 0 to {count - 1}, got {component}")
    if width is not None and not any(layer.ordered for layer in layers):
        raise ValueError(f"no layer of this model orders its channels: expected no width, got {width}")
