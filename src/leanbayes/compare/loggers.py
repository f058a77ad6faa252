"""The flag --log: the loggers of a run, of Fabric (csv, tensorboard) or of Lightning (wandb, mlflow).

csv and tensorboard write into the folder of the run. wandb follows its own environment variables, mlflow too; without
a tracking address, mlflow writes into `mlflow.db` in the folder of the comparison (its store of plain files is closed
since version 3).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, Literal

from leanbayes.compare.job import Job
from leanbayes.training.logs import Logger

Log = Literal["csv", "tensorboard", "wandb", "mlflow"]
NEEDED: dict[str, tuple[str, ...]] = {
    "csv": (),
    "tensorboard": ("tensorboard",),
    "wandb": ("pytorch_lightning", "wandb"),
    "mlflow": ("pytorch_lightning", "mlflow", "sqlalchemy"),  # mlflow-skinny has no database
}
"""Packages of each logger, in addition to Fabric."""


def check_log(log: str | None) -> None:
    """Raise if a logger is unknown, or ModuleNotFoundError with the extra that brings its packages."""
    if log is None:
        return
    if log not in NEEDED:
        raise ValueError(f"expected --log to be one of {', '.join(get_args(Log))}, got {log!r}")
    if missing := [package for package in NEEDED[log] if find_spec(package) is None]:
        raise ModuleNotFoundError(
            f"--log {log} needs {' and '.join(missing)}, not installed here; pip install leanbayes[loggers], or take "
            "--log csv, which needs nothing"
        )


@contextmanager
def loggers_of(log: str | None, job: Job, out: Path) -> Iterator[tuple[Logger, ...]]:
    """Yield the loggers of a run, and end them afterwards; none without --log and for rows without a training."""
    check_log(log)
    if log is None or job.baseline or job.members:
        yield ()
        return
    try:
        logger = MAKERS[log](job, out)
    except Exception as error:  # each service has its own errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--log {log} could not start ({reason}); check its settings, or leave it out") from error
    status = "failed"
    try:
        yield (logger,)
        status = "success"
    finally:
        logger.finalize(status)
        if log == "wandb":  # else the next run of this process would join it
            importlib.import_module("wandb").finish()


def _csv(job: Job, out: Path) -> Any:
    """Return a logger that writes RUN/csv/version_<k>/metrics.csv, a new version for a resumed training."""
    from lightning_fabric.loggers.csv_logs import CSVLogger

    return CSVLogger(job.folder(out), name="csv")


def _tensorboard(job: Job, out: Path) -> Any:
    """Return a logger that writes RUN/tensorboard; tensorboard --logdir OUT shows all runs."""
    from lightning_fabric.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(job.folder(out), name="tensorboard", version="")


def _wandb(job: Job, out: Path) -> Any:
    """Return a logger whose run is found again by its folder, so that a resumed training continues it."""
    from pytorch_lightning.loggers import WandbLogger

    name = _name(job, out)
    own = hashlib.sha256(f"{job.folder(out).resolve()} {job.id}".encode()).hexdigest()[:16]
    project = os.environ.get("WANDB_PROJECT", "leanbayes")
    job.folder(out).mkdir(parents=True, exist_ok=True)  # else wandb writes into a folder for temporary files
    how = importlib.import_module("wandb").Settings(
        console="off", quiet=True
    )  # its summary would break the bar of the comparison
    made = WandbLogger(name=name, project=project, save_dir=job.folder(out), id=own, resume="allow", settings=how)
    made.experiment  # noqa: B018  # begins the run: an error appears before the training
    return made


def _mlflow(job: Job, out: Path) -> Any:
    """Return a logger with one run for each training; workers that start at once make the store in turn."""
    from pytorch_lightning.loggers import MLFlowLogger

    folder = out.resolve()
    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else (folder / "mlruns").as_uri()
    with _in_turn(folder / "mlflow.lock"):
        made = MLFlowLogger("leanbayes", run_name=_name(job, out), tracking_uri=place, artifact_location=artifacts)
        made.experiment  # noqa: B018  # begins the run: an error appears before the training
    return made


@contextmanager
def _in_turn(path: Path) -> Iterator[None]:
    """Let one process at a time inside; where the system has no such lock, all."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _name(job: Job, out: Path) -> str:
    return job.folder(out).relative_to(out).as_posix()


MAKERS: dict[str, Callable[[Job, Path], Any]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
