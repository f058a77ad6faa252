"""A time limit of a comparison or a suite: it stops after the epoch in work, and the same command resumes.

The limit belongs to one call of the command, not to its settings: ids and results do not depend on it. It is looked at
before each run, after each epoch of each training, before each evaluation and before the costs are measured. An
evaluation that has begun is not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STOPPED = 3
"""Exit code of a command that its time limit stopped."""


class TimeIsUp(Exception):
    """The time limit stopped a comparison or a suite; it is no failure of a run."""

    def sentence(self, *, fresh: bool) -> str:
        """Return what to do now; `fresh` says whether the command began again."""
        return f"{self}. The same command{' without --fresh' if fresh else ''} resumes."


@dataclass(frozen=True)
class TimeLimit:
    """The moment after which nothing new begins.

    Attributes:
        minutes: as given.
        end: the moment, in seconds of `time.time`, which the processes of a machine share.
    """

    minutes: float
    end: float

    @classmethod
    def of(cls, minutes: float) -> TimeLimit:
        """Return the limit that begins now; a number that is not positive raises."""
        if not minutes > 0:
            raise ValueError(f"expected --stop-after to be minutes above 0, got {minutes:g}")
        return cls(minutes, time.time() + 60 * minutes)

    def check(self, where: str) -> None:
        """Raise `TimeIsUp` if the time is over; `where` says what has ended, or does not begin."""
        if time.time() >= self.end:
            raise TimeIsUp(f"{where}: the {self.minutes:g} minutes of --stop-after are over")

    def after_epoch(self, title: str, name: str, epochs: int) -> Callable[[Any], None]:
        """Return a callback that stops a training of `epochs` epochs, unless it has ended; `fit` stores the state."""

        def look(state: Any) -> None:
            if state.epoch < epochs:
                self.check(f"{title}: stopped in {name} after epoch {state.epoch}, whose state is kept")

        return look
