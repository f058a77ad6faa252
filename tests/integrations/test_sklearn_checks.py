"""scikit-learn's own checks of an estimator, all of them, with the parameters that users get."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from leanbayes.integrations import sklearn
from leanbayes.integrations.sklearn import BayesianClassifier, BayesianRegressor

LEARN = ("check_classifiers_train", "check_classifiers_classes", "check_regressors_train")
"""Checks that ask how well an estimator has learned; the others train for a few steps."""


@parametrize_with_checks([BayesianClassifier(), BayesianRegressor()])
def test_scikit_learns_own_check(estimator, check, monkeypatch):
    if check.func.__name__ not in LEARN:
        monkeypatch.setattr(sklearn, "FEWEST_STEPS", 20)
        monkeypatch.setattr(sklearn, "FEWEST_EPOCHS", 2)
    check(estimator)
