"""Make the embedded images of the demo from Fashion-MNIST, by a rule that was fixed before the first training.

* Classes 0 to 7 are known. The last two, 8 (bag) and 9 (ankle boot), are left out as out-of-distribution inputs.
* Training: the first 250 training images of each known class, in the order of the file.
* Test: the first 125 test images of each known class. Left out: the first 150 test images of each other class.

LEANBAYES_DATA=FOLDER python tools/demo_data.py    writes src/leanbayes/data/embedded/fashion.npz
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch

from leanbayes import data

KNOWN, OTHERS = range(8), (8, 9)
TRAIN, TEST, LEFT_OUT = 250, 125, 150
OUT = Path(__file__).parent.parent / "src" / "leanbayes" / "data" / "embedded" / "fashion.npz"


def first_of(y: torch.Tensor, classes: object, count: int) -> torch.Tensor:
    """Return the first `count` rows of each class, in the order of the file."""
    rows = [(y == label).nonzero().flatten()[:count] for label in classes]  # type: ignore[attr-defined]
    return torch.cat(rows).sort().values


def main() -> int:
    """Write the file; equal inputs give equal bytes."""
    whole = data.load("fashion-mnist")
    train, test = whole.train, whole.test
    parts = {"train": (train, first_of(train.y, KNOWN, TRAIN)), "test": (test, first_of(test.y, KNOWN, TEST))}
    arrays = {}
    for name, (split, rows) in parts.items():
        arrays |= {f"x_{name}": split.x[rows, 0].numpy(), f"y_{name}": split.y[rows].numpy().astype(np.uint8)}
    arrays["x_left_out"] = test.x[first_of(test.y, OTHERS, LEFT_OUT), 0].numpy()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            written = io.BytesIO()
            np.save(written, array, allow_pickle=False)
            archive.writestr(
                zipfile.ZipInfo(f"{name}.npy", (2020, 1, 1, 0, 0, 0)), written.getvalue(), zipfile.ZIP_DEFLATED, 9
            )
    sys.stdout.write(
        f"{OUT.name}: {OUT.stat().st_size:,} bytes, {', '.join(f'{n} {a.shape}' for n, a in arrays.items())}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
