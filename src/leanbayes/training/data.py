"""Batches on the training device, from tensors in memory, a Dataset or a DataLoader.

The order of rows in an epoch depends on the seed and the epoch alone. A batch is global: process r of W takes its rows
r, r + W, r + 2 W, ... (docs/design/0006). Every row is in one batch of an epoch. The last, incomplete batch is the
exception: it is cut to a multiple of W rows, and left out if a process would have fewer than two, since batch norms
need two. That leaves out at most 2 W - 1 rows, different ones in every epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, cast, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from leanbayes.runtime.batches import Inputs, leading_rows, map_rows, slice_rows, tensors_in, to_device
from leanbayes.training.recipe import Recipe

Data = tuple[Inputs, Tensor] | Dataset[Any] | DataLoader[Any]
Batch = tuple[Inputs, Tensor]

SHARE_OF_FREE_MEMORY = 0.25
"""Tensors up to this share of a GPU's free memory are moved there whole; of larger ones, single batches."""

BYTES_AT_ONCE = {"cuda": 2**25}
"""Bytes of batches gathered and augmented together on a GPU, which is slow to start small work."""

ROWS_AT_ONCE = 1024
"""Rows of a block without gradients."""

COMPARED_ROWS = 1024
"""Rows of the inputs, evenly spaced, whose values a resumed training compares; of the targets, it compares all."""

ROUNDING = 1e-6
"""Relative difference of mean values that is due to rounding: data may be prepared again on another machine."""

LARGEST = 1e100
"""Size at which values are cut before their mean is taken."""

FEWEST_ROWS = 2
"""Fewest rows of a batch in a process: one row has no batch statistics."""


class Batches(Protocol):
    """A source of batches: `rows` of the whole set, in all processes, and `steps`, the batches of an epoch."""

    rows: int
    steps: int

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield this process's rows of the batches of an epoch, augmented; the same at every call."""

    def in_order(self) -> Iterator[Batch]:
        """Yield every row of this process once, unchanged; all processes together have each row once."""


@dataclass(frozen=True)
class InOrder:
    """The rows of this process in their order, which can be read repeatedly."""

    batches: Batches

    def __iter__(self) -> Iterator[Batch]:
        return self.batches.in_order()


@dataclass(frozen=True)
class Placement:
    """The device and process of a batch, and the recipe for its size, order, augmentation and memory order."""

    device: torch.device
    rank: int
    world: int
    recipe: Recipe

    def put(self, x: Any, y: Tensor, generator: torch.Generator | None = None) -> Batch:
        """Move a batch to the device; with a generator, augment it."""
        x, y = to_device(tuple(x) if isinstance(x, list) else x, self.device), y.to(self.device)
        if isinstance(x, Tensor) and x.dim() == 4 and self.recipe.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        if generator is not None and (name := self.recipe.augment) != "none":
            from leanbayes.data.augment import augment

            if not isinstance(x, Tensor):
                kind = type(x).__name__
                raise TypeError(f"augment={name!r} needs images as one tensor (B, C, H, W), got {kind}; use 'none'")
            x = augment(x, name, generator)
        return x, y

    def generator(self, epoch: int) -> torch.Generator:
        """Return the generator that augments an epoch: its own in each process, independent of the network's noise."""
        return seeded(self.device, self.recipe.seed, "augment", epoch, self.rank)

    def order(self, rows: int, epoch: int) -> Tensor:
        """Return the permutation of an epoch, the same in every process."""
        cpu = torch.device("cpu")
        return torch.randperm(rows, generator=seeded(cpu, self.recipe.seed, "order", epoch), device=cpu)

    def spans(self, rows: int) -> list[tuple[int, int]]:
        """Return the begin and end of each global batch in the permutation of an epoch."""
        size, last = self.recipe.batch_size, rows % self.recipe.batch_size
        spans = [(start, start + size) for start in range(0, rows - last, size)]
        if last // self.world >= FEWEST_ROWS:
            spans.append((rows - last, rows - last % self.world))
        return spans


class TensorBatches:
    """Rows of tensors that are on the device, or stay where they are if they are too large."""

    def __init__(self, x: Inputs, y: Tensor, placement: Placement) -> None:
        self.rows = common_rows(x, y)
        self.placement = placement
        self.spans = placement.spans(self.rows)
        self.steps = len(self.spans)
        size = sum(tensor.nbytes for tensor in tensors_in((x, y)))
        device = placement.device
        fits = device.type != "cuda" or size <= SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
        batch = size * placement.recipe.batch_size // max(1, self.rows)
        self.at_once = max(1, BYTES_AT_ONCE.get(device.type, 0) // max(1, batch))
        self.x: Inputs = to_device(x, device) if fits else x
        self.y = y.to(device) if fits else y

    def epoch(self, number: int) -> Iterator[Batch]:
        here, generator = self.placement, self.placement.generator(number)
        order = here.order(self.rows, number).to(self.y.device)
        for first in range(0, self.steps, self.at_once):
            spans = self.spans[first : first + self.at_once]
            chosen = order[spans[0][0] + here.rank : spans[-1][1] : here.world]
            x = map_rows(self.x, self.rows, partial(torch.index_select, dim=0, index=chosen))
            x, y = here.put(x, self.y.index_select(0, chosen), generator)
            rows, start = len(y), 0
            for span in spans:
                stop = start + (span[1] - span[0]) // here.world
                yield slice_rows(x, rows, start, stop), y[start:stop]
                start = stop

    def in_order(self) -> Iterator[Batch]:
        rank, world = self.placement.rank, self.placement.world
        for start in range(rank, self.rows, ROWS_AT_ONCE * world):
            rows = slice(start, start + ROWS_AT_ONCE * world, world)
            yield self.placement.put(map_rows(self.x, self.rows, itemgetter(rows)), self.y[rows])


class DatasetBatches:
    """Items of a map-style Dataset; each process reads its own.

    The method `set_epoch` of a Dataset, if any, is called first, as for torch's samplers. Then a Dataset that draws at
    random (`lb.data.OneAnnotator`) draws the same in a resumed training.
    """

    def __init__(self, dataset: Dataset[Any], placement: Placement) -> None:
        self.dataset, self.placement = dataset, placement
        self.rows = _length(dataset)
        self.spans = placement.spans(self.rows)
        self.steps = len(self.spans)

    def epoch(self, number: int) -> Iterator[Batch]:
        here = self.placement
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(number)
        order = here.order(self.rows, number).tolist()
        chosen = [order[start + here.rank : stop : here.world] for start, stop in self.spans]
        return self._load(chosen, here.generator(number))

    def in_order(self) -> Iterator[Batch]:
        mine = range(self.placement.rank, self.rows, self.placement.world)
        size = self.placement.recipe.batch_size
        return self._load([list(mine[start : start + size]) for start in range(0, len(mine), size)], None)

    def _load(self, chosen: list[list[int]], generator: torch.Generator | None) -> Iterator[Batch]:
        # A generator of its own: otherwise a loader takes its seed from torch's, and changes the noise.
        for item in DataLoader(self.dataset, batch_sampler=chosen, generator=torch.Generator()):
            yield self.placement.put(*_pair(item), generator)


class LoaderBatches:
    """The batches of a DataLoader in its own order; each process reads all of them and takes its rows of each.

    A loader's generator is seeded in every epoch, so that a resumed training sees the same batches.
    """

    def __init__(self, loader: DataLoader[Any], placement: Placement) -> None:
        if placement.world > 1 and isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "expected a DataLoader of all rows, since fit deals them to the processes, got a DistributedSampler; "
                "leave it out"
            )
        self.loader, self.placement = loader, placement
        self.steps, self.rows = _length(loader), rows_of(loader)

    def epoch(self, number: int) -> Iterator[Batch]:
        if isinstance(self.loader.generator, torch.Generator):
            seed = seeded(torch.device("cpu"), self.placement.recipe.seed, "loader", number)
            self.loader.generator.set_state(seed.get_state())
        return self._load(self.placement.generator(number))

    def in_order(self) -> Iterator[Batch]:
        return self._load(None)

    def _load(self, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield this process's rows of each batch; in training, as many as the other processes have."""
        rank, world = self.placement.rank, self.placement.world
        for item in self.loader:
            x, y = _pair(item)
            stop = len(y) if generator is None else len(y) - len(y) % world
            if stop > rank:
                rows = slice(rank, stop, world)
                yield self.placement.put(map_rows(x, len(y), itemgetter(rows)), y[rows], generator)


def training_batches(data: Data, placement: Placement) -> Batches:
    """Return batches to train on, at least one."""
    batches = batches_of(data, placement)
    if not batches.steps and isinstance(data, DataLoader) and batches.rows:
        raise ValueError(
            f"expected a DataLoader with batches, got none of its {batches.rows} rows; leave drop_last out, or take "
            "smaller batches"
        )
    if not batches.steps:
        raise ValueError(
            f"expected at least {FEWEST_ROWS * placement.world} rows to train on, {FEWEST_ROWS} for each process, got "
            f"{batches.rows}"
        )
    return batches


def batches_of(data: Data, placement: Placement) -> Batches:
    """Return the batches of any kind of data."""
    if isinstance(data, DataLoader):
        return LoaderBatches(data, placement)
    if isinstance(data, IterableDataset):
        raise TypeError(
            f"expected data as a pair (inputs, targets), a Dataset with an index or a DataLoader, got "
            f"{type(data).__name__}, which is read in its own order; pass DataLoader(data, batch_size=...)"
        )
    if isinstance(data, Dataset):
        return DatasetBatches(data, placement)
    if is_pair(data):
        return TensorBatches(*data, placement)
    raise TypeError(f"expected data as a pair (inputs, targets), a Dataset or a DataLoader, got {_described(data)}")


def rows_of(loader: DataLoader[Any]) -> int:
    """Return the number of different rows of a DataLoader, in all processes, without repeats of its sampler."""
    drawn: Any = loader.sampler
    if isinstance(drawn, DistributedSampler):
        drawn = drawn.dataset  # the sampler has the rows of one process
    rows = _length(loader.dataset)
    return min(rows, len(drawn)) if isinstance(drawn, Sized) else rows


def values_of(x: Inputs, y: Tensor) -> list[list[float]]:
    """Return three means for each tensor: of values, of values weighted by their row, and of sizes."""
    inputs = [tensor for tensor in tensors_in(x) if tensor.layout == torch.strided]
    some = [tensor[:: max(1, len(tensor) // COMPARED_ROWS)] for tensor in inputs if tensor.dim()]
    return [_means(tensor) for tensor in (*some, y) if tensor.numel()]


def _means(tensor: Tensor) -> list[float]:
    values = tensor.detach().cpu().flatten(1) if tensor.dim() > 1 else tensor.detach().cpu()[:, None]
    values = values.double().nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)
    rows = values.mean(1)
    weighted = rows * torch.linspace(1, 2, len(rows), dtype=rows.dtype, device=rows.device)
    return [rows.mean().item(), weighted.mean().item(), values.abs().mean().item()]


def same_values(there: list[list[float]], here: list[list[float]]) -> bool:
    """Return whether data have the same values, up to rounding."""
    if [len(each) for each in there] != [len(each) for each in here]:
        return False
    return all(
        abs(old - new) <= ROUNDING * max(olds[-1], news[-1])
        for olds, news in zip(there, here, strict=True)
        for old, new in zip(olds, news, strict=True)
    )


def is_pair(data: object) -> bool:
    """Return whether data are of the form (inputs, targets)."""
    return isinstance(data, (tuple, list)) and len(data) == 2


def groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of `size` batches; the last one may be shorter."""
    while group := list(islice(batches, size)):
        yield group


def seeded(device: torch.device, *name: object) -> torch.Generator:
    """Return a generator seeded by a name; a hash makes similar names independent."""
    digest = hashlib.blake2b("/".join(map(str, name)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _pair(item: Any) -> Batch:
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], Tensor)):
        raise TypeError(f"expected batches (inputs, target) with a tensor of targets, got {_described(item)}")
    x, y = item
    if not y.dim():
        raise TypeError(
            "expected batches (inputs, target) with a row on the first axis, got a target without an axis; give the "
            "DataLoader a batch_size"
        )
    return (tuple(x) if isinstance(x, list) else x), y


def _described(data: object) -> str:
    """Describe data of a wrong kind; for several items, add a remedy."""
    kind = type(data).__name__
    if not isinstance(data, (tuple, list)):
        return kind
    items = f"a {kind} of {len(data)}: {', '.join(type(item).__name__ for item in data[:4])}"
    return f"{items}; nest several inputs, as in ((a, b), y)" if len(data) > 2 else items


def common_rows(x: Any, y: Any) -> int:
    """Return the number of rows of inputs and targets; raise unless both have as many."""
    rows = leading_rows(x)
    if not isinstance(y, Tensor) or rows is None:
        raise TypeError(
            f"expected a pair (inputs, targets) of tensors, got {type(x).__name__} and {type(y).__name__}; "
            "torch.as_tensor makes tensors of arrays"
        )
    if not y.dim():
        raise ValueError("expected a target for each row, got a tensor of shape ()")
    if rows != len(y):
        raise ValueError(
            f"expected as many inputs as targets, got {rows} and {len(y)}, counted on the first axis; give rows there"
        )
    return rows


def _length(data: object) -> int:
    try:
        return len(cast(Sized, data))
    except TypeError as error:
        raise TypeError(
            f"expected data whose number of rows is known, {type(data).__name__} has no len(); the KL is spread over it"
        ) from error
