"""The known data sets: what they are, and which files of the cache hold them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from leanbayes.data import icu, origins, sentences
from leanbayes.data.dataset import DataSet, Task
from leanbayes.data.origins import Origin


class Piece(NamedTuple):
    """Where a stretch of rows lies in the cache: the file and the names of its arrays."""

    file: str
    x: str = "x"
    y: str = "y"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A known data set.

    Attributes:
        name: what users call it.
        shape: of one row: (C, H, W), (d,), or of tokens (T, V) or (T,).
        rows: of the training and of the test split.
        note: origin and licence, in a few words.
        origin: None where a library brings the set along.
        train, test: where the rows lie in the cache, several pieces one after the other.
        test_only: what serves as a foreign set where `test` is missing.
        mask: array of the splits, (splits, n), True for test rows; `train` and `test` are then the same rows.
        classes: names of the classes.
        names: file and array with better names, which only the cache knows.
        augment: the usual augmentation.
        read: reads the set from the root where rows are tokens, which arrays alone do not tell.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    note: str
    origin: Origin | None = None
    train: tuple[Piece, ...] = ()
    test: tuple[Piece, ...] = ()
    test_only: tuple[Piece, ...] = ()
    mask: str | None = None
    classes: tuple[str, ...] = ()
    names: tuple[str, str] | None = None
    augment: str = "none"
    read: Callable[[Path], DataSet] | None = None

    @property
    def task(self) -> Task:
        """Sets with classes are for classification."""
        return "classification" if self.classes else "regression"

    @property
    def files(self) -> list[str]:
        """Return the names of the cache files, each once."""
        return list(dict.fromkeys(piece.file for piece in (*self.train, *self.test)))


def find(name: str) -> Source:
    """Return the data set of that name, or say which names there are."""
    source = lookup(name)
    if source is not None:
        return source
    close = difflib.get_close_matches(name.lower(), SOURCES, n=1)
    raise ValueError(
        f"unknown data set {name!r}{f', did you mean {close[0]}?' if close else '.'} Expected one of "
        f"{', '.join(SOURCES)}, or the path of an .npz file, a .csv file or a folder of images."
    )


def lookup(name: str) -> Source | None:
    """Return the data set of that name, None if there is none; case, hyphens and underscores do not matter."""
    wanted = _plain(name)
    return next((source for known, source in SOURCES.items() if _plain(known) == wanted), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _uci(name: str, rows: tuple[int, int], columns: int) -> Source:
    here = (Piece("uci_regression.npz", f"{name}_X", f"{name}_y"),)
    return Source(
        name=f"uci-{name.replace('_', '-')}",
        shape=(columns,),
        rows=rows,
        note="UCI, mostly CC BY 4.0; splits of Hernandez-Lobato & Adams 2015",
        origin=origins.UCI,
        train=here,
        test=here,
        mask=f"{name}_test_mask",
    )


_DIGITS = tuple("0123456789")
_TABLE = (
    Source(name="digits", shape=(1, 8, 8), rows=(1000, 797), note="comes with scikit-learn", classes=_DIGITS),
    Source(
        name="mnist",
        shape=(1, 28, 28),
        rows=(60_000, 10_000),
        note="LeCun, Cortes & Burges; no licence stated",
        origin=origins.MNIST,
        train=(Piece("mnist.npz", "x_train", "y_train"),),
        test=(Piece("mnist.npz", "x_test", "y_test"),),
        classes=_DIGITS,
    ),
    Source(
        name="fashion-mnist",
        shape=(1, 28, 28),
        rows=(60_000, 10_000),
        note="Zalando Research; MIT",
        origin=origins.FASHION,
        train=(Piece("fashion_mnist.npz", "x_train", "y_train"),),
        test=(Piece("fashion_mnist.npz", "x_test", "y_test"),),
        classes=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    Source(
        name="notmnist",
        shape=(1, 28, 28),
        rows=(0, 10_000),
        note="letters A-J, Bulatov 2011; MIT; a foreign set only",
        origin=origins.NOTMNIST,
        test=(Piece("notmnist_test.npz", "x_test", "y_test"),),
        classes=tuple("ABCDEFGHIJ"),
    ),
    Source(
        name="cifar10",
        shape=(3, 32, 32),
        rows=(50_000, 10_000),
        note="Krizhevsky 2009; no licence stated",
        origin=origins.CIFAR10,
        train=tuple(Piece(f"cifar10_train_{k}of3.npz") for k in (1, 2, 3)),
        test=(Piece("cifar10_test.npz"),),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        names=("cifar10_test.npz", "names"),
        augment="crop_flip",
    ),
    Source(
        name="cifar100",
        shape=(3, 32, 32),
        rows=(50_000, 10_000),
        note="Krizhevsky 2009; no licence stated",
        origin=origins.CIFAR100,
        train=(Piece("cifar100.npz", "x_train", "y_train"),),
        test=(Piece("cifar100.npz", "x_test", "y_test"),),
        classes=tuple(map(str, range(100))),
        names=("cifar100.npz", "names"),
        augment="crop_flip",
    ),
    Source(
        name="svhn",
        shape=(3, 32, 32),
        rows=(73_257, 26_032),
        note="Netzer et al. 2011; non-commercial use only",
        origin=origins.SVHN,
        train=(Piece("svhn.npz", "x_train", "y_train"),),
        test=(Piece("svhn.npz", "x_test", "y_test"),),
        test_only=(Piece("svhn_test_6k.npz", "x_test", "y_test"),),
        classes=_DIGITS,
    ),
    Source(
        name="physionet2012",
        shape=icu.SHAPE,
        rows=(4000, 4000),
        note="in-hospital death, Silva et al. 2012; ODC-By 1.0; set a to train, b to test, c besides",
        origin=origins.PHYSIONET2012,
        train=(Piece(icu.FILE),),
        test=(Piece(icu.FILE),),
        classes=icu.CLASSES,
        read=icu.load_physionet2012,
    ),
    Source(
        name="rt-polarity",
        shape=(sentences.LENGTH,),
        rows=(8530, 1066),
        note="sentences of film reviews, Pang & Lee 2005; no licence stated",
        origin=origins.RT_POLARITY,
        train=(Piece(sentences.FILE),),
        test=(Piece(sentences.FILE),),
        classes=sentences.CLASSES,
        read=sentences.load_rt_polarity,
    ),
    _uci("boston", (455, 51), 13),
    _uci("concrete", (927, 103), 8),
    _uci("energy", (691, 77), 8),
    _uci("kin8nm", (7373, 819), 8),
    _uci("naval", (10_741, 1193), 16),
    _uci("power", (8611, 957), 4),
    _uci("protein", (41_157, 4573), 9),
    _uci("wine_red", (1439, 160), 11),
    _uci("yacht", (277, 31), 6),
)
SOURCES = {source.name: source for source in _TABLE}
