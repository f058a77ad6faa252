"""Save and load converted models: safetensors with a readable header, nothing pickled, nothing imported by name.

The header `leanbayes` is JSON: format, method, fields, paths, root (and `chain` for further conversions), likelihood,
versions, and `tied` (names that share a tensor with another name). `root` is the converted part of the model, "" for
all of it; paths within it seed the noise. Methods of the package are found by name; the caller passes any other one.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast, get_type_hints, Literal

import torch
from torch import nn, Tensor
from torch.nn.utils import parametrize

from leanbayes.core.conversion import (
    attach_likelihood,
    convert,
    is_stochastic,
    Network,
    own_likelihood,
    places,
    stochastic_layers,
    unwrap,
)
from leanbayes.core.student import NAME as STUDENT
from leanbayes.core.student import Place, Student, widened
from leanbayes.distributions.likelihoods import Likelihood, LIKELIHOODS
from leanbayes.methods import all_methods
from leanbayes.methods._base import Method
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime._files import (
    check_fields,
    local,
    parse_json,
    PathLike,
    read_tensors,
    tied,
    untied,
    write_tensors,
)
from leanbayes.runtime.distributed import refuse_shards

FORMAT = 1
HEADER = "leanbayes"
FILES = ("posterior.safetensors", "model.safetensors")  # file names of a checkpoint in a folder

_STEP = {"method": str, "fields": dict[str, Any], "paths": list[str], "root": str}
_STEP_NEEDS = ("method", "fields", "paths")
_FIELDS = {
    "format": int,
    "chain": list[dict[str, Any]],
    "likelihood": dict[str, Any] | None,
    "only": Literal["all", "posterior"],
    "tied": dict[str, str],
    "versions": dict[str, Any],
}
_LIKELIHOOD = {"name": str, "options": dict[str, Any]}


def save(
    model: nn.Module,
    path: PathLike,
    *,
    only: Literal["all", "posterior"] = "all",
    extra: Mapping[str, str] | None = None,
) -> None:
    """Write a converted model to `path`, whole or only its posterior (kilobytes, to go with a public checkpoint).

    The file appears whole or not at all: it is written under a temporary name and renamed.

    Args:
        model: a converted model, or a student of one (`lb.distill`).
        path: a `.safetensors` file; its folder is made if needed.
        only: "posterior" leaves the shared weights out, and `load` takes them from the given network. That restores the
            model if training froze the weights (`Recipe(freeze=True)`). Deep ensembles are refused: their members have
            their own weights.
        extra: further metadata, strings by name.
    """
    place = local(path)
    model = unwrap(model)
    chain = [_student_step(model)] if isinstance(model, Student) else _conversions(model)
    if not chain:
        raise ValueError("expected a converted model, got a plain one; save its state_dict() with safetensors instead")
    if only not in ("all", "posterior"):
        raise ValueError(f"expected only to be one of all, posterior, got {only!r}")
    refuse_shards(model.parameters(), chain[0]["paths"][0] if chain[0]["paths"] else "")
    if only == "posterior" and isinstance(model, Student):
        raise ValueError("a student has no posterior next to its weights; save all of it: only='all'")
    tensors, others = untied(_state(model, only))
    if only == "posterior" and _own_weights(chain, tensors):
        raise ValueError(
            "an ensemble of whole networks has no posterior next to its weights, which every member has for itself; "
            "save all of it: only='all'"
        )
    header = {
        "format": FORMAT,
        **chain[0],
        "chain": chain[1:],
        "likelihood": _describe(own_likelihood(model)),
        "only": only,
        "tied": others,
        "versions": {"leanbayes": _version("leanbayes"), "torch": str(torch.__version__)},
    }
    write_tensors(tensors, place, {**(extra or {}), HEADER: json.dumps(header)})


def load(path: PathLike, net: Network, *, method: Method | None = None) -> Network:
    """Read a converted model: convert `net` by the header of the file, then fill in its tensors.

    Args:
        path: a file that `save` wrote, or a local folder with `posterior.safetensors` (for example next to a public
            checkpoint) or else `model.safetensors`. Nothing is fetched from a network.
        net: a plain network of the converted architecture; it stays unchanged.
        method: the method, if the file names one that is not part of leanbayes.

    Raises:
        ValueError: if the file is damaged, of another kind, or does not fit the network.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"expected a torch.nn.Module of the architecture that was converted, which load fills from '{path}', got "
            f"{type(net).__name__}"
        )
    path = _file(local(path))
    header, tensors = _read(path)
    if members_of(net) or is_stochastic(net):
        raise ValueError(
            f"expected a plain network, which load converts as '{path}' says, got one that is converted already; "
            "pass the plain network"
        )
    if header["method"] == STUDENT:
        student = _student(net, header, tensors, path)
        _fill(student, tensors, header, path)
        return cast(Network, student)
    chain = [header, *header.get("chain", [])]
    if header.get("only") == "posterior" and _own_weights(chain, tensors):
        raise ValueError(
            f"'{path}' holds the posterior of an ensemble of whole networks without the weights of its members; "
            "save all of it: lb.save(ensemble, path)"
        )
    methods = [_method(step, method, path) for step in chain]
    _check_sizes(chain, methods, tensors, path)
    model: nn.Module = net
    for step, recipe in zip(chain, methods, strict=True):
        try:
            model = _convert_again(model, recipe, step, path)
        except RuntimeError as error:  # of torch, for numbers that no float holds
            raise ValueError(f"the network cannot be converted by {recipe}, as '{path}' says ({error})") from error
    likelihood = _likelihood(header, tensors, path)
    if likelihood is not None:
        attach_likelihood(model, likelihood)
        _move_likelihood(model, likelihood, tensors)
    _fill(model, tensors, header, path)
    return cast(Network, model)


def _move_likelihood(model: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor]) -> None:
    """Attach a likelihood with tensors where the file has them: an earlier layer may have been converted later."""
    keys = {path: f"{path}.likelihood." if path else "likelihood." for path, _ in stochastic_layers(model)}
    keepers = {path for path, key in keys.items() if any(name.startswith(key) for name in tensors)}
    for path, layer in stochastic_layers(model) if keepers else ():
        layer.likelihood = copy.deepcopy(likelihood) if path in keepers else None


def _student_step(student: Student) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(student.place).items() if name != "path"}
    return {"method": STUDENT, "fields": {**fields, "report": student.report}, "paths": [student.place.path]}


def _student(net: nn.Module, header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: PathLike) -> Student:
    """Return a student of the architecture of a plain network, with the further outputs that a header names."""
    likelihood = _likelihood(header, tensors, path)
    fields = dict(header["fields"])
    report = fields.pop("report", {})
    try:
        check_fields(fields, {"axis": int, "outputs": int, "extra": int, "flat": bool}, required=("axis", "outputs"))
        check_fields({"report": report}, {"report": dict[str, float]})
        (layer,) = header["paths"]
        place = Place(path=layer, **fields)
        assert likelihood is not None, "a student has a likelihood"
        return Student(widened(_with_plain_weights(net, tensors), place.path, place.extra), likelihood, place, report)
    except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"'{path}' does not fit this network, or is damaged ({error})") from error


def _with_plain_weights(net: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a network without the parametrisations that its mean network, the start of a student, lost."""
    net = copy.deepcopy(net)
    for path, layer in list(net.named_modules()):
        held = layer.parametrizations if parametrize.is_parametrized(layer) else ()
        for name in [name for name in held if f"network.{path}.{name}".replace("..", ".") in tensors]:
            parametrize.remove_parametrizations(layer, name)
    return net


def header_of(path: PathLike) -> dict[str, Any]:
    """Return the header of a checkpoint file or folder."""
    return _read(_file(local(path)), tensors=False)[0]


def _file(path: Path) -> Path:
    """Return the file itself, or that of a folder: the posterior first, since it may be next to public weights."""
    if not path.is_dir():
        return path
    found = [path / name for name in FILES if (path / name).is_file()]
    if not found:
        raise FileNotFoundError(f"expected {' or '.join(FILES)} in the folder '{path}', found neither")
    return found[0]


def _conversions(model: nn.Module) -> list[dict[str, Any]]:
    """Return method, fields, paths and root of every conversion: parts first, then the whole, an ensemble last."""
    members = members_of(model)
    if members:
        ensemble: Any = model
        return [*_conversions(members[0]), _step(ensemble.method, "", [])]
    found: dict[tuple[Method, str], list[str]] = {}
    for path, layer in stochastic_layers(model):
        found.setdefault((layer.method, _root(path, layer.path)), []).append(path)
    ordered = sorted(found.items(), key=lambda item: item[0][1] == "")
    return [_step(method, root, paths) for (method, root), paths in ordered]


def _step(method: Method, root: str, paths: list[str]) -> dict[str, Any]:
    return {"method": method.name, "fields": method.fields(), "paths": paths, "root": root}


def _root(path: str, converted_as: str) -> str:
    """Return the part of a model in which the layer had its path of the conversion; "" for the whole."""
    if not converted_as:
        return path
    return path.removesuffix(f".{converted_as}") if path.endswith(f".{converted_as}") else ""


def _state(model: nn.Module, only: str) -> dict[str, Tensor]:
    state = model.state_dict()
    if only == "all":
        return state
    roots = [f"{path}." if path else "" for path, _ in stochastic_layers(model)]
    prefixes = tuple(root + kind for root in roots for kind in ("posterior.", "likelihood."))
    return {name: tensor for name, tensor in state.items() if name.startswith(prefixes)}


def _read(path: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at '{path}'; expected a local file or folder, since nothing is fetched")
    metadata, state = read_tensors(path, tensors=tensors)
    if HEADER not in metadata:
        raise ValueError(
            f"'{path}' was not written by leanbayes.save (no '{HEADER}' header); load a plain checkpoint into the "
            "network with load_state_dict, then convert it"
        )
    header = parse_json(metadata[HEADER], f"the header of '{path}'")
    version = header.get("format") if isinstance(header, dict) else None
    if isinstance(version, int) and version > FORMAT:  # its fields may have other types
        raise ValueError(f"'{path}' has format {version}, this leanbayes reads up to {FORMAT}: update it")
    try:
        _check_header(header)
    except ValueError as error:
        raise ValueError(f"the header of '{path}' is damaged ({error})") from error
    return header, state


def _check_header(header: Any) -> None:
    """Raise unless all fields have their types."""
    check_fields(header, _FIELDS, required=("format",))
    check_fields(header, _STEP, required=_STEP_NEEDS)
    for number, step in enumerate(header.get("chain", [])):
        check_fields(step, _STEP, required=_STEP_NEEDS, within=f"chain.{number}")
    if header.get("likelihood") is not None:
        check_fields(header["likelihood"], _LIKELIHOOD, required=("name",), within="likelihood")


def _method(step: Mapping[str, Any], given: Method | None, path: PathLike) -> Method:
    name = step.get("method")
    if given is not None and given.name == name:
        return given
    kind = all_methods().get(str(name))
    if kind is None:
        raise ValueError(
            f"'{path}' was made by the method {name!r}, which is not part of leanbayes "
            f"({', '.join(all_methods())}); pass it as method="
        )
    try:
        check_fields(step["fields"], get_type_hints(kind), within="fields")
        return kind(**step["fields"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{path}' has fields that {kind.__name__} does not take ({error})") from error


def _own_weights(chain: list[dict[str, Any]], posterior: Mapping[str, Tensor]) -> bool:
    """Return whether a model has weights that are neither in its posterior nor in the plain network."""
    known = all_methods()
    whole = [step["fields"] for step in chain if step["method"] in known and not known[step["method"]].targets]
    return any(fields.get("init") != "copy" for fields in whole) or (bool(whole) and not posterior)


def _check_sizes(
    chain: list[dict[str, Any]], methods: list[Method], tensors: Mapping[str, Tensor], path: PathLike
) -> None:
    """Check the numbers of components in the header against the tensors, before a network is built."""
    own = set(all_methods().values())
    claims = [method.fields().get("components", 1) if type(method) in own else 1 for method in methods]
    members = [claim for claim, method in zip(claims, methods, strict=True) if not method.targets]
    _check_members(members, tensors, path)
    held: Counter[str] = Counter()  # numbers of the posterior of each layer
    for name, tensor in tensors.items():
        held[f".{name}".rpartition(".posterior.")[0]] += tensor.numel()
    first = ".members.0" * len(members)
    for step, claim in zip(chain, claims, strict=True):
        for layer in step["paths"]:
            numbers = held[f"{first}.{layer}" if layer else first]
            if claim - 1 > numbers:  # one component may be the layer itself; each other one has at least one number
                raise ValueError(
                    f"the header of '{path}' is damaged: fields.components is {claim}, but the posterior of the layer "
                    f"'{layer}' has {numbers} numbers in the file"
                )


def _check_members(members: list[int], tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Raise if the numbers of members of ensembles, the innermost first, are not those of the tensors."""
    for depth in range(1, len(members) + 1):
        start = re.compile(rf"(members\.\d+\.){{{depth}}}")
        there = {found[0] for name in tensors if (found := start.match(name))}
        if math.prod(members[-depth:]) != len(there):
            raise ValueError(
                f"the header of '{path}' is damaged: fields.components is {members[-depth]}, but the file has tensors "
                f"of {len(there)} members"
            )


def _convert_again(model: nn.Module, method: Method, step: Mapping[str, Any], path: PathLike) -> nn.Module:
    paths, root = step["paths"], step.get("root", "")
    modules = dict(model.named_modules())
    part = modules.get(root, nn.Module())
    known = {_joined(root, name) for name, layer in places(part) if isinstance(layer, method.targets)}
    missing = set(paths) - known
    if missing or root not in modules or (method.targets and not paths):
        name = min(missing, default=root)
        raise ValueError(f"'{path}' has a layer '{name}' that this network does not have; is it another one?")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of convert are for new conversions
        where = (lambda name, layer: _joined(root, name) in paths) if method.targets else None
        if not root:
            return convert(model, method, where=where)
        whole = copy.deepcopy(model)
        holder, _, name = root.rpartition(".")
        part = convert(whole.get_submodule(root), method, where=where, copy=False)  # ties to the rest stay
        setattr(whole.get_submodule(holder), name, part)
        return whole


def _joined(root: str, name: str) -> str:
    return f"{root}.{name}" if root and name else root or name


def _likelihood(header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: PathLike) -> Likelihood | None:
    described = header.get("likelihood")
    if described is None:
        return None
    kind, options = LIKELIHOODS.get(described["name"]), described.get("options", {})
    if kind is None:
        raise ValueError(f"'{path}' names the likelihood {described['name']!r}, which is not part of leanbayes")
    try:
        check_fields(options, get_type_hints(kind.__init__), within="likelihood.options")
        numbers = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("likelihood."))
        if options.get("members", 1) > max(1, numbers):  # before memory is taken for them
            raise ValueError(f"expected likelihood.options.members to be at most {numbers}, got {options['members']}")
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{path}' has options that {kind.__name__} does not take ({error})") from error


def _describe(likelihood: Likelihood | None) -> dict[str, Any] | None:
    """Return name and options of a likelihood of the package; users attach their own again."""
    if likelihood is None or type(likelihood).__name__ not in LIKELIHOODS:
        return None
    return {"name": type(likelihood).__name__, "options": likelihood.options}


def _fill(model: nn.Module, tensors: dict[str, Tensor], header: Mapping[str, Any], path: PathLike) -> None:
    tensors = tied(tensors, header.get("tied", {}))
    expected = _state(model, header.get("only", "all"))
    for name in (*expected, *tensors):
        there, wanted = tensors.get(name), expected.get(name)
        if there is None or wanted is None or there.shape != wanted.shape:
            raise ValueError(
                f"'{path}' does not fit this network: '{name}' is {_shape(there)} in the file and {_shape(wanted)} in "
                "the network"
            )
    model.load_state_dict(tensors, strict=False)


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
