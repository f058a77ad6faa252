"""Sentences as numbers: the vocabulary, the parts, the published files, and the real set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.cli.compare import comparison_options, parse, plan_of
from leanbayes.data import catalogue as sources
from leanbayes.data.upstream import (
    BEGIN,
    encode,
    LENGTH,
    PADDING,
    SPECIAL,
    UNKNOWN,
    VOCABULARY,
    vocabulary,
)
from leanbayes.data.upstream import (
    POLARITY_FILE as FILE,
)
from tests.data.upstream import digest


def sentences(label, count=50):
    """Return sentences of one class, each with a word of its own."""
    return [
        f"the film is {'bad' if label == 0 else 'good'} , {'very ' * (k % 4)}{label}word{k} ." for k in range(count)
    ]


def write_cache(path, text=None, y=None):
    """Write negative sentences, then positive ones."""
    text = "\n".join(sentences(0) + sentences(1)) if text is None else text
    y = np.repeat(np.arange(2, dtype=np.uint8), 50) if y is None else y
    np.savez(path / FILE, text_utf8=np.frombuffer(text.encode(), np.uint8), y=y)


def test_the_vocabulary_has_the_most_frequent_words():
    words = vocabulary(["b b a", "C b a d", "c e"], size=6)
    assert words == (*SPECIAL, "b", "a", "c")
    assert [words.index(word) for word in SPECIAL] == [PADDING, UNKNOWN, BEGIN]


def test_sentences_begin_with_their_token_and_end_in_padding():
    words = vocabulary(["a film"])
    film, a = words.index("film"), words.index("a")
    expected = [[BEGIN, a, film, PADDING], [BEGIN, a, UNKNOWN, film], [BEGIN, *[PADDING] * 3], [BEGIN, a, a, a]]
    found = encode(["A film", "a great film", "", "a a a a a"], words, length=4)
    assert found.tolist() == expected
    assert found.dtype == torch.int64


def test_parts_are_stratified_disjoint_and_the_same_every_time(tmp_path):
    write_cache(tmp_path)
    one, two = data.load("rt-polarity", tmp_path), data.load("RT_polarity", tmp_path)
    parts = [(split.train, split.test, split.further["validation"]) for split in (one, two)]
    assert [len(split) for split in parts[0]] == [80, 10, 10]
    for mine, again in zip(*parts, strict=True):
        assert torch.equal(mine.x, again.x)
        assert mine.y.bincount().tolist() == [len(mine) // 2] * 2
    assert sum("word" in word for word in one.vocabulary) == 80  # those of training sentences, and of no others
    for split in parts[0][1:]:
        assert ((split.x == UNKNOWN).sum(1) == 1).all()
    assert not (parts[0][0].x == UNKNOWN).any()
    good = one.vocabulary.index("good")
    assert torch.equal((one.test.x == good).any(1).long(), one.test.y)  # labels stay with their sentences


def test_the_record_of_a_text(tmp_path):
    write_cache(tmp_path)
    loaded = data.load("rt-polarity", tmp_path)
    assert (loaded.kind, loaded.input_shape, loaded.num_outputs) == ("text", (LENGTH,), 2)
    assert loaded.classes == ("negative", "positive")
    assert torch.equal(loaded.inputs(loaded.test.x), loaded.test.x)
    words = [" ".join(loaded.vocabulary[k] for k in row if k) for row in loaded.train.x]
    told = {f"[CLS] {' '.join(sentence.split())}" for sentence in sentences(0) + sentences(1)}
    assert set(words) <= told
    mask = loaded.train.x != PADDING
    assert torch.equal(mask.sum(1), torch.tensor([len(text.split()) for text in words]))


def test_a_comparison_needs_a_network_of_the_users_own(tmp_path):
    write_cache(tmp_path)
    flags = ["--data", "rt-polarity", "--root", str(tmp_path)]
    with pytest.raises(
        ValueError, match=r"rt-polarity is text, and leanbayes has no network for it.* --net package\.module"
    ):
        plan_of(parse(comparison_options(), flags, "compare"))
    plan = plan_of(parse(comparison_options(), [*flags, "--net", "mine:encoder"], "compare"))
    assert f"texts of {LENGTH} tokens; network mine:encoder" in plan.sentence


def test_a_missing_file_says_where_to_get_it(tmp_path):
    expected = r"rt-polarity is not in .*`leanbayes data prepare rt-polarity`; .*rt-polarity\.neg from https://"
    with pytest.raises(FileNotFoundError, match=expected):
        data.load("rt-polarity", tmp_path)


@pytest.mark.parametrize("labels", [np.zeros(100, np.uint8), np.arange(99) % 2])
def test_another_file_of_that_name_is_refused(tmp_path, labels):
    write_cache(tmp_path, y=labels)
    with pytest.raises(ValueError, match=r"not the cache of rt-polarity: expected a label 0 or 1 for each line"):
        data.load("rt-polarity", tmp_path)


def test_the_published_files_become_a_data_set(tmp_path, monkeypatch):
    for label, name in enumerate(("rt-polarity.neg", "rt-polarity.pos")):
        text = "".join(f" {line} \n" for line in sentences(label))
        (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(ValueError, match="differs from the known rt-polarity"):
        data.prepare("rt-polarity", tmp_path, tmp_path, say=lambda sentence: None)
    write_cache(tmp_path)
    with np.load(tmp_path / FILE) as cached:
        content = {"": digest(cached["text_utf8"], cached["y"])}
    before = data.load("rt-polarity", tmp_path)
    (tmp_path / FILE).unlink()
    source = sources.SOURCES["rt-polarity"]
    monkeypatch.setitem(sources.SOURCES, "rt-polarity", replace(source, origin=replace(source.origin, content=content)))
    data.prepare("rt-polarity", tmp_path, tmp_path, say=lambda sentence: None)
    assert torch.equal(data.load("rt-polarity", tmp_path).train.x, before.train.x)


def test_the_real_sentences(data_root):
    if not (data_root / FILE).is_file():
        pytest.skip(f"needs {FILE} in the data folder")
    loaded = data.load("rt-polarity", data_root)
    parts = (loaded.train, loaded.test, loaded.further["validation"])
    assert [split.y.bincount().tolist() for split in parts] == [[4265] * 2, [533] * 2, [533] * 2]
    assert len(loaded.vocabulary) == len(set(loaded.vocabulary)) == VOCABULARY
    every = torch.cat([split.x for split in parts])
    assert every.shape == (10_662, LENGTH)
    assert int((every != PADDING).sum(1).max()) == 60  # the longest sentence has 59 words: none is cut
    assert (every[:, 0] == BEGIN).all()
    assert loaded.vocabulary[3:6] == (".", "the", ",")
    row = next(row for row in data.describe(data_root) if row.name == "rt-polarity")
    assert row[1:5] == ("classification", len(loaded.train), len(loaded.test), (LENGTH,))
    raw = np.load(data_root / FILE)
    assert digest(raw["text_utf8"], raw["y"]) == sources.SOURCES["rt-polarity"].origin.content[""]
