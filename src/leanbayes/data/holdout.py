"""Choose held-out rows and folds: by class, by target quantile, by whole groups, or the latest rows.

The choice depends on the targets, the share and the seed alone. Every method of a seed is validated on the same rows.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

QUANTILES = 10
"""Strata of real targets."""

FEWEST = 2
"""Fewest rows on each side of a split."""


def held_out(y: Tensor, share: float, seed: int, *, groups: Tensor | None = None, time: Tensor | None = None) -> Tensor:
    """Return which rows are held out (n,), True for about `share` of them.

    Args:
        y: classes (n,), or real targets (n,) or (n, D); the first target defines the strata.
        share: between 0 and 1.
        seed: of the choice.
        groups: a group number for each row; whole groups are held out.
        time: a time for each row; the latest rows are held out, and `seed` has no effect.

    Raises:
        ValueError: if the share is not between 0 and 1, or a side would have fewer than two rows or one group.
    """
    if not 0 < share < 1:
        raise ValueError(f"expected a share of held-out rows between 0 and 1, got {share}")
    rows = len(y)
    wanted = round(share * rows)
    if not FEWEST <= wanted <= rows - FEWEST:
        raise ValueError(f"expected at least {FEWEST} held-out and {FEWEST} training rows, got {rows} rows in all")
    if time is not None:
        return _latest(time, wanted)
    if groups is not None:
        return _whole_groups(groups, wanted, seed)
    held = torch.zeros(rows, dtype=torch.bool, device="cpu")
    held[_spread_order(y, seed)[torch.arange(wanted, device="cpu") * rows // wanted]] = True
    return held


def fold_of(y: Tensor, count: int, seed: int, *, groups: Tensor | None = None) -> Tensor:
    """Return a fold number from 0 to `count` - 1 for each row (n,); folds have equal shares of each stratum.

    Raises:
        ValueError: if there are fewer rows, or groups, than folds.
    """
    if groups is not None:
        names, inverse = torch.unique(groups, return_inverse=True)
        if len(names) < count:
            raise ValueError(f"expected at least {count} groups for {count} folds, got {len(names)}")
        sizes = torch.bincount(inverse)
        fold = torch.zeros(len(names), dtype=torch.int64, device="cpu")
        filled = torch.zeros(count, dtype=torch.int64, device="cpu")
        for name in sorted(_shuffled(len(names), seed).tolist(), key=lambda name: -int(sizes[name])):
            fold[name] = int(filled.argmin())  # the largest groups first, each into the smallest fold
            filled[fold[name]] += sizes[name]
        return fold[inverse]
    if len(y) < count * FEWEST:
        raise ValueError(f"expected at least {count * FEWEST} rows for {count} folds, got {len(y)}")
    found = torch.empty(len(y), dtype=torch.int64, device="cpu")
    found[_spread_order(y, seed)] = torch.arange(len(y), device="cpu") % count
    return found


def _spread_order(y: Tensor, seed: int) -> Tensor:
    """Return the rows ordered by stratum, shuffled within each: every n-th row is a stratified sample."""
    shuffled = _shuffled(len(y), seed)
    return shuffled[_strata(y)[shuffled].argsort(stable=True)]


def _strata(y: Tensor) -> Tensor:
    """Return the class of each row, or the quantile of its first real target."""
    if not y.is_floating_point():
        return y.flatten(1)[:, 0] if y.dim() > 1 else y
    first = y.flatten(1)[:, 0] if y.dim() > 1 else y
    rank = first.argsort(stable=True).argsort()
    return rank * min(QUANTILES, len(y)) // len(y)


def _latest(time: Tensor, wanted: int) -> Tensor:
    """Return the latest rows; rows of one time stay together, so it may be a few more."""
    first = time.sort().values[len(time) - wanted]
    held = time >= first
    if int((~held).sum()) < FEWEST:
        raise ValueError(f"expected at least {FEWEST} rows before the held-out ones, got {int((~held).sum())}")
    return held


def _whole_groups(groups: Tensor, wanted: int, seed: int) -> Tensor:
    """Return whole groups with about `wanted` rows, at least one group on each side."""
    names, inverse = torch.unique(groups, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"expected at least two groups of rows, got {len(names)}; leave the column of groups out")
    order = _shuffled(len(names), seed)
    sizes = torch.bincount(inverse)[order].cumsum(0)
    taken = min(max(1, int((sizes - wanted).abs().argmin()) + 1), len(names) - 1)
    chosen = torch.zeros(len(names), dtype=torch.bool, device="cpu")
    chosen[order[:taken]] = True
    return chosen[inverse]


def _shuffled(count: int, seed: int) -> Tensor:
    digest = hashlib.blake2b(f"held-out/{seed}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randperm(count, generator=generator, device="cpu")
