"""Convert a plain model into a stochastic one; find its stochastic layers and its likelihood."""

from __future__ import annotations

import copy as copying
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast, TypeVar

from torch import nn

from leanbayes.core.student import Student
from leanbayes.core.summary import counted, gaps, nothing_to_convert, parts
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.layers.composites.lowering import aliases, lower, raise_back, RowsFirst
from leanbayes.layers.composites.recurrent import Recurrent
from leanbayes.layers.family import DROPOUTS, refusal
from leanbayes.layers.hooks import copy_hooks, every_module, follow_ties
from leanbayes.layers.select import choose, Where
from leanbayes.methods import as_method
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.methods._checks import check_switches
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime.batches import device_of, Inputs, leading_rows
from leanbayes.runtime.distributed import unwrap as unwrap
from leanbayes.runtime.passes import PassState, states_of
from leanbayes.runtime.probe import learn_rows_from, LearnRows, place_known_rows
from leanbayes.runtime.rows import Layout
from leanbayes.runtime.twins import copied, twin

Network = TypeVar("Network", bound=nn.Module)  # the class of the user's network, which conversions and draws keep


def convert(
    model: Network,
    method: Method | str,
    *,
    where: Where | None = None,
    likelihood: Likelihood | None = None,
    copy: bool = True,
    example: Inputs | None = None,
    batch_axis: Mapping[str, int | None] | None = None,
) -> Network:
    """Return `model` with the layers that `method` targets made stochastic.

    The result has the same class and on average the same function; `model` itself stays unchanged. A root that is
    itself a target becomes a `StochasticLayer`. Conversions may be chained; no layer is wrapped twice.

    Args:
        model: any module, trained or not.
        method: a method, or a name such as "rank1" for the method with its defaults.
        where: which layers: globs on dotted paths, a predicate `(path, layer) -> bool`, or a `Selector`; default all.
            A late part (`lb.layers.last_stage()`, or "last_stage") makes cheap answers: layers before it run once.
        likelihood: kept with the model; the default of `elbo` and `predict`.
        copy: work on a deep copy; False changes `model` in place (a root that is a target is still a new object).
        example: inputs with at least two rows. A copy of the network runs on them, to find the axis of each layer's
            input that holds the rows of the batch; without them the first pass finds it. `NestedDropout` also follows
            networks by them that cannot be traced.
        batch_axis: the axis of the rows by globs on dotted paths, or None for one draw per batch.

    Raises:
        ValueError: if no layer was converted, or `where` names a layer that cannot be converted.

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
        return cast(Network, whole)
    modules = places(model)
    candidates = [(path, layer) for path, layer in modules if isinstance(layer, method.targets)]
    refused = {path: reason for path, layer in candidates if (reason := refusal(layer)) is not None}
    chosen = (
        method.choose(candidates) if where is None else
        choose(candidates, where, aliases(lower(twin(model, {}))), modules=modules)
    )  # fmt: skip
    refused = {path: reason for path, reason in refused.items() if path in chosen}
    _check_refused(refused, explicit=where is not None)
    chosen -= set(refused)
    if not chosen:
        raise ValueError(nothing_to_convert(model, method, [path for path, _ in candidates], refused))
    root = lower(copied(model) if copy else model)
    try:
        root = _wrap_chosen(root, method, chosen, named=where is not None)
    except Exception:
        copy_hooks(raise_back(root), model)  # with copy=False it is the caller's own model
        raise
    root = raise_back(root, spare=lambda unit: is_stochastic(unit))
    follow_ties(root)
    if likelihood is not None:
        attach_likelihood(root, likelihood)
    _place_rows(root, example, batch_axis)
    picked = {path: layer for path, layer in candidates if path in chosen}
    remark = method.remark(picked) if where is None and len(picked) < len(candidates) else ""
    _warn_of_gaps(root, method, refused, remark, default=where is None)
    return cast(Network, root)


def _place_rows(root: nn.Module, example: Inputs | None, batch_axis: Mapping[str, int | None] | None) -> None:
    """Set which axis of the layers' inputs holds the rows: by `batch_axis`, or by an example."""
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
    """Reject wrong types early; later errors would be obscure."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a network, an object of a class of nn.Module, got {model!r}")
    if not isinstance(method, Method):
        raise TypeError(f"expected a method such as lb.Rank1(components=4), got {method!r}")
    check_switches(method)
    if not (likelihood is None or isinstance(likelihood, Likelihood)):
        raise TypeError(
            f"expected a likelihood such as lb.Gaussian() or lb.Categorical(), got {likelihood!r}; a loss of another "
            "kind is passed to lb.fit or lb.elbo"
        )


def places(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that `convert` chooses from: those of a model, and those of its lowered composites."""
    own = dict(walk(model))
    return [(path, own.get(path, module)) for path, module in walk(lower(twin(model, {})))]


def stochastic_layers(model: nn.Module) -> Iterator[tuple[str, StochasticLayer]]:
    """Yield every stochastic layer of a model once, with its path."""
    for path, module in model.named_modules():
        if isinstance(module, StochasticLayer):
            yield path, module


def layers_of(model: nn.Module) -> list[StochasticLayer]:
    """Return the stochastic layers of a model without their paths, which take three times as long."""
    return [module for module in every_module(model) if isinstance(module, StochasticLayer)]


def is_stochastic(model: nn.Module) -> bool:
    """Return whether a model has a stochastic layer."""
    return bool(layers_of(model))


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may be converted, each once.

    Stochastic layers are left out, and modules inside composites that read their children's weights.
    """
    seen: set[int] = set()
    for path, module in parts(model):
        if id(module) not in seen and not isinstance(module, StochasticLayer):
            seen.add(id(module))
            yield path, module


def attach_likelihood(model: nn.Module, likelihood: Likelihood) -> None:
    """Attach a likelihood to a model: its first stochastic layer keeps it.

    In an ensemble every stochastic member keeps a copy; an ensemble of plain networks keeps it itself.
    """
    members = members_of(model)
    if members:
        model.likelihood = None if is_stochastic(model) else likelihood  # type: ignore[assignment]
        for member in members:
            attach_likelihood(member, copying.deepcopy(likelihood))
        return
    for position, (_, layer) in enumerate(stochastic_layers(model)):
        layer.likelihood = likelihood if position == 0 else None


def own_likelihood(model: nn.Module) -> Likelihood | None:
    """Return the likelihood that `convert` attached to a model, if any."""
    model = unwrap(model)
    keepers: list[Any] = [model] if members_of(model) or isinstance(model, Student) else []
    kept = (keeper.likelihood for keeper in (*keepers, *layers_of(model)))
    return next((likelihood for likelihood in kept if isinstance(likelihood, Likelihood)), None)


def _wrap_chosen(model: nn.Module, method: Method, chosen: set[str], *, named: bool) -> nn.Module:
    """Wrap the layers of these paths in place and return the root; `named`: the user chose them."""
    layers = {id(layer): (path, layer) for path, layer in walk(model) if path in chosen}
    notice = None if named else method.review(model, dict(layers.values()))
    if notice:
        warnings.warn(notice, stacklevel=3)
    wrapped = _wrap_all(model, method, layers)
    if not wrapped:
        raise ValueError(f"{type(method).__name__} could do nothing with {', '.join(sorted(chosen))} alone")
    return _replace(model, wrapped)


def _wrap_all(model: nn.Module, method: Method, layers: dict[int, tuple[str, nn.Module]]) -> dict[int, StochasticLayer]:
    """Wrap every chosen layer once and set the `PassState` of the model, an existing one or a new one."""
    existing = states_of(model)
    state = existing[0][0] if existing else PassState()
    with device_of(model):  # new tensors belong there, too
        by_path = method.wrap_all(model, dict(layers.values()))
    for path, layer in by_path.items():
        layer.attach(state, path)
    wrapped = {key: by_path[path] for key, (path, _) in layers.items() if path in by_path}
    state.components = math.lcm(state.components, *(layer.components for layer in wrapped.values()))
    return wrapped


def _replace(model: nn.Module, wrapped: dict[int, StochasticLayer]) -> nn.Module:
    """Replace the originals by wrapped layers wherever they are registered, and return the (new) root."""
    already = is_stochastic(model)
    root = wrapped.get(id(model), model)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in wrapped and not isinstance(module, StochasticLayer):
                module._modules[name] = wrapped[id(child)]
    state = next(iter(wrapped.values())).state
    state.rows_known, state.plan = False, None
    if not already:
        root.register_forward_pre_hook(LearnRows(state), with_kwargs=True)
        state.attach(root)
    _attach_sequences(root, state)
    return root


def _attach_sequences(model: nn.Module, state: PassState) -> None:
    """Mark layers that serve the steps of a sequence; a call of a recurrent module alone is a pass.

    In a transformer layer that was turned to rows first, only dropouts are marked: masks per entry would differ in the
    layer that is turned back.
    """
    for part in model.modules():
        inside = [layer for _, layer in stochastic_layers(part)] if isinstance(part, (Recurrent, RowsFirst)) else []
        if isinstance(part, Recurrent) and inside and not any(layer.sequential for layer in inside):
            state.attach_part(part)
        for layer in inside:
            layer.sequential = layer.sequential or isinstance(part, Recurrent) or isinstance(layer.base, DROPOUTS)


def _check_refused(refused: dict[str, str], *, explicit: bool) -> None:
    """Raise for named layers that cannot be converted, and for lazy layers without sizes."""
    lazy = {path: reason for path, reason in refused.items() if "not initialised" in reason}
    wrong = refused if explicit else lazy
    if wrong:
        raise ValueError(counted(wrong))


def _warn_of_gaps(model: nn.Module, method: Method, refused: dict[str, str], remark: str, *, default: bool) -> None:
    said = " ".join(filter(None, (gaps(model, method, refused, default=default), remark)))
    if said:
        warnings.warn(said, stacklevel=3)
