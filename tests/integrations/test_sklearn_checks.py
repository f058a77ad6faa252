"""scikit-learn's own checks of an estimator, all of them, with the parameters that users get."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from leanbayes.integrations.sklearn import BayesianClassifier, BayesianRegressor


@parametrize_with_checks([BayesianClassifier(), BayesianRegressor()])
def test_scikit_learns_own_check(estimator, check):
    check(estimator)
