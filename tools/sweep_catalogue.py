"""The networks of the sweep, how to build them, and the families of the libraries that are left out."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).with_name("sweep_networks.toml")
ROWS = 4


def catalogue() -> dict[str, dict[str, Any]]:
    """Return the specifications of all networks by name."""
    read = tomllib.loads(CATALOGUE.read_text())
    return {f"{library}/{name}": spec for library in LIBRARIES for name, spec in read[library].items()}


def excluded() -> dict[str, str]:
    """Return why a family, in torchvision a network, is not in the catalogue: reasons by name."""
    read = tomllib.loads(CATALOGUE.read_text())["excluded"]
    return {
        f"{library}/{name}": reason
        for library, reasons in read.items()
        for reason, names in reasons.items()
        for name in names
    }


def families_of(library: str) -> dict[str, set[str]]:
    """Return the networks of a library by family: the file that defines them; in torchvision each is its own.

    Networks of transformers are named by the classes of their configurations.
    """
    found: dict[str, set[str]] = {}
    if library == "timm":
        import timm

        found |= {family: set(timm.list_models(module=family)) for family in timm.list_modules()}
    elif library == "torchvision":
        import torchvision

        found |= {name: {name} for name in torchvision.models.list_models()}
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

        for kind, config in CONFIG_MAPPING_NAMES.items():
            found.setdefault(model_type_to_module_name(kind), set()).add(config)
    return found


def covered(library: str) -> set[str]:
    """Return the families of a library that have a network in the catalogue."""
    own = {name.split("/", 1)[1]: spec for name, spec in catalogue().items() if name.startswith(f"{library}/")}
    listed = {spec.get("config", name) for name, spec in own.items()}
    return {family for family, names in families_of(library).items() if names & listed}


def unlisted() -> list[str]:
    """Return the families that are neither in the catalogue nor excluded: those of newer versions."""
    declare_missing_operators()
    left_out = excluded()
    without = [f"{library}/{one}" for library in LIBRARIES for one in families_of(library).keys() - covered(library)]
    return sorted(name for name in without if name not in left_out)


def versions() -> dict[str, str]:
    """Return the versions of torch and of the libraries."""
    return {name: version(name) for name in ("torch", *LIBRARIES)}


def declare_missing_operators() -> None:
    """Let torchvision import next to a torch without its compiled operators."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_kept"] = library


def timm_network(name: str, spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build a network of timm, with images of its size or a smaller one."""
    import timm
    import torch

    size = spec.get("size")
    options = {key: value for key, value in spec.items() if key not in ("size", "img_size")}
    if "img_size" in spec:
        options["img_size"] = size = spec["img_size"]
    net = timm.create_model(name, num_classes=10, **options)
    size = size or net.default_cfg["input_size"][1]
    return net, {"_x": torch.randn(ROWS, 3, size, size)}


def torchvision_network(name: str, spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build a network of torchvision."""
    import torch
    import torchvision

    options = {key: value for key, value in spec.items() if key not in ("shape", "two", "no_backbone_weights")}
    if spec.get("no_backbone_weights"):
        options["weights_backbone"] = None
    net = torchvision.models.get_model(name, weights=None, **options)
    shape = spec.get("shape", [3, 64, 64])
    inputs = {"_x": torch.randn(ROWS, *shape)}
    return net, inputs | ({"_y": torch.randn(ROWS, *shape)} if spec.get("two") else {})


def transformers_network(name: str, spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build a network of transformers from a small configuration."""
    import torch
    import transformers

    config = getattr(transformers, spec["config"])(**spec.get("fields", {}))
    net = getattr(transformers, spec["model"])(config)
    makers: dict[str, Callable[[list[int]], Any]] = {
        "words": lambda shape: torch.randint(3, spec.get("vocabulary", 60), (ROWS, *shape)),
        "floats": lambda shape: torch.randn(ROWS, *shape),
        "ones": lambda shape: torch.ones(ROWS, *shape, dtype=torch.long),
    }
    return net, {key: makers[kind](shape) for key, (kind, shape) in inputs_of(spec)}


def inputs_of(spec: dict[str, Any]) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield name, kind and shape of every input."""
    for key, (kind, *shape) in spec["inputs"].items():
        yield key, (kind, shape)


LIBRARIES: dict[str, Callable[[str, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    "timm": timm_network,
    "torchvision": torchvision_network,
    "transformers": transformers_network,
}
