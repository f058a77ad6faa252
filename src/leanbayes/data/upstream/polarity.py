"""Movie-review sentences, negative or positive (Pang & Lee 2005), as numbers of words.

The published sentences are lower-case, with spaces around words and punctuation marks: words are what lies between
spaces. The vocabulary has the most frequent words of the training sentences alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leanbayes.data.cache import read_array, sha256_of_files
from leanbayes.data.checks import Array
from leanbayes.data.dataset import DataSet, Split

# N sentences, T tokens

FILE = "rt_polarity_text.npz"
CLASSES = ("negative", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]")
"""The first words of every vocabulary: nothing behind the end, a word that is not in it, the begin of a sentence."""

PADDING, UNKNOWN, BEGIN = range(3)
VOCABULARY = 8000
"""Words of the vocabulary, special ones included; the rarest of them occur twice in training."""

LENGTH = 64
"""Tokens of a row; the longest sentence has 59 words, and the begin comes before them."""

TEST_SHARE = 10
"""One sentence in so many is for testing, and as many for validation."""


def load_rt_polarity(root: Path) -> DataSet:
    """Read the sentences from the cache; 80 % to train on, 10 % to test on, 10 % as ``further["validation"]``.

    Rows are int64 (64,): "[CLS]", the words, then 0 to the end, so that ``x != 0`` is the attention mask.
    ``vocabulary`` has the word of every number. The parts are the same every time, each with as many sentences of
    either class.
    """
    path = root / FILE
    text = read_array(path, "text_utf8").tobytes().decode("utf-8").split("\n")
    y = read_array(path, "y")
    if len(text) != len(y) or set(np.unique(y)) != {0, 1}:
        raise ValueError(
            f"{path} is not the cache of rt-polarity: expected a label 0 or 1 for each line of text_utf8, got "
            f"{len(y)} labels for {len(text)} lines. Delete it and run `leanbayes data prepare rt-polarity`."
        )
    test, validation, train = _parts(y)
    words = vocabulary([text[row] for row in train])
    numbers = encode(text, words)
    splits = [Split(numbers[rows], torch.from_numpy(y[rows]).long()) for rows in (train, test, validation)]
    return DataSet(
        name="rt-polarity",
        task="classification",
        train=splits[0],
        test=splits[1],
        classes=CLASSES,
        sha256=sha256_of_files([path]),
        vocabulary=words,
        further={"validation": splits[2]},
    )


def vocabulary(sentences: Iterable[str], size: int = VOCABULARY) -> tuple[str, ...]:
    """Return the special words and the most frequent others, of equally frequent ones the alphabetically first."""
    counts = Counter(word for sentence in sentences for word in sentence.lower().split())
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL, *by_frequency[: size - len(SPECIAL)])


def encode(sentences: Sequence[str], words: Sequence[str], length: int = LENGTH) -> Tensor:
    """Return the numbers of the words (N, T), int64: the begin first, cut or filled up with padding at the end."""
    number = {word: k for k, word in enumerate(words)}
    rows = torch.full((len(sentences), length), PADDING)
    for row, sentence in zip(rows, sentences, strict=True):
        found = [BEGIN, *(number.get(word, UNKNOWN) for word in sentence.lower().split())][:length]
        row[: len(found)] = torch.tensor(found)
    return rows


def _parts(y: Array) -> tuple[Array, Array, Array]:
    """Return the rows of test, validation and training: shuffled, the same shares of each class cut off the front."""
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0), device="cpu").numpy()
    by_class = (shuffled[y[shuffled] == label] for label in range(len(CLASSES)))
    cut = [np.split(rows, [len(rows) // TEST_SHARE, 2 * (len(rows) // TEST_SHARE)]) for rows in by_class]
    test, validation, train = (np.sort(np.concatenate(rows)) for rows in zip(*cut, strict=True))
    return test, validation, train
