"""`fit`: train a model in place, an ensemble member by member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from leanbayes.convert import own_likelihood, unwrap
from leanbayes.inputs import Output
from leanbayes.methods.ensemble import Ensemble
from leanbayes.objective import Loss
from leanbayes.paths import local, PathLike
from leanbayes.training.batches import Data
from leanbayes.training.devices import launch
from leanbayes.training.history import History
from leanbayes.training.progress import Display, display
from leanbayes.training.recipe import DEFAULT, Recipe
from leanbayes.training.run import EpochState, run, Wishes

MEMBER_SEEDS = 1000
"""Distance between the seeds of the members of an ensemble."""


def fit(  # noqa: PLR0913
    model: nn.Module,
    train: Data,
    recipe: Recipe = DEFAULT,
    *,
    likelihood: Loss | None = None,
    validation: Data | None = None,
    folder: PathLike | None = None,
    resume: bool = False,
    callbacks: Sequence[Callable[[EpochState], object]] = (),
    progress: bool = True,
    output: Output | None = None,
) -> History:
    """Train a model in place and return what happened in each epoch.

    A converted model is trained on the evidence lower bound, a plain one on its likelihood, an ensemble member by
    member. In the end the model is on the device and in the modes it came with. Torch's generators are seeded by the
    recipe and left as training leaves them. On a CPU the same recipe, model and data give the same weights to the last
    bit, also when training was killed and resumed in between, and whatever callbacks draw at random.

    Args:
        model: converted or plain; itself trained, not a copy.
        train: `(inputs, targets)` as tensors, which are put on the device whole where they fit, a `Dataset`, or a
            `DataLoader` that yields such pairs.
        recipe: how to train.
        likelihood: default the model's own, else `Categorical`; or any loss `(outputs, y) -> loss`.
        validation: held-out data, of which valid_nll and valid_accuracy (valid_rmse) are taken after every epoch, from
            the mean of four draws.
        folder: where the state is kept after every epoch, in `checkpoint/`; None keeps none.
        resume: go on from the state in `folder`, if there is one; otherwise begin anew and remove it.
        callbacks: called with an `EpochState` after every epoch, when its state is on disk.
        progress: show a bar on a terminal, a few lines elsewhere.
        output: picks the tensor out of what the model returns; default itself, `.logits`, or item 0.

    Raises:
        TrainingError: if a loss is not finite, or a state cannot be written.
        TypeError: if something is of another kind than it says above.
        ValueError: if the data, the recipe or the state in `folder` do not fit.

    Example:
        >>> history = lb.fit(bnn, (x, y), Recipe(epochs=30), folder="runs/first", resume=True)
    """
    _check(recipe, folder, resume)
    place = None if folder is None else local(folder)
    fabric = launch(recipe)
    wishes = Wishes(train, likelihood, validation, place, resume, callbacks, output)
    model = unwrap(model)
    with display(recipe.epochs * _count(model), shown=progress and fabric.is_global_zero) as shown:
        return _fit(model, recipe, wishes, fabric, shown, 0)


def _check(recipe: object, folder: object, resume: bool) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a recipe such as lb.Recipe(epochs=30), got {recipe!r}")
    if resume and folder is None:
        raise ValueError("resume=True has nothing to resume from; give the folder of the training, or resume=False")


def _fit(model: nn.Module, recipe: Recipe, wishes: Wishes, fabric: Any, shown: Display, done: int) -> History:
    """Train a model after `done` epochs of others: on its own, or if it is an ensemble each of its members."""
    if not isinstance(model, Ensemble):
        return run(model, recipe, wishes, fabric, shown, done)
    history = History()
    for k, member in enumerate(model.members):
        own = replace(recipe, seed=recipe.seed + MEMBER_SEEDS * k)
        folder = None if wishes.folder is None else wishes.folder / f"member{k}"
        likelihood = wishes.likelihood or own_likelihood(member) or model.likelihood
        wanted = replace(wishes, folder=folder, likelihood=likelihood)
        rows = _fit(member, own, wanted, fabric, shown, done + len(history))
        history.extend(row | {"member": k} for row in rows)
    return history


def _count(model: nn.Module) -> int:
    """Return how many models are trained on their own."""
    return sum(map(_count, model.members)) if isinstance(model, Ensemble) else 1
