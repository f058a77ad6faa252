"""A small BERT for movie-review sentences, what every method makes of it, and how all of them are trained.

The encoder is built from a configuration: nothing is downloaded. Words are dropped at random in training, as a network
with a vector for each of 8,000 words learns 8,530 sentences by heart otherwise. Settings were chosen on the validation
sentences; docs/results/text.md says what was tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from leanbayes.compare.experiment import pick_device
from leanbayes.compare.job import KL_EPOCHS
from leanbayes.core.conversion import convert
from leanbayes.data import DataSet, Split
from leanbayes.data.upstream.polarity import BEGIN, PADDING, UNKNOWN
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods._base import Method
from leanbayes.methods.dropconnect import DropConnect
from leanbayes.methods.implicit import ImplicitNodes
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.patch import ModelPatch
from leanbayes.methods.rank1 import BatchEnsemble, Rank1
from leanbayes.methods.variance import VarianceLayers
from leanbayes.training import Recipe
from leanbayes.training.fit import fit
from leanbayes_papers.study import Case
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import loaded, Trained, Trainee

# N sentences, T tokens

DATA = "rt-polarity"
NET = "bert-2-64"
QUICK_ROWS = 256
DETERMINISTIC = "Deterministic"

LENGTH = 40
"""Tokens of a sentence that are read: 97 % have no more."""

DROPPED = 0.6
"""Share of the words that are unknown to the network in a pass over a training sentence."""

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DROPOUT = 0.1

METHODS: dict[str, tuple[Method | None, dict[str, Any]]] = {
    DETERMINISTIC: (None, {}),
    "MC dropout": (MCDropout(), {}),
    "DropConnect": (DropConnect(), {}),
    "Mean field": (MeanField(), {"posterior_lr": 1e-3, "anneal_epochs": KL_EPOCHS}),
    "Variance layers": (VarianceLayers(), {"posterior_lr": 1e-3}),
    "BatchEnsemble": (BatchEnsemble(components=4), {"posterior_lr": 5e-4}),
    "Rank-1": (Rank1(components=4), {"posterior_lr": 1e-2}),
    "Implicit nodes": (ImplicitNodes(components=4), {"posterior_lr": 1e-2}),
    "Patches, EMP": (ModelPatch(components=4), {"posterior_lr": 1e-3}),
    "Patches, ECMP": (ModelPatch(components=4, crossed=True), {"posterior_lr": 1e-3}),
}
"""What each row is converted with, and what its recipe has of its own.

With all of its KL, a mean field of 584,384 weights learns nothing from 8,530 sentences. Here 2.5 % of it count.
"""

Sentences = dict[str, Tensor]
"""What BERT is called with: numbers of words (N, T), and where there are any."""


def encoder(words: int, classes: int) -> nn.Module:
    """Return a fresh BertForSequenceClassification for a vocabulary of so many words.

    Attention has no dropout: it is a function inside BERT's `forward`, which MC dropout could not see.

    Raises:
        ImportError: if transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the text encoder is made by transformers, which is not here; install it with pip") from error
    library: Any = transformers  # which is typed in parts
    config = library.BertConfig(
        vocab_size=words,
        max_position_embeddings=LENGTH,
        type_vocab_size=1,
        num_labels=classes,
        pad_token_id=PADDING,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=0.0,
        **SIZES,
    )
    made: nn.Module = library.BertForSequenceClassification(config)
    return made


def sentences(x: Tensor) -> Sentences:
    """Return rows of numbers of words as BERT takes them, cut to the tokens that it reads."""
    x = x[:, :LENGTH]
    return {"input_ids": x, "attention_mask": (x != PADDING).long()}


class DroppedWords(Dataset[tuple[Sentences, Tensor]]):
    """Sentences of which other words are unknown in every epoch; the same ones when a training is resumed."""

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

    def __getitem__(self, row: int) -> tuple[Sentences, Tensor]:
        """Return a sentence and its class."""
        return {name: tensor[row] for name, tensor in self.now.items()}, self.y[row]


@dataclass(frozen=True, kw_only=True)
class Reader(Trainee):
    """A text encoder and how it is trained."""

    @override
    def make(self, data: DataSet, seed: int) -> nn.Module:
        """Return the untrained model; all that share a seed begin with the same weights, and compare in pairs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = encoder(len(data.vocabulary), data.num_outputs)
            return net if self.method is None else convert(net, self.method, likelihood=Categorical())


def train(reader: Reader, case: Case, seed: int) -> Trained:
    """Train an encoder, go on with its training, or read it if it is finished."""
    data = loaded(reader.source)
    model = reader.make(data, seed)
    fit(
        model,
        DroppedWords(data.train, seed),
        replace(reader.recipe, seed=seed),
        likelihood=Categorical(),
        folder=reader.folder(case.out, seed),
        resume=not case.fresh,
        progress=case.budget != "quick",
    )
    return Trained(model.to(pick_device(case.device)).eval(), data, [])


def readers(setting: Setting) -> dict[str, Reader]:
    """Return the encoders by the name of their row; the ensemble is made of deterministic ones."""
    recipe = Recipe(
        epochs=setting.pick(quick=2, short=5, full=5),
        batch_size=64,
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.0,
        clip_norm=1.0,
    )
    source = setting.source(DATA, quick_rows=QUICK_ROWS)
    return {
        name: Reader(
            name=name.lower().replace(",", "").replace(" ", "-"),
            source=source,
            net=NET,
            recipe=setting.recipe(replace(recipe, **own)),
            method=method,
        )
        for name, (method, own) in METHODS.items()
    }
