"""The training loop, for those who do not bring their own: `fit(model, train, Recipe(...))`."""

from leanbayes.training.diagnostics import TrainingError as TrainingError
from leanbayes.training.fit import EpochState as EpochState
from leanbayes.training.fit import fit as fit
from leanbayes.training.progress import History as History
from leanbayes.training.recipe import Recipe as Recipe
