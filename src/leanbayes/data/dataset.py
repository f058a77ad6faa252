"""`DataSet`: raw images, features or tokens with their targets, and their normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TYPE_CHECKING

import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from leanbayes.data.table import TablePreparation, TableRows

# N rows, C channels, H height, W width, d columns, T steps or tokens, V variables, D targets

Task = Literal["classification", "regression"]
Kind = Literal["image", "table", "series", "text"]
Channels = Literal["first", "last"]
Array = npt.NDArray[Any]
_BRIGHTEST = 2.0  # noise and interpolation may leave the range from 0 to 1
_CHUNK = 1 << 18  # float64 numbers at a time: they fit into the processor's cache


@dataclass(frozen=True, eq=False)
class Raw:
    """The arrays of a data set as read from files, not yet checked."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Split:
    """Raw inputs and their targets.

    Attributes:
        x: images (N, C, H, W), uint8 or float32 in [0, 1]; float32 features (N, d); or int64 tokens, of a series
            (N, T, V) or of a text (N, T); 0 means no token.
        y: int64 labels (N,), or float32 targets (N, D) in their own units.
        weight: float32 weights of the rows in training (N,); None for equal ones.
        group: int64 numbers of the groups that a split keeps together (N,); None if there are none.
        time: float64 times by which a split is ordered (N,); None if there are none.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    group: Tensor | None = None
    time: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> Split:
        """Return some rows, by numbers or a mask."""
        others = {name: getattr(self, name) for name in ("weight", "group", "time")}
        return Split(self.x[rows], self.y[rows], **{n: v if v is None else v[rows] for n, v in others.items()})


@dataclass(frozen=True, eq=False)
class DataSet:
    """Two splits, and the normalisation that the training split defines.

    The inputs of a network are ``inputs(x) = (x - mean) / std``, with the moments of each channel (pixels in [0, 1]) or
    column of the training split. A constant channel or column is only centred. Tokens are not changed, nor are ones,
    zeros and codes for text and gaps of a table. Real targets are standardised in the same way.

    Attributes:
        name: name in results and folders.
        task: "classification" or "regression".
        train: training split.
        test: test split.
        classes: names of the classes, empty for regression.
        sha256: digest of the files, or of the arrays of a set without files.
        augment: the usual augmentation of this set, see ``leanbayes.data.augment``.
        vocabulary: the word of every token of a text, empty for other sets.
        further: further splits by name, such as a validation split or a second test split.
        channels: axis of the channels in the files ("first" or "last"); None if the files had no such axis.
        table: how the columns of the user's own table become inputs; None for other sets.
        rows: cells of that table as text, to prepare other rows of it.
        notes: sentences on the columns and cells of that table.
    """

    name: str
    task: Task
    train: Split = field(repr=False)
    test: Split = field(repr=False)
    classes: tuple[str, ...]
    sha256: str
    augment: str = "none"
    vocabulary: tuple[str, ...] = field(default=(), repr=False)
    further: Mapping[str, Split] = field(default_factory=dict, repr=False)
    channels: Channels | None = field(default=None, repr=False)
    table: TablePreparation | None = field(default=None, repr=False)
    rows: TableRows | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> Kind:
        """Return whether rows are images, features, or tokens of a series or a text."""
        if self.train.x.dtype == torch.int64:
            return "series" if self.train.x.dim() == 3 else "text"
        return "image" if self.train.x.dim() == 4 else "table"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one row: (C, H, W), (d,), (T, V) or (T,)."""
        return tuple(self.train.x.shape[1:])

    @property
    def num_outputs(self) -> int:
        """Return the number of classes, or of targets."""
        return len(self.classes) if self.task == "classification" else self.train.y.shape[1]

    @property
    def embedded(self) -> dict[int, int]:
        """Return the number of codes of each input that is a code, by position; see `leanbayes.models.EmbedCodes`."""
        return {} if self.table is None else self.table.embedded

    @property
    def largest_class(self) -> tuple[str, float] | None:
        """Return the most frequent class of the training rows, and its share of the test rows; None for regression."""
        if self.task == "regression":
            return None
        label = int(torch.bincount(self.train.y).argmax())
        return self.classes[label], float((self.test.y == label).double().mean())

    @property
    def mean(self) -> Tensor:
        """Return the training mean of every channel in [0, 1] (C,), or of every column (d,)."""
        return self._input_moments[0]

    @property
    def std(self) -> Tensor:
        """Return the training standard deviation of every channel or column, 1 if it is constant."""
        return self._input_moments[1]

    @property
    def target_mean(self) -> Tensor:
        """Return the mean of every training target (D,)."""
        return self._target_moments[0]

    @property
    def target_std(self) -> Tensor:
        """Return the standard deviation of every training target (D,), 1 if it is constant."""
        return self._target_moments[1]

    def inputs(self, x: Tensor) -> Tensor:
        """Return normalised float32 network inputs, on the device of `x`; tokens are not changed."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(
                f"{self.name} expected rows of shape {self.input_shape}, got {tuple(x.shape[1:])}. "
                "Resize the images, or pick the same features."
            )
        if self.kind in ("series", "text"):
            return x
        if self.train.x.dtype == torch.uint8 and self.kind == "image":
            _check_pixels(x, self.name)
        return normalised(x, *self._input_moments)

    def targets(self, y: Tensor) -> Tensor:
        """Return the targets for training: labels unchanged, real targets standardised."""
        if self.task == "classification":
            return y
        return (y - self.target_mean.to(y.device)) / self.target_std.to(y.device)

    def prepared(self, split: Split) -> tuple[Tensor, Tensor]:
        """Return the network inputs and the training targets of a split."""
        return self.inputs(split.x), self.targets(split.y)

    @cached_property
    def _input_moments(self) -> tuple[Tensor, Tensor]:
        if self.kind in ("series", "text"):
            raise ValueError(f"{self.name} has tokens; only images and features have a mean and a std.")
        mean, std = moments(self.train.x)
        if self.table is None or self.table.scaled.all():
            return mean, std
        scaled = self.table.scaled.to(mean.device)
        return torch.where(scaled, mean, 0.0), torch.where(scaled, std, 1.0)

    @cached_property
    def _target_moments(self) -> tuple[Tensor, Tensor]:
        if self.task == "classification":
            raise ValueError(f"{self.name} has classes; only real targets (task 'regression') have a mean and a std.")
        return moments(self.train.y)


def _check_pixels(x: Tensor, name: str) -> None:
    """Raise if pixels from 0 to 255 are not bytes: they would not be divided by 255."""
    if x.dtype in (torch.uint8, torch.bool) or x.numel() == 0:
        return
    if not x.is_floating_point() or x.max() > _BRIGHTEST:
        raise ValueError(
            f"{name} expected uint8 pixels, or floats from 0 to 1, got {x.dtype} up to {x.max().item():g}. Convert "
            "them: x.to(torch.uint8), or x / 255."
        )


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over rows and pixels, computed in float64 and in two passes over chunks."""
    over = [0, *range(2, x.dim())]
    count = x.numel() / x.shape[1]
    rows = max(1, _CHUNK * len(x) // x.numel())
    zero = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    mean = sum((chunk.double().sum(over) for chunk in torch.split(x, rows)), zero) / count
    centre = mean.view(-1, *(1 for _ in over[1:]))
    squares = ((chunk.double() - centre).square_().sum(over) for chunk in torch.split(x, rows))
    std = (sum(squares, zero) / count).sqrt()
    # A channel that is constant up to the rounding of float32 must not be scaled to unit variance.
    constant = std <= 1e-7 * mean.abs()
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    return (mean / scale).float(), torch.where(constant, 1.0, std / scale).float()


def normalised(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (x - mean) / std in float32, with moments of axis 1; bytes are divided by 255 first."""
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    mean, std = (moment.to(x.device).view(-1, *(1 for _ in x.shape[2:])) for moment in (mean, std))
    # In place on one copy: temporaries of a whole data set are large.
    return x.to(torch.float32, copy=True).div_(scale).sub_(mean).div_(std)
