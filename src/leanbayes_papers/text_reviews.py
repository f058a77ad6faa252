"""Movie-review sentences: every method that converts a BERT as it is, judged by what its doubts are good for.

No paper has this table. All rows share the encoder, its weights at the start, the recipe and the words that are dropped
(`text_networks`); a logistic regression on TF-IDF says how far single words and pairs of them go.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes import metrics
from leanbayes.core.predictor import predict
from leanbayes.data import DataSet, Split
from leanbayes.data.upstream.polarity import BEGIN, PADDING
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods.ensemble import Ensemble
from leanbayes_papers.rank1_ehr import APART, kept
from leanbayes_papers.study import Case, Numbers, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.text_networks import DATA, DETERMINISTIC, LENGTH, Reader, readers, sentences, train
from leanbayes_papers.text_page import draw, LEGEND, overview, say
from leanbayes_papers.trained import loaded

STUDY = "text-reviews"
ENSEMBLE = "Deep ensemble"
MEMBERS = {"quick": 2, "short": 4, "full": 4}
SAMPLES = {"quick": 4, "short": 16, "full": 16}
COVERAGES = tuple(k / 20 for k in range(2, 21))
"""Shares of the sentences, the surest first, of which the accuracy is told."""

INVERSE_PENALTY = 10.0
"""Scikit-learn's C of the logistic regression: the best of 1, 3, 10, 20, 30 and 100 by validation NLL."""


def text_reviews(setting: Setting) -> Suite:
    """Movie-review sentences read by a small BERT, each method converted in one line (Table of our own, no paper's)."""
    study = Study(
        name=STUDY,
        title="Movie-review sentences, negative or positive: a BERT with two layers, converted in one line each",
        claim="none has this table; the question is what each method adds to the same encoder.",
        data=(DATA,),
        measure=partial(measure, setting=setting),
        draw=draw,
        say=say,
    )
    return Suite(
        paper="No paper: a text encoder of Hugging Face's transformers, as its users have it",
        tables=(),
        studies=(study,),
        overview=lambda numbers: overview(numbers[STUDY]),
        legend=LEGEND,
    )


def measure(case: Case, *, setting: Setting) -> Numbers:
    """Train every encoder with every seed, and judge it on the test sentences and on foreign ones."""
    made = readers(setting)
    plain = made[DETERMINISTIC]
    data = loaded(plain.source)
    rows: dict[str, Any] = {}
    for name, reader in made.items():
        seeds = [{"seed": seed} | scored(reader, case, seed) for seed in case.seeds]
        rows[name] = {"seeds": seeds, "parameters": parameters(reader, data)}
    members = MEMBERS[case.budget]
    seeds = [{"seed": seed} | scored_ensemble(plain, case, seed, members) for seed in case.seeds]
    rows[ENSEMBLE] = {"seeds": seeds, "parameters": members * parameters(plain, data)}
    return {
        "sentences": {"train": len(data.train), "test": len(data.test)},
        "members": members,
        "samples": SAMPLES[case.budget],
        "coverages": list(COVERAGES),
        "rows": rows,
        "tfidf": tfidf_baseline(data),
    }


def scored(reader: Reader, case: Case, seed: int) -> dict[str, Any]:
    """Train an encoder and judge it; what was judged is read from beside its training."""

    def judge() -> dict[str, Any]:
        trained = train(reader, case, seed)
        return judged(trained.model, trained.data, SAMPLES[case.budget])

    return kept(reader.folder(case.out, seed) / "scores.json", case, judge)


def scored_ensemble(plain: Reader, case: Case, seed: int, members: int) -> dict[str, Any]:
    """Train deterministic encoders, of which the row of that name has the first, and judge their ensemble."""

    def judge() -> dict[str, Any]:
        trained = [train(plain, case, seed + APART * k) for k in range(members)]
        return judged(Ensemble([one.model for one in trained]).eval(), trained[0].data, members)

    return kept(plain.folder(case.out, seed) / f"scores-ensemble-{members}.json", case, judge)


def parameters(reader: Reader, data: DataSet) -> int:
    """Return the number of parameters of an encoder."""
    return sum(p.numel() for p in reader.make(data, 0).parameters())


# ------------------------------------------------------------------------------------ judging


def judged(model: nn.Module, data: DataSet, samples: int) -> dict[str, Any]:
    """Return all measures of a model on the test sentences, and how well it tells them from foreign ones."""
    device = next(model.parameters()).device

    def doubts(split: Split) -> tuple[Tensor, Tensor]:
        x = {name: tensor.to(device) for name, tensor in sentences(split.x).items()}
        found = predict(model, x, Categorical(), samples=samples, keep_samples=False).to("cpu")
        return found.mean, found.epistemic

    p, epistemic = doubts(data.test)
    apart = {}
    for name, split in foreign(data).items():
        q, other = doubts(split)
        apart[name] = {
            "entropy": float(metrics.auroc(entropy(p), entropy(q))),
            "mutual_information": float(metrics.auroc(epistemic.double(), other.double())),
        }
    return {**scores(p, data.test.y), "epistemic": float(epistemic.double().mean()), "foreign": apart}


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of probabilities (N, C) in nats."""
    found: Tensor = torch.special.entr(p.double()).sum(1)
    return found


def scores(p: Tensor, y: Tensor) -> dict[str, Any]:
    """Return the measures of predictive probabilities (N, 2).

    "tempered" is the NLL at the best temperature, cross-fitted: what is left of a gain that a single number could have
    brought. "errors" is the probability that a sentence that was got wrong has a higher entropy than one that was not,
    1/2 where there are none of either.
    "curve" has the accuracy of the surest share of the sentences, for each of `COVERAGES`.
    """
    p, y = p.double().cpu(), y.cpu()
    doubt, wrong = entropy(p), p.argmax(1) != y
    risk = metrics.risk_coverage(doubt, wrong.double()).risk
    return {
        "accuracy": float(metrics.accuracy(p, y)),
        "nll": float(metrics.nll(p, y)),
        "tempered": float(metrics.calibrated_nll(p, y)),
        "brier": float(metrics.brier(p, y)),
        "ece": float(metrics.ece(p, y)),
        "errors": float(metrics.auroc(doubt[~wrong], doubt[wrong])) if 0 < wrong.sum() < len(y) else 0.5,
        "curve": [1 - float(risk[max(1, round(share * len(y))) - 1]) for share in COVERAGES],
    }


def foreign(data: DataSet) -> dict[str, Split]:
    """Return the test sentences with their words in random order, and with words drawn from the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    x = data.test.x[:, :LENGTH]
    drawn = torch.randint(BEGIN + 1, len(data.vocabulary), x.shape, generator=generator)
    ranks = torch.rand(x.shape, generator=generator)
    ranks[x == BEGIN], ranks[x == PADDING] = -1.0, 2.0  # the begin stays in front, the padding behind
    return {
        "shuffled": Split(x.gather(1, ranks.argsort(1)), data.test.y),
        "random words": Split(torch.where((x == BEGIN) | (x == PADDING), x, drawn), data.test.y),
    }


def tfidf_baseline(data: DataSet) -> dict[str, Any]:
    """Judge a logistic regression on TF-IDF of single words and pairs, which reads whole sentences."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]

    terms = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(terms, LogisticRegression(C=INVERSE_PENALTY, max_iter=2000))
    model.fit(texts(data, data.train), data.train.y.numpy())
    return scores(torch.from_numpy(model.predict_proba(texts(data, data.test))), data.test.y)


def texts(data: DataSet, split: Split) -> list[str]:
    """Return the known words of every sentence."""
    return [" ".join(data.vocabulary[word] for word in row if word > BEGIN) for row in split.x.tolist()]
