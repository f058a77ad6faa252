"""The training loop: `leanbayes.fit(model, train, Recipe(...))`; the module `fit` has the function."""

from leanbayes.training.diagnostics import TrainingError as TrainingError
from leanbayes.training.fit import EpochState as EpochState
from leanbayes.training.progress import History as History
from leanbayes.training.recipe import Recipe as Recipe
