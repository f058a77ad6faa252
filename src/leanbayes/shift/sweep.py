"""Sweep over corruptions and severities: the images of each, and the scores of a network on them.

Scores come from records {corruption, severity, accuracy, nll, ece, epistemic, aleatoric}.
With E(c, s) the error (1 - accuracy) under corruption c at severity s, S severities, and E' that of the plain network:
    mCE          = mean_c  sum_s E(c, s) / sum_s E'(c, s),
    relative mCE = mean_c  (sum_s E(c, s) - S E(clean)) / (sum_s E'(c, s) - S E'(clean)).
1 equals the plain network, less is better (Hendrycks & Dietterich, 2019; they give per cent).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from leanbayes.shift.corruptions import (
    all_names,
    as_dtype,
    as_unit,
    corrupt,
    enlarge,
    names,
    Scale,
    SEVERITIES,
    SMALLEST,
)

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Shift:
    """Corruptions, severities and images of a sweep.

    Iterating yields (corruption, severity, inputs of the network), first ("clean", 0, ...), one at a time.

    Attributes:
        images: raw images (N, C, H, W), uint8, or float between 0 and 1.
        y: classes (N,).
        inputs: turns raw images into inputs of the network; usually `dataset.inputs`.
        corruptions: names, from `all_names()`.
        severities: from 1 to 5.
        seed: of the corruptions.
        scale: of the constants, as in `corrupt`.
    """

    images: Tensor
    y: Tensor
    inputs: Callable[[Tensor], Tensor]
    corruptions: tuple[str, ...] = names()
    severities: tuple[int, ...] = SEVERITIES
    seed: int = 0
    scale: Scale | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.y):
            raise ValueError(f"expected one class per image, got {len(self.images)} images and {len(self.y)} classes.")
        unknown = [name for name in self.corruptions if name not in all_names()]
        if unknown:
            raise ValueError(f"expected corruptions among {', '.join(all_names())}; got {unknown}. Choose from these.")
        if not set(self.severities) <= set(SEVERITIES):
            raise ValueError(f"expected severities from 1 to 5, got {self.severities}. Clean images always come first.")

    def __len__(self) -> int:
        """Return the number of passes over the images."""
        return 1 + len(self.corruptions) * len(self.severities)

    def __iter__(self) -> Iterator[tuple[str, int, Tensor]]:
        yield "clean", 0, self.inputs(self.images)
        for name in self.corruptions:
            for severity in self.severities:
                yield name, severity, self.inputs(self.corrupted(name, severity))

    def corrupted(self, name: str, severity: int) -> Tensor:
        """Return the raw images under one corruption, in their own size.

        Images below 28 pixels are enlarged and corrupted. Only the change is averaged back: resizing itself would blur.
        """
        if min(self.images.shape[2:]) >= SMALLEST:
            return corrupt(self.images, name, severity, seed=self.seed, scale=self.scale)
        small = as_unit(self.images)
        large = enlarge(small)
        change = corrupt(large, name, severity, seed=self.seed, scale=self.scale) - large
        return as_dtype(small + F.interpolate(change, size=small.shape[2:], mode="area"), self.images.dtype)


def corrupted_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean accuracy (cA), nll (cNLL) and ece (cECE) over corruptions and severities, without clean rows."""
    corrupted = [row for row in rows if row["severity"] > 0]
    if not corrupted:
        raise ValueError("expected rows of severity 1 to 5, got none. Evaluate corrupted images first.")
    return {key: fmean(row[key] for row in corrupted) for key in ("accuracy", "nll", "ece")}


def severity_curve(rows: Sequence[Row], key: str) -> list[float]:
    """Return the mean of a number over corruptions, for each severity from the lowest (0: clean) up."""
    severities = sorted({row["severity"] for row in rows})
    return [fmean(row[key] for row in rows if row["severity"] == severity) for severity in severities]


def mean_corruption_error(rows: Sequence[Row], plain_rows: Sequence[Row]) -> float:
    """Return the mean corruption error relative to the plain network; nan if that network makes no error."""
    return _mean_ratio(_errors(rows), _errors(plain_rows))


def relative_mean_corruption_error(rows: Sequence[Row], plain_rows: Sequence[Row]) -> float:
    """Return the mean ratio of the errors that corruption adds; nan if it adds none to the plain network."""
    return _mean_ratio(_errors(rows, _clean_error(rows)), _errors(plain_rows, _clean_error(plain_rows)))


def _errors(rows: Sequence[Row], clean: float = 0.0) -> dict[str, dict[int, float]]:
    """Return the error minus the clean one, by corruption and severity."""
    errors: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["severity"] > 0:
            errors.setdefault(row["corruption"], {})[row["severity"]] = 1 - row["accuracy"] - clean
    return errors


def _clean_error(rows: Sequence[Row]) -> float:
    clean = [1 - float(row["accuracy"]) for row in rows if row["severity"] == 0]
    if len(clean) != 1:
        raise ValueError(f"expected one clean row (severity 0), got {len(clean)}. Begin the sweep with clean images.")
    return clean[0]


def _mean_ratio(errors: dict[str, dict[int, float]], plain: dict[str, dict[int, float]]) -> float:
    """Return the mean over corruptions of the ratio of two sums over severities."""
    covered = {name: set(by_severity) for name, by_severity in errors.items()}
    if not errors or covered != {name: set(by_severity) for name, by_severity in plain.items()}:
        raise ValueError(
            f"expected rows of the same corruptions and severities from both networks, got {sorted(errors)} and "
            f"{sorted(plain)}. Evaluate both with the same Shift."
        )
    sums = [(sum(by_severity.values()), sum(plain[name].values())) for name, by_severity in errors.items()]
    return fmean(own / against if against else math.nan for own, against in sums)
