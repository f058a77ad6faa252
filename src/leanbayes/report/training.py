"""What a whole training costs in trainings of the plain network: late conversion and tiling count with their epochs."""

from __future__ import annotations

from leanbayes.report.load import Run


def training_ratio(run: Run) -> float | None:
    """Return the cost of a training, from the measured step and the recipe; None where the step was not measured.

        plain epochs + (split epochs + K tiled epochs) * draws * step ratio
        -------------------------------------------------------------------
                                    epochs

    Epochs before the conversion train the plain network; a tiled step gives every row to all K components.
    """
    step = run.number("cost", "train_step_ratio")
    epochs = run.number("recipe", "epochs")
    if step is None or not epochs:
        return step
    plain = _least(run.number("recipe", "convert_at_epoch"), epochs)
    tiled = epochs if run.part("recipe", "tile") else _least(run.number("recipe", "tile_last_epochs"), epochs)
    tiled = min(tiled, epochs - plain)
    components = run.number("method", "fields", "components") or 1
    draws = run.number("recipe", "samples") or 1
    return (plain + (epochs - plain - tiled + components * tiled) * draws * step) / epochs


def _least(found: float | None, most: float) -> float:
    return min(found or 0.0, most)
