"""Movie-review sentences: every method that converts a BERT, evaluated by its calibration and its uncertainty.

No paper has this table. All rows share the encoder, its weights at the start, the recipe and the dropped words: with a
vector for each of 8,000 words, the network would fit 8,530 sentences exactly. Settings were chosen on the validation
sentences; docs/results/text.md lists the trials. Shapes: N sentences, T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import Dataset

import leanbayes as lb
from leanbayes.compare.job import KL_EPOCHS
from leanbayes.data import DataSet, Split
from leanbayes.data.upstream import BEGIN, PADDING, UNKNOWN
from leanbayes.methods._base import Method
from leanbayes_papers.harness import plot_rows, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.harness.numbers import numbers
from leanbayes_papers.rank1.ehr import _file, cached_scores, ensemble_scores, parameters

DATA, NET, QUICK_ROWS = "rt-polarity", "bert-2-64", 256
DETERMINISTIC = "Deterministic"
ENSEMBLE = "Deep ensemble"
TFIDF = "TF-IDF, logistic regression"
MEMBERS = {"quick": 2, "short": 4, "full": 4}
SAMPLES = {"quick": 4, "short": 16, "full": 16}
LENGTH = 40  # tokens of a sentence that are read: 97 % have no more
DROPPED = 0.6  # share of the words that the network does not see in a pass over a training sentence
METHODS: dict[str, tuple[Method | None, dict[str, Any]]] = {
    DETERMINISTIC: (None, {}),
    "MC dropout": (lb.MCDropout(), {}),
    "DropConnect": (lb.DropConnect(), {}),
    "Mean field": (lb.MeanField(), {"posterior_lr": 1e-3, "anneal_epochs": KL_EPOCHS}),
    "Variance layers": (lb.VarianceLayers(), {"posterior_lr": 1e-3}),
    "BatchEnsemble": (lb.BatchEnsemble(components=4), {"posterior_lr": 5e-4}),
    "Rank-1": (lb.Rank1(components=4), {"posterior_lr": 1e-2}),
    "Implicit nodes": (lb.ImplicitNodes(components=4), {"posterior_lr": 1e-2}),
    "Patches, EMP": (lb.ModelPatch(components=4), {"posterior_lr": 1e-3}),
    "Patches, ECMP": (lb.ModelPatch(components=4, crossed=True), {"posterior_lr": 1e-3}),
}
"""Method of each row, and the fields of the recipe that are its own.

With all of its KL, a mean field of 584,384 weights learns nothing from 8,530 sentences. Here 2.5 % of it count.
"""

COVERAGES = tuple(k / 20 for k in range(2, 21))  # shares of the sentences, the surest first, whose accuracy is measured
# Scikit-learn's C of the logistic regression: the best of 1, 3, 10, 20, 30 and 100 by validation NLL.
INVERSE_PENALTY = 10.0
TABLE = Table.of("text", "reviews")
COLUMNS = TABLE.columns[:-1]  # without the number of parameters
GAINS = Table.of_gains("method", DETERMINISTIC, COLUMNS, title="Gains over the deterministic encoder of the same seed")
OOD_TABLE = Table.of("text", "ood", derive=lambda records: [record for record in records if "epistemic" in record])
LEGEND = (
    "Mean ± standard error over seeds. Networks of one seed begin with the same weights and see the same sentences. "
    "Brier is the squared error, summed over classes."
)


def text_reviews(run: Run) -> Suite:
    """Movie-review sentences read by a small BERT, each method converted in one line (Table of our own, no paper's)."""
    plot = partial(plot_rows, table=replace(TABLE, columns=COLUMNS[:4]))
    tables = (TABLE, GAINS, OOD_TABLE)
    study = Study.of("text", "text-reviews", measure=measure, tables=tables, plot=plot, data=(DATA,))
    paper = "No paper: a text encoder of Hugging Face's transformers, as its users have it"
    draws = f"{SAMPLES[run.budget]} draws, {MEMBERS[run.budget]} members in an ensemble."
    return Suite(paper=paper, studies=(study,), legend=f"{LEGEND} {draws}")


def specs(run: Run) -> dict[str, TrainingSpec]:
    """Return the encoders by the name of their row; the ensemble consists of deterministic ones."""
    recipe = run.recipe_of("text", "encoder")
    fields: dict[str, Any] = {
        "quick_rows": QUICK_ROWS,
        "build": build,
        "rows": lambda data, seed: DroppedWords(data.train, seed),
    }
    return {
        name: run.spec(_file(name), DATA, NET, replace(recipe, **own), method=method, **fields)
        for name, (method, own) in METHODS.items()
    }


def build(spec: TrainingSpec, data: DataSet) -> nn.Module:
    """Return the encoder; all of one seed begin with the same weights, and compare in pairs."""
    net = encoder(len(data.vocabulary), data.num_outputs)
    return net if spec.method is None else lb.convert(net, spec.method, likelihood=lb.Categorical())


def encoder(words: int, classes: int) -> nn.Module:
    """Return a new BertForSequenceClassification for a vocabulary of `words` words.

    Attention has no dropout: it is a function inside BERT's `forward`, which MC dropout could not see.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the text encoder is made by transformers, which is not here; install it with pip") from error
    library: Any = transformers  # typed in parts only
    sizes = {"vocab_size": words, "num_labels": classes, "pad_token_id": PADDING, "max_position_embeddings": LENGTH}
    config = library.BertConfig(**sizes, **numbers("text")["encoder"])
    made: nn.Module = library.BertForSequenceClassification(config)
    return made


def sentences(x: Tensor) -> dict[str, Tensor]:
    """Return word numbers (N, T) as BERT takes them, cut to the tokens that it reads."""
    x = x[:, :LENGTH]
    return {"input_ids": x, "attention_mask": (x != PADDING).long()}


class DroppedWords(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Sentences with other words unknown in every epoch; the same ones when a training is resumed."""

    def __init__(self, split: Split, seed: int) -> None:
        """Take the sentences of a split."""
        self.x, self.y, self.seed = split.x, split.y, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the words that are dropped in an epoch."""
        generator = torch.Generator().manual_seed(10_000 * self.seed + epoch)
        dropped = (torch.rand(self.x.shape, generator=generator) < DROPPED) & (self.x > BEGIN)
        self.now = sentences(torch.where(dropped, UNKNOWN, self.x))

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return a sentence and its class."""
        return {name: tensor[row] for name, tensor in self.now.items()}, self.y[row]


def measure(run: Run) -> list[Record]:
    """Train every encoder with every seed, and evaluate it on test and out-of-distribution sentences."""
    made, members = specs(run), MEMBERS[run.budget]
    plain = made[DETERMINISTIC]
    data = plain.load(plain.source)
    scored, size = partial(evaluate, samples=SAMPLES[run.budget]), parameters(plain, data)
    records = []
    for name, spec in made.items():
        ratio = parameters(spec, data) / size
        for seed in run.seeds:
            found = cached_scores(run, spec, seed, scored, "scores")
            if name == DETERMINISTIC:  # a single network has no mutual information
                found = {key: None if key.endswith("mutual_information") else v for key, v in found.items()}
            records.append({"method": name, "seed": seed, "parameters": ratio} | found)
    for seed in run.seeds:
        found = ensemble_scores(run, plain, seed, evaluate, members)
        records.append({"method": ENSEMBLE, "seed": seed, "parameters": float(members)} | found)
    return [*records, {"method": TFIDF} | tfidf_baseline(data)]


def evaluate(model: nn.Module, data: DataSet, samples: int) -> Record:
    """Return all measures of a model on the test sentences, and the AUROC of out-of-distribution ones."""
    device = next(model.parameters()).device

    def predicted(split: Split) -> tuple[Tensor, Tensor]:
        x = {name: tensor.to(device) for name, tensor in sentences(split.x).items()}
        found = lb.predict(model, x, lb.Categorical(), samples=samples, keep_samples=False).to("cpu")
        return found.mean, found.epistemic

    p, epistemic = predicted(data.test)
    apart: Record = {}
    for name, split in ood_sentences(data).items():
        q, other = predicted(split)
        apart[f"{name} entropy"] = float(lb.metrics.auroc(entropy(p), entropy(q)))
        apart[f"{name} mutual_information"] = float(lb.metrics.auroc(epistemic.double(), other.double()))
    return {**scores(p, data.test.y), "epistemic": float(epistemic.double().mean()), **apart}


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of probabilities (N, C) in nats."""
    found: Tensor = torch.special.entr(p.double()).sum(1)
    return found


def scores(p: Tensor, y: Tensor) -> Record:
    """Return the measures of predictive probabilities (N, 2).

    `tempered` is the NLL at the best temperature, cross-fitted. `errors` is the probability that a wrong sentence has a
    higher entropy than a right one, or 1/2. `curve` has the accuracy of the surest sentences, for each of `COVERAGES`.
    """
    p, y = p.double().cpu(), y.cpu()
    doubt, wrong = entropy(p), p.argmax(1) != y
    risk = lb.metrics.risk_coverage(doubt, wrong.double()).risk
    curve = [1 - float(risk[max(1, round(share * len(y))) - 1]) for share in COVERAGES]
    return {
        "accuracy": float(lb.metrics.accuracy(p, y)),
        "nll": float(lb.metrics.nll(p, y)),
        "tempered": float(lb.metrics.calibrated_nll(p, y)),
        "brier": float(lb.metrics.brier(p, y)),
        "ece": float(lb.metrics.ece(p, y)),
        "errors": float(lb.metrics.auroc(doubt[~wrong], doubt[wrong])) if 0 < wrong.sum() < len(y) else 0.5,
        "surest 80 %": curve[COVERAGES.index(0.8)],
        "surest 50 %": curve[COVERAGES.index(0.5)],
        "curve": curve,
    }


def ood_sentences(data: DataSet) -> dict[str, Split]:
    """Return the test sentences with their words in random order, and with words drawn from the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    x = data.test.x[:, :LENGTH]
    drawn = torch.randint(BEGIN + 1, len(data.vocabulary), x.shape, generator=generator)
    ranks = torch.rand(x.shape, generator=generator)
    ranks[x == BEGIN], ranks[x == PADDING] = -1.0, 2.0  # the begin stays first, the padding last
    return {
        "shuffled": Split(x.gather(1, ranks.argsort(1)), data.test.y),
        "random words": Split(torch.where((x == BEGIN) | (x == PADDING), x, drawn), data.test.y),
    }


def tfidf_baseline(data: DataSet) -> Record:
    """Evaluate a logistic regression on TF-IDF of single words and pairs, which reads whole sentences."""
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
