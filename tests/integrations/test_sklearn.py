"""The estimators beyond scikit-learn's checks: what they predict, what they leave alone, how they refuse."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss, r2_score
from sklearn.model_selection import cross_val_score, GridSearchCV, KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from torch import nn

import leanbayes as lb
from leanbayes.compare.job import recipe
from leanbayes.data.holdout import held_out
from leanbayes.integrations.sklearn import BayesianClassifier, BayesianRegressor, default_recipe, HELD_OUT
from leanbayes.methods import all_methods

SHORT = lb.Recipe(epochs=4, batch_size=32, optimizer="adam", lr=1e-2, accelerator="cpu")


@pytest.fixture(scope="module")
def blobs():
    x, y = make_blobs(150, centers=3, n_features=4, cluster_std=2.0, random_state=0)
    return 50 * x + 1000, y


@pytest.fixture(scope="module")
def line():
    random = np.random.RandomState(0)
    x = random.randn(200, 3)
    return x, 300 * x[:, 0] - 4000 + 60 * random.randn(200)


@pytest.fixture(scope="module")
def regressor(line):
    return BayesianRegressor(random_state=0, device="cpu").fit(*line)


@pytest.mark.parametrize("names", [["ham", "spam", "eggs"], [7, -3, 40], [4.0, 1.0, 2.0]])
def test_labels_of_any_kind(blobs, names):
    x, codes = blobs
    labels = np.array(names)[codes]
    classifier = BayesianClassifier(random_state=0).fit(x, labels)
    assert classifier.classes_.tolist() == sorted(names)
    assert classifier.score(x, labels) > 0.9
    probabilities = classifier.predict_proba(x)
    np.testing.assert_array_equal(classifier.classes_[probabilities.argmax(1)], classifier.predict(x))
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-14)
    np.testing.assert_array_equal(classifier.predict_log_proba(x), np.log(probabilities))


def test_a_classifier_predicts_what_its_model_predicts(blobs):
    x, y = blobs
    classifier = BayesianClassifier(random_state=3, samples=8).fit(x, y == 1)
    scaled = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    expected = lb.predict(classifier.model_, scaled, samples=8, seed=classifier.seed_)
    np.testing.assert_allclose(classifier.predict_proba(x), expected.mean, atol=1e-5)
    found = classifier.uncertainty(x)
    torch.testing.assert_close(found.epistemic, expected.epistemic.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.samples, expected.samples.double(), atol=1e-5, rtol=0)


def test_a_regressor_predicts_what_its_model_predicts_in_units_of_the_targets(line, regressor):
    x, y = line
    scaled = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    expected = lb.predict(regressor.model_, scaled, seed=regressor.seed_)
    mean, std = regressor.predict(x, return_std=True)
    assert mean.shape == std.shape == (200,)
    np.testing.assert_allclose(mean, expected.mean[:, 0].double() * y.std() + y.mean(), rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(std, expected.std[:, 0].double() * y.std(), rtol=1e-4)
    np.testing.assert_array_equal(mean, regressor.predict(x))


def test_the_standard_deviation_is_of_noise_and_disagreement_together(line, regressor):
    x, y = line
    p = regressor.uncertainty(x)
    samples, noise = p.samples[..., 0].numpy(), p.variances[..., 0].numpy()
    _, std = regressor.predict(x, return_std=True)
    np.testing.assert_allclose(std**2, noise.mean(0) + samples.var(0), rtol=1e-4)
    density = stats.norm(samples, np.sqrt(noise)).pdf(y).mean(0)
    np.testing.assert_allclose(p.log_prob(torch.from_numpy(y)), np.log(density), rtol=1e-6)
    low, high = p.interval(0.9)
    inside = ((low[:, 0].numpy() < y) & (y < high[:, 0].numpy())).mean()
    assert abs(inside - 0.9) < 4 * np.sqrt(0.9 * 0.1 / 200)


def test_the_learned_noise_is_that_of_the_data(regressor):
    # 60 was put in; of 200 targets it is known to 60 / sqrt(400) = 3, to which the misfit of the network comes.
    noise = regressor.uncertainty(np.zeros((1, 3))).aleatoric.sqrt().item()
    assert 60 - 12 < noise < 60 + 20


def test_heteroscedastic_noise_grows_where_the_data_say_so():
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, size=(600, 1))
    y = x[:, 0] + np.where(x[:, 0] > 0, 1.0, 0.05) * random.randn(600)
    found = BayesianRegressor(heteroscedastic=True, random_state=0).fit(x, y)
    _, std = found.predict([[-0.8], [0.8]], return_std=True)
    assert std[0] < 0.3 < 0.6 < std[1] < 1.4


def test_units_do_not_matter(line):
    x, y = line
    one = BayesianRegressor(random_state=0, recipe=SHORT).fit(x, y).predict(x, return_std=True)
    other = (
        BayesianRegressor(random_state=0, recipe=SHORT)
        .fit(1e6 * x - 1e8, 1e4 * y + 7)
        .predict(1e6 * x - 1e8, return_std=True)
    )
    np.testing.assert_allclose(other[0], 1e4 * one[0] + 7, rtol=1e-4)
    np.testing.assert_allclose(other[1], 1e4 * one[1], rtol=1e-4)


def test_several_targets_at_once(line):
    x, y = line
    both = np.stack([y, -0.01 * y], 1)
    found = BayesianRegressor(random_state=0).fit(x, both)
    mean, std = found.predict(x, return_std=True)
    assert mean.shape == std.shape == both.shape
    assert found.score(x, both) > 0.9


def test_unstandardised_rows_reach_the_network_as_they_are():
    seen = []

    class Watch(nn.Sequential):
        def forward(self, x):
            if self.training:  # not in the probe for rows
                seen.append(x)
            return super().forward(x)

    x = np.arange(40.0).reshape(20, 2)
    BayesianClassifier(net=Watch(nn.Linear(2, 2)), standardize=False, recipe=SHORT).fit(x, x[:, 0] > 20)
    assert set(torch.cat(seen).flatten().tolist()) == set(x.flatten().tolist())


def test_the_same_random_state_gives_the_same_bits_and_leaves_torch_alone(blobs):
    x, y = blobs
    state = torch.get_rng_state()

    def probabilities(seed):
        return BayesianClassifier(random_state=seed, recipe=SHORT).fit(x, y).predict_proba(x)

    np.testing.assert_array_equal(probabilities(5), probabilities(5))
    assert not np.array_equal(probabilities(5), probabilities(6))
    assert not np.array_equal(probabilities(None), probabilities(None))
    assert torch.equal(torch.get_rng_state(), state)


def test_fit_is_silent(blobs, capfd):
    heard = []

    class Talk(nn.Linear):
        def forward(self, x):
            heard.append(logging.getLogger("lightning_fabric.utilities.rank_zero").isEnabledFor(logging.INFO))
            return super().forward(x)

    BayesianClassifier(net=Talk(4, 3), method="plain", recipe=SHORT).fit(*blobs)
    assert heard
    assert not any(heard)
    assert logging.getLogger("lightning_fabric.utilities.rank_zero").level == logging.NOTSET
    assert capfd.readouterr() == ("", "")


def test_pipelines_searches_and_clones(blobs):
    x, y = blobs
    estimator = BayesianClassifier(recipe=SHORT, random_state=0)
    search = GridSearchCV(
        make_pipeline(MinMaxScaler(), estimator),
        {"bayesianclassifier__method": ["rank1", lb.MeanField(init_std=0.01), None]},
        cv=2,
        scoring="neg_log_loss",
    ).fit(x, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_[-1].model_ is not None
    twin = clone(BayesianRegressor(net=nn.Linear(4, 1), method=lb.Rank1(components=2), recipe=SHORT))
    assert twin.method == lb.Rank1(components=2)
    assert cross_val_score(twin, x, y.astype(float), cv=2).shape == (2,)


def test_a_pipeline_hands_the_standard_deviation_on(line):
    x, y = line
    pipeline = make_pipeline(MinMaxScaler(), BayesianRegressor(recipe=SHORT)).fit(x, y)
    mean, std = pipeline.predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape


def test_nested_dropout_refuses_a_network_of_one_hidden_layer_and_says_what_to_do(blobs):
    with pytest.raises(ValueError, match=r"which NestedDropout\(first=True\) orders"):
        BayesianClassifier(method="nested", recipe=SHORT).fit(*blobs)
    found = BayesianClassifier(method=lb.NestedDropout(first=True), random_state=0, recipe=SHORT).fit(*blobs)
    assert found.predict_proba(blobs[0]).shape == (150, 3)


@pytest.mark.filterwarnings("ignore:ModelPatch found no norms in this network")
@pytest.mark.parametrize("method", ["plain", *(name for name in all_methods() if name != "nested")])
def test_every_method_by_its_name(blobs, method):
    x, y = blobs
    found = BayesianClassifier(method=method, random_state=0, recipe=SHORT).fit(x, y)
    assert found.predict_proba(x).shape == (150, 3)
    mean, std = BayesianRegressor(method=method, random_state=0, recipe=SHORT).fit(x, y).predict(x, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


def test_a_network_that_is_given_is_copied(blobs):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net[1].eval()
    found = BayesianClassifier(net=net, recipe=SHORT).fit(*blobs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.training
    assert not net[1].training
    assert type(found.model_) is nn.Sequential
    assert len(found.history_) == SHORT.epochs


@pytest.mark.parametrize(
    "net",
    [
        lambda num_outputs, input_shape: nn.Linear(input_shape[0], num_outputs),
        lambda num_outputs, input_shape: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, num_outputs)),
        "mlp-3-16",
    ],
)
def test_a_network_can_be_made_for_the_table(blobs, net):
    assert BayesianClassifier(net=net, recipe=SHORT).fit(*blobs).predict_proba(blobs[0]).shape == (150, 3)


def test_samples_may_be_numpys_and_change_after_training(blobs):
    x, y = blobs
    found = BayesianClassifier(recipe=SHORT, samples=np.int64(3)).fit(x, y)
    assert len(found.uncertainty(x).samples) == 3
    assert len(found.set_params(samples=5).uncertainty(x).samples) == 5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"method": "rank2"}, "expected methods among plain, .*rank1.*, got 'rank2'"),
        ({"method": 3}, "expected method to be one such as .*, got 3"),
        ({"recipe": {"epochs": 3}}, "expected recipe to be one such as .*, got {'epochs': 3}"),
        ({"net": 3}, "expected net to be a torch.nn.Module, .*, got 3"),
        ({"net": "mpl"}, "expected a network among .*, got 'mpl'"),
        ({"net": nn.Linear(4, 5)}, r"expected net to return 3 outputs a row, .* got shape \(2, 5\)"),
        ({"net": nn.Linear(6, 3)}, "expected net to take float32 rows of 4 features, which failed"),
    ],
)
def test_wrong_parameters_are_refused_in_a_sentence(blobs, parameters, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BayesianClassifier(**parameters).fit(*blobs)


def test_wrong_samples_and_a_single_class_are_refused_in_a_sentence(blobs):
    x, y = blobs
    with pytest.raises(ValueError, match="expected labels of at least two classes, got one class only: a"):
        BayesianClassifier().fit(x, ["a"] * 150)
    with pytest.raises(ValueError, match="expected samples to be a whole number of at least 1, got 0"):
        BayesianClassifier(samples=0, recipe=SHORT).fit(x, y).predict(x)


def test_a_training_that_failed_leaves_nothing_half_done(blobs):
    x, y = blobs
    found = BayesianClassifier(method="rank2", recipe=SHORT, random_state=0)
    with pytest.raises(ValueError, match="rank2"):
        found.fit(x, y)
    with pytest.raises(NotFittedError):
        found.predict(x)
    before = found.set_params(method="rank1").fit(x, y).predict_proba(x)
    with pytest.raises(ValueError, match="rank2"):
        found.set_params(method="rank2").fit(-x, y == 1)
    np.testing.assert_array_equal(found.predict_proba(x), before)


@pytest.mark.parametrize("rows", [2000, 50_000, 1_000_000])
def test_many_rows_have_the_recipe_of_a_comparison(rows):
    assert default_recipe(rows) == recipe("quick", kind="table", rows=rows, validated=True)


@pytest.mark.parametrize("method", ["plain", "rank1"])
def test_a_training_with_patience_stops_by_held_out_rows(line, method):
    """The split, the conversion and the noise are those of a comparison; torch's state is left alone."""
    x, y = line
    short = lb.Recipe(epochs=12, schedule="constant", patience=2, optimizer="adam", lr=0.02, batch_size=32)
    short = replace(short, convert_at_epoch=0 if method == "plain" else 6)
    state = torch.get_rng_state()
    first, again = (
        BayesianRegressor(method=method, random_state=0, recipe=short, device="cpu").fit(x, y) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first.predict(x), again.predict(x))
    assert "valid_nll" in first.history_[0]
    assert first.score(x, y) > 0.5
    held = held_out(torch.tensor(y)[:, None], HELD_OUT, first.seed_)
    rows = torch.from_numpy(first.scaler_.transform(x)[held.numpy()]).float()
    p = lb.predict(first.model_, rows, first.likelihood_)  # the draws of the validation
    target = torch.from_numpy(first.target_scaler_.transform(y[:, None])[held.numpy()]).float()
    density = [
        float(replace(p, variances=p.variances * factor**2).log_prob(target).mean()) for factor in (0.97, 1.0, 1.03)
    ]
    assert density[1] == max(density)  # the noise makes the held-out targets most likely


@pytest.mark.parametrize("rows", [2, 31, 150, 1999])
def test_the_default_recipe_has_enough_steps_and_not_too_many(rows):
    recipe = default_recipe(rows)
    steps = recipe.epochs * -(-rows // recipe.batch_size)
    assert recipe.epochs >= 20
    assert 200 <= steps <= 1500


@pytest.mark.slow  # the quality of a training
def test_breast_cancer_is_classified_as_well_as_by_scikit_learns_network():
    """scikit-learn's MLPClassifier after a StandardScaler has 0.975 and 0.074 nats on these folds."""
    x, y = load_breast_cancer(return_X_y=True)
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(x, y)
    fitted = [(BayesianClassifier(random_state=0).fit(x[train], y[train]), test) for train, test in folds]
    assert np.mean([model.score(x[test], y[test]) for model, test in fitted]) > 0.965
    assert np.mean([log_loss(y[test], model.predict_proba(x[test])) for model, test in fitted]) < 0.09


@pytest.mark.slow  # the quality of a training
def test_diabetes_is_predicted_as_well_as_by_scikit_learns_network():
    """scikit-learn's MLPRegressor after a StandardScaler, 1000 epochs, has R2 0.464 and 5.449 nats on these folds."""
    x, y = load_diabetes(return_X_y=True)
    scores, nlls = [], []
    for train, test in KFold(5, shuffle=True, random_state=0).split(x):
        p = BayesianRegressor(random_state=0).fit(x[train], y[train]).uncertainty(x[test])
        scores.append(r2_score(y[test], p.mean[:, 0].numpy()))
        nlls.append(-p.log_prob(torch.from_numpy(y[test])).mean().item())
    assert np.mean(scores) > 0.45
    assert np.mean(nlls) < 5.47
