"""Every epoch once, during the training: a line of `history.jsonl`, and the user's loggers.

A line is written after the state of its epoch and after the loggers. A resumed training logs the epochs that its state
has and the file does not. So each epoch is logged once, whenever the process was killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from leanbayes.runtime._files import parse_json, write_text
from leanbayes.training.diagnostics import TrainingError

FILE = "history.jsonl"  # in the folder of a training
Row = dict[str, Any]


class Logger(Protocol):
    """Anything that takes numbers by name, and the number of the epoch: every logger of Fabric or Lightning."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> object: ...


class EpochLog:
    """The rows of a training that were logged, in order; with members, one after the other."""

    def __init__(self, folder: Path | None, loggers: Iterable[Logger], *, resume: bool) -> None:
        self.path = None if folder is None else folder / FILE
        self.loggers = tuple(loggers)
        self.rows = read_history(self.path) if self.path is not None and resume else []
        self.clean = False  # whether the file has these rows and nothing else

    def catch_up(self, before: int, rows: Sequence[Row]) -> None:
        """Log the rows of a stored state that are not logged yet; `before` rows belong to earlier networks."""
        self._clean()
        for number, row in enumerate(rows, before):
            if self.rows[number : number + 1] != [row]:
                self.add(number, row)

    def add(self, number: int, row: Row) -> None:
        """Log the row of an epoch; rows from this number on belong to a state that was lost, and are dropped."""
        self.cut(number)
        for logger in self.loggers:
            logger.log_metrics(_numbers(row), number + 1)
            save_log(logger)
        self.rows.append(row)
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(row))
        except OSError as error:
            raise _not_written(self.path, error) from error

    def cut(self, length: int) -> None:
        """Drop the rows after a length."""
        if len(self.rows) > length:
            del self.rows[length:]
            self.clean = False
            self._clean()

    def _clean(self) -> None:
        """Make the file have the rows that are logged, and nothing else."""
        if self.clean or self.path is None:
            return
        self.clean = True
        text = "".join(map(_line, self.rows))
        try:
            if self.path.is_file() and self.path.read_text(encoding="utf-8", errors="replace") == text:
                return  # a finished training stays untouched
            if self.rows:
                write_text(text, self.path)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise _not_written(self.path, error) from error


def check_loggers(loggers: Any) -> None:
    """Raise TypeError unless every logger has `log_metrics`."""
    if isinstance(loggers, str) or not isinstance(loggers, Iterable):
        raise TypeError(f"expected loggers to be a list of objects with log_metrics(dict, step), got {loggers!r}")
    for logger in loggers:
        if not callable(getattr(logger, "log_metrics", None)):
            raise TypeError(f"expected loggers with a method log_metrics(dict, step), got a {type(logger).__name__}")


def read_history(path: Path) -> list[Row]:
    """Return the rows of a `history.jsonl`, up to the first line that is cut or damaged; none without a file."""
    rows: list[Row] = []
    if not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = parse_json(line, f"'{path}'")
            _line(row)  # a number that JSON does not have raises
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def save_log(logger: object) -> None:
    """Let a logger of Fabric or Lightning write its numbers now: some keep a hundred in memory."""
    loggers: Any = sys.modules.get("lightning_fabric.loggers.logger")  # without it there is no such logger
    if loggers is not None and isinstance(logger, loggers.Logger):
        logger.save()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _not_written(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"the epoch could not be written to '{path}' ({error.strerror or error}); make room, and resume"
    )
