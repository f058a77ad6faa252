"""Train the plain network of a seed once for all methods that are converted late: they begin as the same network.

python tools/branch.py keep EPOCH FLAGS    trains as `leanbayes train FLAGS` does, and keeps the state after an epoch
python tools/branch.py begin STATE FLAGS   writes the state that `leanbayes train FLAGS` would have at its conversion
leanbayes train FLAGS                      resumes from there
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from leanbayes.cli.compare import comparison_options, out_of, plan_of
from leanbayes.cli.main import parse
from leanbayes.compare.experiment import Experiment, pick_device
from leanbayes.compare.job import Job
from leanbayes.compare.run_all import run_all
from leanbayes.core.conversion import own_likelihood
from leanbayes.core.plain import plain_view
from leanbayes.runtime._files import read_tensors, tied
from leanbayes.training.objective import make_optimizer, NetworkWithLikelihood
from leanbayes.training.progress import History
from leanbayes.training.recipe import beta
from leanbayes.training.state import Checkpoint, HEADER, MODEL, OPTIMIZER, RANDOM, restore_random_state, STATE

OWN = ("convert_at_epoch", "posterior_lr", "accelerator")
"""Fields of a recipe in which a method may differ from the plain network up to its conversion."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) < 2 or given[0] not in ("keep", "begin"):
        sys.stderr.write(__doc__ or "")
        return 2
    options = parse(comparison_options(), given[2:], "train")
    jobs, out = plan_of(options).jobs, out_of(options)
    if given[0] == "begin":
        for job in jobs:
            begin(job, Path(given[1]), out)
        return 0
    found = run_all(jobs, out, stage="train", watch=lambda job, _: (_keeper(int(given[1]), job.folder(out)),))
    return 0 if all(result["status"] == "done" for result in found) else 1


def kept(folder: Path, epoch: int) -> Path:
    """Return where the state of a run after an epoch is kept."""
    return (folder / STATE).with_name(f"epoch{epoch}.safetensors")


def begin(job: Job, state: Path, out: Path) -> None:
    """Write the state of a method at its conversion, from that of the plain network after as many epochs.

    Raises:
        ValueError: if the state is of another epoch, or of a training that a method's does not begin as.
    """
    header, tensors = _read(state)
    _compare(job, header)
    device = pick_device(job.recipe.accelerator)
    experiment = Experiment(job.source, job.net, job.evaluation)
    model = experiment.model(job.method, job.seed, job.where).to(device)
    likelihood = own_likelihood(model) or experiment.likelihood().to(device)
    full, plain = (
        NetworkWithLikelihood(network, likelihood, job.recipe.precision) for network in (model, plain_view(model))
    )
    plain.load_state_dict(_part(tensors, MODEL))
    optimizer = make_optimizer(full, job.recipe)
    shared = dict(plain.named_parameters())
    for key, value in _part(tensors, OPTIMIZER).items():
        what, _, name = key.partition("/")
        optimizer.state[shared[name]][what] = value.to(device)
    restore_random_state(_part(tensors, RANDOM), device)
    history = History(row | {"beta": beta(job.recipe, row["epoch"] - 1)} for row in header["history"])
    checkpoint = Checkpoint(job.folder(out), job.recipe, header["rows"])
    checkpoint.prepare(keep=False)
    checkpoint.save(full, optimizer, history)


def _keeper(epoch: int, folder: Path) -> Any:
    def keep(state: Any) -> None:
        if state.epoch == epoch:
            part = kept(folder, epoch).with_suffix(".part")
            shutil.copyfile(folder / STATE, part)
            part.replace(kept(folder, epoch))

    return keep


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    metadata, tensors = read_tensors(path)
    header: dict[str, Any] = json.loads(metadata[HEADER])
    return header, tied(tensors, header["tied"])


def _compare(job: Job, header: dict[str, Any]) -> None:
    """Refuse a state that is not the one a method has at its conversion."""
    if header["layers"] or header["epoch"] != job.recipe.convert_at_epoch:
        raise ValueError(
            f"expected the state of a plain network after {job.recipe.convert_at_epoch} epochs, where {job.name} is "
            f"converted, got one after {header['epoch']} epochs with {len(header['layers'])} converted layers"
        )
    there, here = header["recipe"], json.loads(json.dumps(job.recipe.fields()))
    for name in sorted((there.keys() | here.keys()) - set(OWN)):
        if there.get(name) != here.get(name):
            raise ValueError(
                f"expected the plain network to be trained as {job.name} is, got {name} {there.get(name)!r} there and "
                f"{here.get(name)!r} here; pass the same flags"
            )


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


if __name__ == "__main__":
    sys.exit(main())
