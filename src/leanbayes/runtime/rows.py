"""Layouts of the rows of a batch in an activation, and variables of rows in matching shapes.

R rows of variables (R, n) multiply the channels of an activation x. R is one (the same for all rows) or the number of
rows of the batch. The rows are on one axis of x, in one of these ways:

    Layout(0)               (m R, ...), entry i is of row i // m     as (B, T, d) -> (B T, d) makes them; m = 1 is usual
    Layout(0, tiled=True)   (m R, ...), entry i is of row i mod R    as torch.cat([frame1, frame2]) makes them
    Layout(1)               (T, R, ...)                              time first
    Layout(None)            no axis: a table of positions, a mixture of rows; one draw serves the whole batch
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from leanbayes.distributions.factor import materialise


class Layout(NamedTuple):
    """The axis of an activation that holds the rows, None for one draw per batch, and the order of repeated rows."""

    axis: int | None
    tiled: bool = False


ROWS = Layout(0)
ONE_DRAW = Layout(None)


def broadcast_channels(
    variable: Tensor, x: Tensor, channel_axis: int, layout: Layout | None, path: str, turn: int | None, *, ready: bool
) -> Tensor:
    """Return variables (R, n) in a shape that multiplies the channels of x, in the dtype of x.

    An unknown `layout` is None; `path` names the layer in errors. Under `ONE_DRAW`, `turn` chooses the row whose
    variables serve the whole batch; None takes the first. Variables that are `ready` exist in memory.
    """
    channels = channel_axis % x.dim()
    variable, axis = align_rows(variable, x, channels, layout, path, turn)
    rows, count = variable.shape
    spread = variable.to(x.dtype)
    spread = spread if ready else materialise(spread)
    if x.dim() == 2 and channels == 1:
        return spread  # already (R, n); a view would be one more step backward
    shape = [1] * x.dim()
    shape[channels] = count
    if rows != 1:
        shape[axis] = rows
    return spread.view(shape)


def align_rows(
    variable: Tensor, x: Tensor, channels: int, layout: Layout | None, path: str, turn: int | None
) -> tuple[Tensor, int]:
    """Return variables with one row for each entry of an axis of x, or a single row, and that axis."""
    rows = variable.shape[0]
    if rows == 1:
        return variable, 0
    if layout == ONE_DRAW:
        return one_row(variable, turn), 0
    axis = 0 if layout is None or layout.axis is None else layout.axis
    if axis == channels or axis >= x.dim():
        raise ValueError(
            f"layer '{path}' got an input of shape {tuple(x.shape)} without a batch axis while noise is drawn per "
            "row; add one (x[None]), or use `with draws(model)` for one function"
        )
    if x.shape[axis] == rows:  # none, in an empty batch
        return variable, axis
    repeats, rest = x.shape[axis] // rows, x.shape[axis] % rows  # not divmod, which compiled code cannot call
    if rest or (layout is None and repeats > 1):
        raise ValueError(_unknown(path, x, rows))
    tiled = layout is not None and layout.tiled
    return variable.repeat(repeats, 1) if tiled else variable.repeat_interleave(repeats, 0), axis


def one_row(variable: Tensor, turn: int | None) -> Tensor:
    """Return the variables of one row (1, n)."""
    row = 0 if turn is None else turn % len(variable)
    return variable[row : row + 1]


def _unknown(path: str, x: Tensor, rows: int) -> str:
    return (
        f"layer '{path}' got an input of shape {tuple(x.shape)}, and where the {rows} rows of the batch are in it is "
        f"not known; pass lb.convert(..., example=inputs) to find out, or batch_axis={{'{path}': 1}} to name the axis "
        f"(None: one draw for the whole batch), or leave the layer out: where=lambda path, layer: path != '{path}'"
    )
