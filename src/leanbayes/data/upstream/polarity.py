"""Movie-review sentences, negative or positive (Pang & Lee 2005), as tokens.

The published sentences are lower-case, with spaces around words and punctuation marks, so words are split at spaces.
The vocabulary has the most frequent words of the training sentences only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leanbayes.data.cache import sha256_of_files
from leanbayes.data.dataset import Array, DataSet, Split
from leanbayes.data.files.npz import read_array
from leanbayes.data.upstream import Files

# N sentences, T tokens

FILE = "rt_polarity_text.npz"
POLARITIES = ("rt-polarity.neg", "rt-polarity.pos")
CLASSES = ("negative", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]")
"""First words of every vocabulary: padding at the end, unknown word, begin of a sentence."""

PADDING, UNKNOWN, BEGIN = range(3)
VOCABULARY = 8000
"""Size with the special words; the rarest words occur twice in training."""

LENGTH = 64
"""Tokens of a row; the longest sentence has 59 words after its begin."""

TEST_SHARE = 10
"""Every tenth sentence is for testing, another tenth for validation."""


def rt_polarity(folder: Path) -> Files:
    """Convert the negative and the positive sentences, one a line, without the spaces around them."""
    texts = [(folder / name).read_bytes().decode("utf-8").strip("\n").split("\n") for name in POLARITIES]
    joined = "\n".join(line.strip() for lines in texts for line in lines)
    y = np.repeat(np.arange(len(texts), dtype=np.uint8), [len(lines) for lines in texts])
    return {FILE: {"text_utf8": np.frombuffer(joined.encode("utf-8"), np.uint8), "y": y}}


def load_rt_polarity(root: Path) -> DataSet:
    """Read the sentences from the cache; 80 % to train on, 10 % to test on, 10 % as ``further["validation"]``.

    Rows are int64 (64,): "[CLS]", the words, then 0 to the end, so that ``x != 0`` is the attention mask. The splits
    are fixed, and the classes are equally frequent in each.
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
    """Return the special words and the most frequent others; ties in alphabetical order."""
    counts = Counter(word for sentence in sentences for word in sentence.lower().split())
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL, *by_frequency[: size - len(SPECIAL)])


def encode(sentences: Sequence[str], words: Sequence[str], length: int = LENGTH) -> Tensor:
    """Return the tokens (N, T), int64: the begin, the words, padding; long sentences are cut."""
    number = {word: k for k, word in enumerate(words)}
    rows = torch.full((len(sentences), length), PADDING)
    for row, sentence in zip(rows, sentences, strict=True):
        found = [BEGIN, *(number.get(word, UNKNOWN) for word in sentence.lower().split())][:length]
        row[: len(found)] = torch.tensor(found)
    return rows


def _parts(y: Array) -> tuple[Array, Array, Array]:
    """Return the rows of test, validation and training: a shuffled and stratified split."""
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0), device="cpu").numpy()
    by_class = (shuffled[y[shuffled] == label] for label in range(len(CLASSES)))
    cut = [np.split(rows, [len(rows) // TEST_SHARE, 2 * (len(rows) // TEST_SHARE)]) for rows in by_class]
    test, validation, train = (np.sort(np.concatenate(rows)) for rows in zip(*cut, strict=True))
    return test, validation, train
