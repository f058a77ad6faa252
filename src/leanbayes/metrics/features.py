"""Features: what a named network makes of images.

Any network will do, but only figures of the same one compare. torchvision's Inception is customary; a classifier
trained on the same data knows them better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from leanbayes.metrics._validate import check_whole

# N images, B of them in a batch, D features, C classes


class Seen(NamedTuple):
    """What a network makes of images: features (N, D) and class probabilities (N, C)."""

    features: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class Features:
    """A network that looks at images, and its name: `Features("mine", lambda images: (features, probabilities))`.

    Attributes:
        name: which network it is; goes into every result.
        look: maps a batch of images to features (B, D) and class probabilities (B, C).
        batch_size: images at a time.
    """

    name: str
    look: Callable[[Tensor], tuple[Tensor, Tensor]]
    batch_size: int = 256

    def __call__(self, images: Tensor) -> Seen:
        """Return what the network makes of all images (N, ...), without gradients."""
        check_whole(self.batch_size, "batch_size")
        if images.dim() < 2 or len(images) == 0:
            raise ValueError(f"expected at least one image, (N, ...), got shape {tuple(images.shape)}")
        with torch.no_grad():
            seen = [self.look(images[i : i + self.batch_size]) for i in range(0, len(images), self.batch_size)]
        features, probabilities = (torch.cat(parts) for parts in zip(*seen, strict=True))
        if features.dim() != 2 or probabilities.dim() != 2 or not len(features) == len(probabilities) == len(images):
            raise ValueError(
                f"expected features (N, D) and probabilities (N, C) of {len(images)} images from {self.name}, got "
                f"{tuple(features.shape)} and {tuple(probabilities.shape)}"
            )
        return Seen(features, probabilities)


def classifier_features(
    model: nn.Module,
    layer: str | None = None,
    *,
    name: str | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 256,
) -> Features:
    """Make features of a trained classifier: the input of its last linear layer, and the softmax of its outputs.

    Args:
        model: a plain network that gives logits (B, C); of a converted one take `lb.mean(model)`. It runs in eval
            mode and is left as it was.
        layer: path of the layer whose input are the features, axes beyond the first flattened; default the last
            `nn.Linear` in the order of `model.modules()`.
        name: what to call it in results; default its class and the layer. Say on which data it was trained.
        prepare: what images need before they enter the network, such as `dataset.inputs`.
        batch_size: images at a time.
    """
    layers = dict(model.named_modules())
    path = layer or next((path for path, each in reversed(layers.items()) if isinstance(each, nn.Linear)), None)
    if path is None or path not in layers:
        raise ValueError(
            f"expected a linear layer in {type(model).__name__}, or the path of one of its layers, got "
            f"layer={layer!r}; it has {', '.join(each for each in layers if each) or 'none'}"
        )
    chosen = layers[path]

    def look(images: Tensor) -> tuple[Tensor, Tensor]:
        inputs = images if prepare is None else prepare(images)
        device = next((parameter.device for parameter in model.parameters()), inputs.device)
        outputs, entered = _run(model, inputs.to(device), chosen)
        return entered.flatten(1), outputs.softmax(1)

    return Features(name or f"{type(model).__name__}, input of {path or 'the network'}", look, batch_size)


def inception_features(*, device: torch.device | str = "cpu", batch_size: int = 64) -> Features:
    """Make features of torchvision's Inception v3, trained on ImageNet: 2048 in front of its last layer.

    Images are (N, 3, H, W) or grey (N, 1, H, W), uint8 or floats between 0 and 1; they are resized to 299 x 299
    pixels. Published figures mostly come from another training of this network: do not compare with them.

    Raises:
        RuntimeError: if torchvision cannot be imported, or the weights are not on this machine. Nothing is downloaded.
    """
    models = _torchvision()
    weights = models.Inception_V3_Weights.IMAGENET1K_V1
    file = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    if not file.is_file():
        raise RuntimeError(
            f"expected the weights of torchvision's Inception at {file}, found no file; put it there, or use "
            f"classifier_features with a classifier trained on the same data"
        )
    network = models.inception_v3(weights=weights).to(device)
    name = "torchvision Inception v3 (ImageNet), input of fc"
    return classifier_features(network, "fc", name=name, prepare=_for_inception, batch_size=batch_size)


def _run(model: nn.Module, x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the logits of a model in eval mode, and what entered one of its layers; leave the model as it was."""
    entered: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(x)
    finally:
        hook.remove()
        for module, training in modes:
            module.training = training
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not entered:
        raise ValueError(
            f"expected a classifier that gives logits (B, C) and runs the layer of its features, got "
            f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__} from "
            f"{type(model).__name__}, whose {type(layer).__name__} ran {len(entered)} times"
        )
    return logits, entered[-1]


def _torchvision() -> Any:
    """Return torchvision's models, or say what to do without."""
    try:
        return import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: one that was built for another torch
        raise RuntimeError(
            f"expected torchvision for its Inception network, could not import it ({error}); install the one that "
            f"fits this torch, or use classifier_features with a classifier trained on the same data"
        ) from error


def _for_inception(images: Tensor) -> Tensor:
    """Return images as the network knows them: three channels, 299 x 299 pixels, ImageNet's means and deviations."""
    x = images.float() if images.is_floating_point() else images / 255
    if x.dim() != 4 or x.shape[1] not in (1, 3) or x.min() < 0 or x.max() > 1:
        raise ValueError(
            f"expected images (N, 3, H, W) or (N, 1, H, W), uint8 or floats between 0 and 1, got {images.dtype} of "
            f"shape {tuple(images.shape)} between {images.min().item():.6g} and {images.max().item():.6g}"
        )
    x = F.interpolate(x.expand(-1, 3, -1, -1), size=(299, 299), mode="bilinear", antialias=True)
    mean, std = (x.new_tensor(each).view(3, 1, 1) for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return (x - mean) / std
