"""The training loop, for those who do not bring their own: `fit(model, train, Recipe(...))`."""

from leanbayes.training.failure import TrainingError as TrainingError
from leanbayes.training.history import History as History
from leanbayes.training.loop import fit as fit
from leanbayes.training.recipe import Recipe as Recipe
from leanbayes.training.run import EpochState as EpochState
