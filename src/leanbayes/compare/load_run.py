"""Load a run of a comparison: its network as it was evaluated, and the preparation of its inputs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn, Tensor

from leanbayes.compare import experiment
from leanbayes.compare.job import DataSpec, PLAIN
from leanbayes.compare.kept import data_of, SETTINGS_FILE
from leanbayes.compare.row_training import FILE as VALIDATION
from leanbayes.compare.row_training import with_noise
from leanbayes.compare.run import at_full_width, MODEL
from leanbayes.core.checkpoint import FILES, header_of, load
from leanbayes.core.conversion import own_likelihood
from leanbayes.data import DataSet
from leanbayes.data.checks import check_inputs
from leanbayes.data.dataset import Channels, normalised
from leanbayes.data.files.npz import channel_axis_like, channels_first, tensor
from leanbayes.data.table import FILE as TABLE_FILE
from leanbayes.data.table import prepared_by, TablePreparation
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation.result import FILE as RESULT_FILE
from leanbayes.evaluation.result import read_json, read_result
from leanbayes.evaluation.statistics import number
from leanbayes.runtime._files import conforms, local, parse_json, read_tensors, tied
from leanbayes.runtime.noise import check_design, Design, INDEPENDENT
from leanbayes.training import state
from leanbayes.training.early_stopping import best_file

NOISE = f"{state.MODEL}likelihood."  # prefix of the likelihood's parameters in a training state


@dataclass(frozen=True)
class LoadedRun:
    """The trained network of a run as it was evaluated, the names of network and method, its likelihood and data.

    `samples` and `design` are those of the draws of its evaluation; the defaults if it was not evaluated. `temperature`
    is that of the held-out rows, for classes.
    """

    folder: Path
    net: str
    method: str
    model: nn.Module
    likelihood: Likelihood
    source: DataSpec
    data: DataSet
    samples: int = 16
    design: Design = INDEPENDENT
    temperature: float | None = None

    @property
    def units(self) -> tuple[Tensor, Tensor] | None:
        return experiment.units_of(self.data)


@dataclass(frozen=True, eq=False)
class Preparation:
    """Turns raw rows into network inputs as in training: inputs = (x - mean) / std.

    It equals `DataSet.inputs` without the data, so it is small enough to send to other processes.
    """

    name: str
    shape: tuple[int, ...]
    mean: Tensor | None
    std: Tensor | None
    channels: Channels | None = None

    @classmethod
    def of(cls, data: DataSet) -> Preparation:
        """Return the preparation that the training split of a data set defines; tokens have no mean and std."""
        mean, std = (None, None) if data.kind in ("series", "text") else (data.mean, data.std)
        return cls(data.name, data.input_shape, mean, std, data.channels)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the inputs of raw rows, images with channels first, last or none; rows that do not fit raise."""
        x = rows
        if self.mean is not None:
            read = channel_axis_like(rows.shape[1:], self.shape, self.channels)
            if read is not None or rows.ndim != 4:
                x = torch.from_numpy(channels_first(rows.numpy(), self.name, read))
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"expected rows of shape {self.shape}, as {self.name} has, got {tuple(rows.shape[1:])}; resize images, "
                "pick the same features"
            )
        if self.mean is None or self.std is None:
            if x.is_floating_point():
                raise ValueError(f"expected tokens as {self.name} has, whole numbers, got {x.dtype}")
            return x.long()
        check_inputs(x.numpy(), "the part")
        return normalised(tensor(x.numpy()), self.mean, self.std)


def load_run(path: Path, root: str | None = None, net: str = "") -> LoadedRun:
    """Return the network of a run, from its folder or its model file.

    Args:
        path: the folder of a run, `OUT/<data>/<net>/<method>/seed<k>`, or its model.safetensors.
        root: folder of the known data sets; default that of the run.
        net: the network of the run, if it is the user's own. A name in a file is never imported.

    Raises:
        ValueError: in one sentence, if there is no run, it is damaged, `net` is another network, or the training data,
            which normalise the inputs, have changed.
    """
    folder = _find_folder(local(path))
    settings = read_json(folder / SETTINGS_FILE)
    try:
        source = DataSpec(**(settings["data"] | ({} if root is None else {"root": root})))
        recorded, method, name = settings["net"], settings["method"]["name"], source.name
        for text in (recorded, method, name):
            if not isinstance(text, str):
                raise TypeError(f"expected a name, got {text!r}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"'{folder / SETTINGS_FILE}' is damaged ({type(error).__name__}: {error})") from error
    if Path(name).is_absolute() and not Path(name).exists() and Path(Path(name).name).exists():
        source = replace(source, name=Path(name).name)  # a file that was moved to the current folder
    net = experiment.check_network(recorded, net, folder)
    data = _load_data(folder, source)
    shape = data.input_shape
    network = experiment.maker(net, num_outputs=data.num_outputs, input_shape=shape, embedded=data.embedded)()
    model = at_full_width(load_model(folder / MODEL, network, method), data)
    likelihood = own_likelihood(model) or _load_likelihood(folder, data)
    return LoadedRun(
        folder, net, method, model, likelihood, source, data, *_draws_of(folder), _temperature(folder, data)
    )


def _draws_of(folder: Path) -> tuple[int, Design]:
    """Return number and design of the draws of the evaluation of a run; the defaults if it was not evaluated."""
    drawn = (read_result(folder) or {}).get("prediction")
    if drawn is None:
        return LoadedRun.samples, LoadedRun.design
    try:
        samples, design = drawn["samples"], drawn.get("design", INDEPENDENT)
        check_design(design)
        if not isinstance(samples, int) or samples < 1:
            raise ValueError(f"expected a number of draws, got {samples!r}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"'{folder / RESULT_FILE}' is damaged ({error}); evaluate the run again") from error
    return samples, design


def _find_folder(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint '{path}' (looked in '{Path.cwd()}')")
    folder = path if path.is_dir() else path.parent
    if (folder / SETTINGS_FILE).is_file() and (path.is_dir() or path.name == MODEL):
        if not (folder / MODEL).is_file():
            raise FileNotFoundError(f"no trained model in '{folder}': the run did not finish its training")
        return folder
    if path.is_file() or any((path / name).is_file() for name in FILES):
        method = header_of(path)["method"]
        raise ValueError(
            f"'{path}' holds a {method} network, but not how to make it or its inputs, as the folder of a run does; in "
            f"Python: leanbayes.compare.batch_predict.score({str(path)!r}, rows, out, net=your_network)"
        )
    runs = sorted(file.parent for file in path.rglob(SETTINGS_FILE))
    if runs:
        raise ValueError(f"'{path}' holds {len(runs)} runs; name the folder of one, such as '{runs[0]}'")
    raise ValueError(
        f"expected the folder of a run of leanbayes compare or train, got '{path}', which has no {SETTINGS_FILE}"
    )


def _load_data(folder: Path, source: DataSpec) -> DataSet:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training said them
            data = experiment.load(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the training data of '{folder}' decide how its inputs are normalised, and cannot be read: {error}"
        ) from error
    if data_of(folder) not in (None, data.sha256):
        raise ValueError(
            f"the training data {source.name!r} of '{folder}' have changed, so inputs would be normalised differently; "
            "restore the old ones, or train again"
        )
    return data if data.table is None else _with_stored_table(data, folder / TABLE_FILE)


def _with_stored_table(data: DataSet, path: Path) -> DataSet:
    """Prepare the columns of a table as the run did; runs from before this file prepared numbers alone."""
    if not path.is_file():
        return data
    try:
        return prepared_by(data, TablePreparation.from_json(read_json(path)))
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged ({error}); train again") from error


def load_model(path: Path, network: nn.Module, method: str) -> nn.Module:
    """Return the trained model of a method from its file; `network` is the plain one."""
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
        raise ValueError(f"'{path}' does not fit the present network: {reason}") from error
    return network


def _load_likelihood(folder: Path, data: DataSet) -> Likelihood:
    """Return the likelihood of a model that stores none; the training state holds its learned noise.

    Ensembles of earlier versions store none. Their members were trained in turn with one likelihood: the last has it.
    """
    likelihood = experiment.likelihood_for(data)
    if data.task == "classification":
        return likelihood
    members = sorted(folder.glob("member*"), key=lambda member: int(member.name.removeprefix("member")))
    trained = members[-1] if members else folder
    path = best_file(trained) or trained / state.STATE
    if not path.is_file():
        raise FileNotFoundError(f"the learned noise of the run is stored in '{path}', which does not exist")
    likelihood.load_state_dict(state.with_prefix(read_tensors(path)[1], NOISE))
    return with_noise(likelihood, _noise_factor(folder))


def _temperature(folder: Path, data: DataSet) -> float | None:
    """Return the temperature of the held-out rows for classes; None without it."""
    path = folder / VALIDATION
    found = read_json(path).get("temperature") if path.is_file() else None
    return number(found) if data.task == "classification" else None


def _noise_factor(folder: Path) -> float:
    """Return the factor of the noise that held-out rows gave; 1 for a run without them."""
    path = folder / VALIDATION
    factor = read_json(path).get("noise") if path.is_file() else 1.0
    if not isinstance(factor, float) or not factor > 0:
        raise ValueError(f"'{path}' is damaged (expected a positive noise, got {factor!r}); train again")
    return factor
