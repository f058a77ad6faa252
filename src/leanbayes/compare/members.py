"""What finished runs say of the test rows, part by part: members without noise, one member with noise, both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes.compare.load_run import load_run
from leanbayes.compare.run import CLAIM
from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.plain import mean
from leanbayes.core.predictor import distinct_draws, predict
from leanbayes.data.cache import write_npz
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation.result import commit
from leanbayes.methods.ensemble import Ensemble
from leanbayes.runtime.passes import components_of


@dataclass(frozen=True, eq=False)
class Saved:
    """Class probabilities of a finished run.

    Attributes:
        about: net, method, seed, data, number of draws, commit of the code that predicted.
        y: classes (N,).
        parts: probabilities (N, C) by name. `both` is the prediction of the run: all members, with noise. Runs with
            members also have `member0`, `member1`, ... without noise, `noise0`, `noise1`, ..., one member with noise,
            and `centre`, the average of the members' parameters.
    """

    about: dict[str, Any]
    y: Tensor
    parts: dict[str, Tensor]

    @property
    def members(self) -> Tensor | None:
        """The mean over all members without noise; None for a run without members."""
        found = [p for name, p in self.parts.items() if name.startswith("member")]
        return torch.stack(found).double().mean(0) if found else None

    @property
    def noisy(self) -> list[Tensor]:
        """One member with noise, for every member."""
        return [p for name, p in self.parts.items() if name.startswith("noise")]


def save_predictions(
    folder: Path, out: Path, *, samples: int = 16, noise: bool = True, device: str = "cpu", root: str | None = None
) -> Saved:
    """Predict the test rows with the network of a finished run, in the precision of its training, and write an `.npz`.

    Args:
        folder: of the run.
        out: the file to write.
        samples: draws of `both`, and of each member with noise.
        noise: predict also with each member with noise, which takes most of the passes.
        device: where to predict.
        root: folder of the known data sets; default what the run had.
    """
    run = load_run(folder, root)
    settings = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
    recipe = settings["recipe"]
    if run.data.task != "classification":
        raise ValueError(f"expected a run with classes, got '{folder}', which is a regression")
    model = run.model.to(device)
    if recipe.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = run.data.inputs(run.data.test.x), run.data.test.y
    with _precision(recipe.get("precision", "32-true"), device):
        parts = {name: p.float().cpu() for name, p in _parts(model, x, run.likelihood.to(device), samples, noise)}
    about = {
        "net": run.net,
        "method": settings["method"],
        "seed": recipe["seed"],
        "data": {"name": run.data.name, "sha256": run.data.sha256, "train": len(run.data.train), "test": len(y)},
        "recipe": recipe,
        "samples": samples,
        "commit": commit(),
    }
    saved = Saved(about, y.long(), parts)
    _write(saved, out)
    return saved


def read_predictions(path: Path) -> Saved:
    """Read what `save_predictions` wrote.

    Raises:
        ValueError: in one sentence, if the file is something else.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            parts = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("p_")}
            return Saved(about, torch.from_numpy(arrays["y"]), parts)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"expected predictions of a run in '{path}', got something else ({error})") from error


def _write(saved: Saved, out: Path) -> None:
    arrays = {f"p_{name}": p.numpy() for name, p in saved.parts.items()}
    write_npz(out, {"about": np.array(json.dumps(saved.about)), "y": saved.y.numpy(), **arrays})


def _parts(
    model: nn.Module, x: Tensor, likelihood: Likelihood, samples: int, noise: bool
) -> Iterator[tuple[str, Tensor]]:
    def average(network: nn.Module, draws: int = 1, component: int | None = None) -> Tensor:
        return predict(network, x, likelihood, samples=draws, component=component, keep_samples=False).mean

    distinct = distinct_draws(model)
    yield "both", average(model, distinct or samples)
    if isinstance(model, Ensemble) or not any(True for _ in stochastic_layers(model)):
        return
    yield "centre", average(mean(model))
    for k in range(components_of(model)):
        yield f"member{k}", average(mean(model, component=k))
        if distinct is None and noise:
            yield f"noise{k}", average(model, samples, component=k)


def _precision(name: str, device: str) -> AbstractContextManager[Any]:
    on = torch.device(device).type
    return torch.autocast(on, torch.bfloat16) if name == "bf16-mixed" else nullcontext()
