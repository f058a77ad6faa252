"""A run of a comparison, opened again: its network as it was judged, and how it wants its inputs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.compare.experiment import agreed, likelihood_for, maker
from leanbayes.compare.experiment import load as load_data
from leanbayes.compare.job import DataSpec, PLAIN
from leanbayes.compare.run import at_full_width, CLAIM, MODEL
from leanbayes.core.checkpoint import FILES, header_of, load
from leanbayes.core.conversion import own_likelihood
from leanbayes.data import DataSet
from leanbayes.data.checks import check_inputs
from leanbayes.data.dataset import Array, Channels, normalised
from leanbayes.data.files.npz import channel_axis_like, channels_first, tensor
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation.result import read_result
from leanbayes.runtime._files import conforms, local, parse_json, read_tensors, tied

STATE = Path("checkpoint") / "last.safetensors"
NOISE = "model/likelihood."
"""Where a training state keeps the parameters of the likelihood."""


@dataclass(frozen=True)
class LoadedRun:
    """A trained network with what belongs to it.

    Attributes:
        folder: of the run.
        net: what the network is called.
        method: what the method is called.
        model: the network, as it was judged.
        likelihood: how to read its outputs.
        source: where its data came from.
        data: these.
    """

    folder: Path
    net: str
    method: str
    model: nn.Module
    likelihood: Likelihood
    source: DataSpec
    data: DataSet

    @property
    def units(self) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation of real targets; None for classes."""
        return None if self.data.task == "classification" else (self.data.target_mean, self.data.target_std)


@dataclass(frozen=True, eq=False)
class Preparation:
    """Makes network inputs of raw rows as the training data were prepared: inputs = (x - mean) / std.

    It is what `DataSet.inputs` does, without the data: small enough to be sent to other processes.
    """

    name: str
    shape: tuple[int, ...]
    mean: Tensor | None
    std: Tensor | None
    channels: Channels | None = None

    @classmethod
    def of(cls, data: DataSet) -> Preparation:
        """Take what the training split of a data set defines; tokens have neither mean nor std."""
        mean, std = (None, None) if data.kind in ("series", "text") else (data.mean, data.std)
        return cls(data.name, data.input_shape, mean, std, data.channels)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the inputs of rows as a file may hold them: images with channels first, last or none.

        Raises:
            ValueError: in one sentence, if they are not what the network was trained on.
        """
        x = rows if self.mean is None else torch.from_numpy(self._channels_first(rows.numpy()))
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"expected rows of shape {self.shape}, as {self.name} has, got {tuple(rows.shape[1:])}; resize images, "
                "pick the same features"
            )
        return self._tokens(x) if self.mean is None else self._normalised(x, self.mean, self.std)

    def _channels_first(self, rows: Array) -> Array:
        """Turn channels as the training data say; other shapes stay, to be named."""
        read = channel_axis_like(rows.shape[1:], self.shape, self.channels)
        return channels_first(rows, self.name, read) if read is not None or rows.ndim != 4 else rows

    def _tokens(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise ValueError(f"expected tokens as {self.name} has, whole numbers, got {x.dtype}")
        return x.long()

    def _normalised(self, x: Tensor, mean: Tensor, std: Tensor | None) -> Tensor:
        assert std is not None
        check_inputs(x.numpy(), "the part")
        return normalised(tensor(x.numpy()), mean, std)


def load_run(path: Path, root: str | None = None, net: str = "") -> LoadedRun:
    """Return the network of a run, from its folder or the model in it.

    Args:
        path: the folder of a run, `OUT/<data>/<net>/<method>/seed<k>`, or its model.safetensors.
        root: folder of the known data sets; default what the run had.
        net: the network of the run, where it is the user's own: a folder's word does not suffice to import it.

    Raises:
        ValueError: in one sentence, if there is no run, it is damaged, its network is not the one that was named, or
            its training data, which decide how inputs are normalised, are not those that it had.
    """
    folder = _folder(local(path))
    settings = _settings(folder)
    try:
        source = _here(DataSpec(**(settings["data"] | ({} if root is None else {"root": root}))))
        recorded, method = _texts(settings["net"], settings["method"]["name"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"'{folder / CLAIM}' is damaged ({type(error).__name__}: {error})") from error
    net = agreed(recorded, net, folder)
    data = _data(folder, source)
    network = maker(net, num_outputs=data.num_outputs, input_shape=data.input_shape)()
    model = at_full_width(_filled(folder / MODEL, network, method), data)
    likelihood = own_likelihood(model) or _likelihood(folder, data)
    return LoadedRun(folder, net, method, model, likelihood, source, data)


def _folder(path: Path) -> Path:
    """Return the folder of the run that a path means, or say what the path is instead."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint '{path}' (looked in '{Path.cwd()}')")
    folder = path if path.is_dir() else path.parent
    if (folder / CLAIM).is_file() and (path.is_dir() or path.name == MODEL):
        if not (folder / MODEL).is_file():
            raise FileNotFoundError(f"no trained model in '{folder}': the run did not finish its training")
        return folder
    if path.is_file() or any((path / name).is_file() for name in FILES):
        method = header_of(path)["method"]
        raise ValueError(
            f"'{path}' holds a {method} network, but not how to make it or its inputs, as the folder of a run does; in "
            f"Python: leanbayes.compare.batch_predict.score({str(path)!r}, rows, out, net=your_network)"
        )
    runs = sorted(claim.parent for claim in path.rglob(CLAIM))
    if runs:
        raise ValueError(f"'{path}' holds {len(runs)} runs; name the folder of one, such as '{runs[0]}'")
    raise ValueError(f"expected the folder of a run of leanbayes compare or train, got '{path}', which has no {CLAIM}")


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CLAIM).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{folder / CLAIM}' is damaged ({error})") from error


def _texts(*values: Any) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"expected a name, got {value!r}")
    return values


def _here(source: DataSpec) -> DataSpec:
    """Return a source whose file was moved as one of the same name in the current folder, if there is one."""
    path = Path(*_texts(source.name))
    moved = path.is_absolute() and not path.exists() and Path(path.name).exists()
    return replace(source, name=path.name) if moved else source


def _data(folder: Path, source: DataSpec) -> DataSet:
    """Return the data of the run: their training split decides how inputs are normalised."""
    try:
        data = load_data(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the training data of '{folder}' decide how its inputs are normalised, and cannot be read: {error}"
        ) from error
    result = read_result(folder)
    said = {} if result is None else result.get("data", {})
    before = said.get("sha256") if isinstance(said, dict) else said
    if before not in (None, data.sha256):
        raise ValueError(
            f"the training data {source.name!r} of '{folder}' are not what they were, so that inputs would be "
            "normalised in another way; put the old ones back, or train again"
        )
    return data


def _filled(path: Path, network: nn.Module, method: str) -> nn.Module:
    if method != PLAIN:
        return load(path, network)
    metadata, tensors = read_tensors(path)
    others = parse_json(metadata.get("tied", "{}"), f"the header of '{path}'")
    if not conforms(others, dict[str, str]):
        raise ValueError(f"the header of '{path}' is damaged (expected tied to be names by name)")
    try:
        network.load_state_dict(tied(tensors, others))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"'{path}' does not fit the network as it is made now: {reason}") from error
    return network


def _likelihood(folder: Path, data: DataSet) -> Likelihood:
    """Return the likelihood of a model that keeps none: the noise that was learned lies in the training state."""
    likelihood = likelihood_for(data)
    if data.task == "classification":
        return likelihood
    members = sorted(folder.glob("member*"), key=lambda member: int(member.name.removeprefix("member")))
    path = (members[-1] if members else folder) / STATE  # members are trained in turn, with one noise
    if not path.is_file():
        raise FileNotFoundError(f"the noise that the run learned lies in its training state, but there is no '{path}'")
    state = read_tensors(path)[1]
    likelihood.load_state_dict({n.removeprefix(NOISE): value for n, value in state.items() if n.startswith(NOISE)})
    return likelihood
