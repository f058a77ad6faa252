"""From a plain model to a stochastic one (`convert`), and back to plain ones (`draw`, `mean`, `strip`)."""

from __future__ import annotations

import copy as copying
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from leanbayes.core.coverage import counted, gaps, nothing_to_convert
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.layers.composites.lowering import aliases, lower, opaque, raise_back, RowsFirst
from leanbayes.layers.composites.recurrent import Recurrent
from leanbayes.layers.family import DROPOUTS, refusal
from leanbayes.layers.hooks import copy_hooks, follow_ties
from leanbayes.layers.select import choose, Where
from leanbayes.methods import as_method
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.methods._checks import whole_number
from leanbayes.methods.ensemble import Ensemble
from leanbayes.runtime.batches import Inputs, leading_rows
from leanbayes.runtime.passes import apart, Draws, draws, draws_of
from leanbayes.runtime.probe import learn_rows_from, LearnRows, place_known_rows
from leanbayes.runtime.rows import Layout


def convert(
    model: nn.Module,
    method: Method | str,
    *,
    where: Where | None = None,
    likelihood: Likelihood | None = None,
    copy: bool = True,
    example: Inputs | None = None,
    batch_axis: Mapping[str, int | None] | None = None,
) -> nn.Module:
    """Return `model` with the layers that `method` targets made stochastic.

    The result is an object of the same class with the same function on average; `model` itself stays as it is. A
    root that is itself a target becomes a `StochasticLayer`. Conversions may be chained, no layer is wrapped twice.

    Args:
        model: any module, trained or not.
        method: what noise goes in; a name such as "rank1" means the method with its defaults.
        where: which layers: globs on dotted paths, a predicate `(path, layer) -> bool`, or a `Selector`; default all.
        likelihood: kept with the model and used by `elbo` and `predict` when they are given none.
        copy: work on a deep copy; False changes `model` in place (a root that is a target is still returned anew).
        example: inputs with at least two rows. A copy of the network runs on them, to find out which axis of each
            layer's input holds the rows of the batch; without them the first pass finds it out.
            `NestedDropout` follows networks by them that it cannot trace.
        batch_axis: says it for some layers, by globs on dotted paths: the axis, or None for one draw per batch.

    Raises:
        ValueError: if nothing was converted, or `where` names a layer that cannot be.

    Example:
        >>> bnn = lb.convert(net, lb.Rank1(components=4), where="layer4.*")
    """
    method = as_method(method)
    _check_arguments(model, method, likelihood)
    method = method if example is None else method.given(example)
    notice = method.notice()
    if notice:
        warnings.warn(notice, stacklevel=2)
    whole = method.whole(model) if where is None else None
    if whole is not None:
        if likelihood is not None:
            attach_likelihood(whole, likelihood)
        return whole
    candidates = [(path, layer) for path, layer in places(model) if isinstance(layer, method.targets)]
    refused = {path: reason for path, layer in candidates if (reason := refusal(layer)) is not None}
    chosen = method.choose(candidates) if where is None else choose(candidates, where, aliases(_taken_apart(model)))
    refused = {path: reason for path, reason in refused.items() if path in chosen}
    _check_refused(refused, explicit=where is not None)
    chosen -= set(refused)
    if not chosen:
        raise ValueError(nothing_to_convert(model, method, [path for path, _ in candidates], refused))
    root = lower(_copied(model) if copy else model)
    try:
        root = _wrap_chosen(root, method, chosen, named=where is not None)
    except Exception:
        copy_hooks(raise_back(root), model)  # somebody's own model, where it was to be changed in place
        raise
    root = raise_back(root, spare=lambda unit: any(True for _ in stochastic_layers(unit)))
    follow_ties(root)
    if likelihood is not None:
        attach_likelihood(root, likelihood)
    _place_rows(root, example, batch_axis)
    picked = {path: layer for path, layer in candidates if path in chosen}
    remark = method.remark(picked) if where is None and len(picked) < len(candidates) else ""
    _warn_of_gaps(root, method, refused, remark, default=where is None)
    return root


def _place_rows(root: nn.Module, example: Inputs | None, batch_axis: Mapping[str, int | None] | None) -> None:
    """Tell layers which axis of their inputs holds the rows: as the caller says, or as an example shows."""
    layers = dict(stochastic_layers(root))
    for glob, axis in (batch_axis or {}).items():
        if not (axis is None or (isinstance(axis, int) and axis >= 0)):
            raise ValueError(f"expected batch_axis[{glob!r}] to be an axis from 0 on, or None, got {axis!r}")
        for path in choose(list(layers.items()), glob, argument="batch_axis", things="converted layer"):
            layers[path].layout = Layout(axis)
    place_known_rows(root)
    if example is None:
        return
    if (leading_rows(example) or 0) < 2:
        raise ValueError("expected an example with at least two rows, which shows where they are, got fewer")
    learn_rows_from(root, example)


def _check_arguments(model: object, method: object, likelihood: object) -> None:
    """Refuse at once what would fail later, somewhere else."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a network, an object of a class of nn.Module, got {model!r}")
    if not isinstance(method, Method):
        raise TypeError(f"expected a method such as lb.Rank1(components=4), got {method!r}")
    if not (likelihood is None or isinstance(likelihood, Likelihood)):
        raise TypeError(
            f"expected a likelihood such as lb.Gaussian() or lb.Categorical(), got {likelihood!r}; a loss of another "
            "kind is passed to lb.fit or lb.elbo"
        )


def places(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `convert` chooses from: the modules of a model, and what its composites would be taken apart into."""
    own = dict(walk(model))
    return [(path, own.get(path, module)) for path, module in walk(_taken_apart(model))]


def _taken_apart(model: nn.Module) -> nn.Module:
    """Return a twin of a model, of the same tensors, whose composites are taken apart."""
    return lower(substitute(model, {}))


def stochastic_layers(model: nn.Module) -> Iterator[tuple[str, StochasticLayer]]:
    """Yield every stochastic layer of a model once, with its path."""
    for path, module in model.named_modules():
        if isinstance(module, StochasticLayer):
            yield path, module


def is_stochastic(model: nn.Module) -> bool:
    """Return whether a model has a stochastic layer."""
    return any(True for _ in stochastic_layers(model))


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may be converted, each once.

    Left out: what is stochastic already, and what lies inside composites that read their children's weights.
    """
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen or isinstance(module, StochasticLayer):
            continue
        seen.add(id(module))
        yield path, module
        if not opaque(module):
            children = [(f"{path}.{n}" if path else n, m) for n, m in module._modules.items() if m is not None]
            stack.extend(reversed(children))


def attach_likelihood(model: nn.Module, likelihood: Likelihood) -> None:
    """Make a likelihood the model's own: its first stochastic layer keeps it, where no container can call it.

    In an ensemble every stochastic member has its own; an ensemble of plain networks keeps it itself.
    """
    if isinstance(model, Ensemble):
        model.likelihood = None if any(True for _ in stochastic_layers(model)) else likelihood
        for member in model.members:
            attach_likelihood(member, copying.deepcopy(likelihood))
        return
    for position, (_, layer) in enumerate(stochastic_layers(model)):
        layer.likelihood = likelihood if position == 0 else None


def own_likelihood(model: nn.Module) -> Likelihood | None:
    """Return the likelihood that `convert` attached to a model, if any."""
    model = unwrap(model)
    if isinstance(model, Ensemble) and model.likelihood is not None:
        return model.likelihood
    kept = (layer.likelihood for _, layer in stochastic_layers(model))
    return next((likelihood for likelihood in kept if likelihood is not None), None)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel` and `torch.compile` wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def draw(
    model: nn.Module,
    *,
    seed: int = 0,
    index: int = 0,
    component: int | None = None,
    width: float | int | None = None,
) -> nn.Module:
    """Return one posterior draw as an ordinary network: the class of the original, nothing of leanbayes inside.

    It equals sample `index` of `predict(model, x, seed=seed)` and shares no tensor with `model`.

    Example:
        >>> plain = lb.draw(bnn, seed=0)
    """
    model, seed = unwrap(model), whole_number("seed", seed)
    if isinstance(model, Ensemble):
        member, own = model.member_of(index, component)
        return draw(member, seed=seed, index=own, width=width)
    model = apart(model)
    with draws(model, seed=seed, index=index, component=component, width=width):
        return _on_its_own(raise_back(frozen(model)), model)


def mean(model: nn.Module, *, component: int | None = None) -> nn.Module:
    """Return the network of posterior means, averaged over components or of one component.

    Laws without a mean (Cauchy, half-Cauchy) give their median. After random-sign initialisation the average of the
    components means little: name one. The members of an explicit ensemble have no mean at all.
    """
    model = unwrap(model)
    if isinstance(model, Ensemble):
        if component is None:
            raise ValueError("the members of an ensemble have no mean network; name one with component=k")
        return mean(model.member_of(0, component)[0])
    model = apart(model)
    with draws(model, mean=True, component=component):
        return _on_its_own(raise_back(frozen(model)), model)


def strip(model: nn.Module) -> nn.Module:
    """Return the plain network of the shared weights, without any factor: what was converted, as trained since."""
    return _on_its_own(raise_back(plain_view(model)), model)


def plain_view(model: nn.Module) -> nn.Module:
    """Return the plain network of the shared layers: other modules, the same parameters and buffers.

    It has no factors, no noise and no KL. Training it trains `model`, whose posteriors lie around the shared weights.
    """
    bases: dict[int, nn.Module] = {}
    for _, layer in stochastic_layers(model):
        base = bases[id(layer)] = copying.copy(layer.base)
        copy_hooks(layer, base)
    return substitute(model, bases)


def frozen(model: nn.Module) -> nn.Module:
    """Return a plain twin of the model under the current draw; tensors that no draw touches are shared with it."""
    layers: dict[int, nn.Module] = {}
    with torch.no_grad():
        for _, layer in stochastic_layers(model):
            layers[id(layer)] = layer.freeze()
            layer.draws.noise.pop(layer.path, None)  # there may be as much of it as of weights
    return substitute(model, layers)


def substitute(model: nn.Module, layers: dict[int, nn.Module]) -> nn.Module:
    """Copy the structure of a model, not its tensors, with stochastic layers replaced wherever they are referred to."""
    model = unwrap(model)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_of(model)}
    memo.update(layers)
    twin: nn.Module = copying.deepcopy(model, memo)
    for module in (*twin.modules(), *layers.values()):
        _unhook(module)
    follow_ties(twin)
    return twin


def tensors_of(model: nn.Module) -> Iterator[Any]:
    """Yield every tensor of a model: parameters, buffers, and what modules keep as plain attributes."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            yield from (value for value in holder.values() if isinstance(value, torch.Tensor))


def _on_its_own(plain: nn.Module, model: nn.Module) -> nn.Module:
    """Copy what a plain twin shares with its model; what was made for the twin stays, so weights are copied once."""
    theirs = {0, *map(_address, tensors_of(model))}
    found = {id(tensor): tensor for tensor in tensors_of(plain)}
    users = Counter(map(_address, found.values()))
    made = {key: one for key, one in found.items() if _address(one) not in theirs and users[_address(one)] == 1}
    return _copied(plain, {key: one for key, one in made.items() if one.untyped_storage().nbytes() == one.nbytes})


def _address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 where it has none, or hides it."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0


def _copied(model: nn.Module, kept: dict[int, Any] | None = None) -> nn.Module:
    """Copy a model with all of its tensors but those that are kept, by identity."""
    try:
        return copying.deepcopy(model, dict(kept or {}))
    except RuntimeError as error:
        raise ValueError(
            f"the model cannot be copied ({str(error).splitlines()[0]}); give up hook-based weight_norm for "
            "torch.nn.utils.parametrizations.weight_norm, or convert in place with copy=False"
        ) from error


def _wrap_chosen(model: nn.Module, method: Method, chosen: set[str], *, named: bool) -> nn.Module:
    """Wrap the layers of these paths, which the user named or not, in place, and return the root."""
    layers = {id(layer): (path, layer) for path, layer in walk(model) if path in chosen}
    notice = None if named else method.review(model, dict(layers.values()))
    if notice:
        warnings.warn(notice, stacklevel=3)
    wrapped = _wrap_all(model, method, layers)
    if not wrapped:
        raise ValueError(f"{type(method).__name__} could do nothing with {', '.join(sorted(chosen))} alone")
    return _replace(model, wrapped)


def _wrap_all(model: nn.Module, method: Method, layers: dict[int, tuple[str, nn.Module]]) -> dict[int, StochasticLayer]:
    """Wrap every chosen layer once and give all the model's `Draws`, the existing one where there is one."""
    existing = draws_of(model)
    state = existing[0][0] if existing else Draws()
    with _device_of(model):  # what a layer makes of numbers alone belongs there, too
        by_path = method.wrap_all(model, dict(layers.values()))
    for path, layer in by_path.items():
        layer.attach(state, path)
    wrapped = {key: by_path[path] for key, (path, _) in layers.items() if path in by_path}
    state.components = math.lcm(state.components, *(layer.components for layer in wrapped.values()))
    return wrapped


def _device_of(model: nn.Module) -> torch.device:
    """Return where a model is: the CPU if it has no tensor."""
    return next((tensor.device for tensor in tensors_of(model)), torch.device("cpu"))


def _replace(model: nn.Module, wrapped: dict[int, StochasticLayer]) -> nn.Module:
    """Put wrapped layers wherever the originals are registered, repeats included, and return the (new) root."""
    already = any(isinstance(module, StochasticLayer) for module in model.modules())
    root = wrapped.get(id(model), model)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in wrapped and not isinstance(module, StochasticLayer):
                module._modules[name] = wrapped[id(child)]
    draws = next(iter(wrapped.values())).draws
    draws.rows_known = False
    if not already:
        root.register_forward_pre_hook(LearnRows(draws), with_kwargs=True)
        draws.attach(root)
    _attach_sequences(root, draws)
    return root


def _attach_sequences(model: nn.Module, draws: Draws) -> None:
    """Tell layers that they serve the steps of a sequence, and begin a pass where a recurrent module is called alone.

    Of a transformer layer that was turned, only dropouts need to know: entry by entry, their masks would be others in
    the layer that is turned back.
    """
    for part in model.modules():
        inside = [layer for _, layer in stochastic_layers(part)] if isinstance(part, (Recurrent, RowsFirst)) else []
        if isinstance(part, Recurrent) and inside and not any(layer.sequential for layer in inside):
            draws.attach_part(part)
        for layer in inside:
            layer.sequential = layer.sequential or isinstance(part, Recurrent) or isinstance(layer.base, DROPOUTS)


def _unhook(module: nn.Module) -> None:
    """Remove the hooks by which `Draws` watched this module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, LearnRows) or isinstance(getattr(hook, "__self__", None), Draws):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _check_refused(refused: dict[str, str], *, explicit: bool) -> None:
    """Raise for layers that were asked for by name and cannot be converted, and for those that lack their sizes."""
    lazy = {path: reason for path, reason in refused.items() if "not initialised" in reason}
    wrong = refused if explicit else lazy
    if wrong:
        raise ValueError(counted(wrong))


def _warn_of_gaps(model: nn.Module, method: Method, refused: dict[str, str], remark: str, *, default: bool) -> None:
    """Warn once of all that a conversion left out."""
    said = " ".join(filter(None, (gaps(model, method, refused, default=default), remark)))
    if said:
        warnings.warn(said, stacklevel=3)
