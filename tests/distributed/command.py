"""The command line under torchrun, in processes that keep what they trained: `command FOLDER ARGUMENTS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from leanbayes.cli.main import main
from leanbayes.compare import row_training


def keeping(folder: Path) -> Any:
    """Return `fit`, after which each process writes down what it has."""
    fit = row_training.fit

    def kept(model: Any, *args: Any, **kwargs: Any) -> Any:
        history = fit(model, *args, **kwargs)
        torch.save(model.state_dict(), folder / f"{os.environ['RANK']}.pt")
        return history

    return kept


if __name__ == "__main__":
    torch.set_num_threads(1)
    row_training.fit = keeping(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
