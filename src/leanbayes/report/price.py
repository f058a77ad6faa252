"""What a whole training costs in trainings of the plain network, and an answer in its passes."""

from __future__ import annotations

from leanbayes.report.load import REFERENCE, Run

MEMBERS = ("batch_ensemble", "deep_ensemble")  # each member answers once, however many draws are asked for


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


def answer_passes(run: Run) -> float | None:
    """Return the cost of one answer in passes of the plain network; None where it was not measured.

    answer = passes * predict ratio: an answer of 16 draws, each at 1.1 plain passes, costs 17.6.
    """
    passes, ratio = passes_of(run), run.number("cost", "predict_ratio")
    return None if passes is None or ratio is None else passes * ratio


def passes_of(run: Run) -> float | None:
    """Return how many passes an answer takes: as recorded, else by the draws or the members; None if unknown."""
    recorded = run.number("cost", "passes")
    if recorded is not None:
        return recorded
    if run.name == REFERENCE:
        return 1.0
    draws = run.number("settings", "judging", "samples")
    members = run.number("method", "fields", "components") if run.name in MEMBERS else None
    return min((count for count in (draws, members) if count), default=None)
