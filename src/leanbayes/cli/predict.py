"""`leanbayes predict`: predict new rows with a network of a comparison."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from leanbayes.cli.main import complain, parse
from leanbayes.compare.batch_predict import describe_scores, find_rows, predict_rows, TABLE
from leanbayes.compare.job import file_name
from leanbayes.compare.load_run import load_run
from leanbayes.data.files.folder import is_image
from leanbayes.training.devices import pick_device


@dataclass(frozen=True)
class Predict:
    """Predict new rows with a network of a comparison; rows are prepared as in training.

    Attributes:
        checkpoint: folder of a run, such as runs/digits/digits/small/rank1/seed0, or the model.safetensors in it.
        data: rows: .npy; .npz with one array, or one named x or x_test; .csv or .parquet; an image file, a folder of
            images, or a pattern such as "new/*.png"; or a known data set (leanbayes list data), for its test
            rows. Default the test rows of the run.
        net: the network of the run as package.module:function, if it is your own. A name in the run's folder is never
            imported.
        out: folder of the predictions: predictions.csv for a spreadsheet, part-*.npz for Python (read_scores).
            The default is predictions/DATA.
        samples: draws per prediction. The default is the number in the evaluation of the run.
        seed: of the draws.
        temperature: predict at the temperature of the held-out rows of the run, for classes.
        part_rows: rows per file; an interrupt keeps finished files.
        workers: processes, each with one thread; default this one, on a Ray cluster as many as it has resources for.
        backend: ray, or local processes. auto is ray if it is installed and there are several workers or RAY_ADDRESS
            names a cluster, else local. Predictions are the same.
        device: auto, cpu, cuda or mps.
        root: folder of the known data sets; default that of the run.
        fresh: start again instead of keeping finished parts.
    """

    checkpoint: Path
    data: str = ""
    net: str = ""
    out: Path | None = None
    samples: int | None = None
    seed: int = 0
    temperature: bool = False
    part_rows: int = 4096
    workers: int | None = None
    backend: Literal["auto", "local", "ray"] = "auto"
    device: str = "auto"
    root: str | None = None
    fresh: bool = False


def predict(arguments: list[str]) -> int:
    """Predict, part by part, and print where the predictions are."""
    options = parse(Predict, _one_value(arguments), "predict")
    device = pick_device(options.device)
    run = load_run(options.checkpoint, options.root, options.net)
    request = find_rows(options.data, run, options.root)
    out = options.out or Path("predictions") / _default_name(options.data or run.data.name)
    sys.stderr.write(f"{request.name}; network {run.net}, {run.method}, of '{run.folder}'\n")
    sys.stderr.writelines(f"  {note}\n" for note in request.notes)
    if options.temperature and run.temperature is None:
        raise ValueError(
            f"expected a run of classes with held-out rows for --temperature, got '{run.folder}', which has no "
            "temperature; leave the flag out"
        )
    if run.temperature is not None:
        rows, value = "the temperature of its held-out rows", f"{run.temperature:.4g}"
        told = f"at {rows}, {value}" if options.temperature else f"without {rows}, {value}; --temperature applies it"
        sys.stderr.write(f"  {told}\n")
    run.model.to(device)
    how = {name: getattr(options, name) for name in ("seed", "part_rows", "workers", "backend", "fresh")}
    how["samples"] = run.samples if options.samples is None else options.samples
    how["temperature"] = run.temperature if options.temperature else None
    try:
        predict_rows(run, request, out, **how)
    except RuntimeError as error:  # a worker died, or there was too little memory
        complain(str(error))
        return 1
    if request.y is not None:
        sys.stdout.write(f"{describe_scores(out, request.y, run.data.task)}\n")
    sys.stdout.write(f"predictions: {out / TABLE}\n")
    return 0


def _one_value(arguments: list[str]) -> list[str]:
    """Join image files after --data, as a shell makes them of new/*.png, to one value."""
    if "--data" not in arguments:
        return arguments
    first = arguments.index("--data") + 1
    images = list(takewhile(is_image, map(Path, arguments[first:])))
    return [*arguments[:first], "\n".join(map(str, images)), *arguments[first + len(images) :]] if images else arguments


def _default_name(given: str) -> str:
    """Return the name of the data; of several images, that of their folder."""
    path = Path(given.split("\n")[0])
    return file_name(path.absolute().parent.name if "\n" in given else path.stem)
