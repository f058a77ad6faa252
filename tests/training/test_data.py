"""Every row once, the same order everywhere, and the same batches from tensors, a Dataset or a DataLoader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from leanbayes.training import data as module
from leanbayes.training.data import batches_of, Placement, training_batches
from leanbayes.training.early_stopping import split_rows

from .problems import short

CPU = torch.device("cpu")
X, Y = torch.arange(45.0)[:, None], torch.arange(45)


def placed(rank=0, world=1, **fields):
    return Placement(CPU, rank, world, short(**fields))


def kinds(placement):
    return {
        "tensors": batches_of((X, Y), placement),
        "dataset": batches_of(TensorDataset(X, Y), placement),
        "loader": batches_of(DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True), placement),
    }


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(kind):
    batches = kinds(placed())[kind]
    assert (batches.rows, batches.steps) == (45, 3)
    orders = []
    for epoch in (0, 1):
        parts = list(batches.epoch(epoch))
        assert [len(y) for _, y in parts] == [16, 16, 13]
        assert all(torch.equal(x[:, 0], y.float()) for x, y in parts)
        orders.append(torch.cat([y for _, y in parts]))
        assert torch.equal(orders[-1].sort().values, Y)
    assert not torch.equal(*orders)


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_processes_share_the_rows_of_every_batch(kind):
    torch.manual_seed(5)
    whole = [y for _, y in kinds(placed())[kind].epoch(2)]
    parts = []
    for rank in range(3):
        torch.manual_seed(5)  # a loader without a generator takes its order from torch's
        parts.append([y for _, y in kinds(placed(rank, 3, batch_size=15 if kind != "loader" else 16))[kind].epoch(2)])
    sizes = {len(part) for part in zip(*parts, strict=True)}
    assert sizes == {3}
    for ours in zip(*parts, strict=True):
        assert len({len(part) for part in ours}) == 1  # as many rows each
    dealt = torch.stack([torch.cat(part) for part in parts], 1).flatten()
    assert len(set(dealt.tolist())) == len(dealt)
    if kind != "loader":
        assert torch.equal(dealt, torch.cat(whole))


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_outside_of_training_all_processes_together_have_each_row_once(kind):
    seen = []
    for rank in range(2):
        torch.manual_seed(5)
        seen += [y for _, y in kinds(placed(rank, 2))[kind].in_order()]
    assert torch.equal(torch.cat(seen).sort().values, Y)


def test_tensors_and_datasets_give_equal_batches():
    here = kinds(placed())
    for (x, y), (other_x, other_y) in zip(here["tensors"].epoch(3), here["dataset"].epoch(3), strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_are_gathered_together_are_the_same(monkeypatch, world):
    apart = list(batches_of((X, Y), placed(1, 2) if world == 2 else placed()).epoch(1))
    monkeypatch.setitem(module.BYTES_AT_ONCE, "cpu", 16 * 12 * 2)  # two batches of 16 rows of 12 bytes
    batches = batches_of((X, Y), placed(1, 2) if world == 2 else placed())
    assert batches.at_once == 2
    for (x, y), (other_x, other_y) in zip(apart, batches.epoch(1), strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_a_last_batch_of_one_row_is_left_out():
    x = torch.randn(33, 2)
    assert [len(y) for _, y in batches_of((x, x[:, 0]), placed()).epoch(0)] == [16, 16]
    assert [len(y) for _, y in batches_of((x[:4], x[:4, 0]), placed()).epoch(0)] == [4]
    with pytest.raises(ValueError, match="expected at least 2 rows to train on, 2 for each process, got 1"):
        training_batches((x[:1], x[:1, 0]), placed())
    assert [len(y) for _, y in batches_of((x[:1], x[:1, 0]), placed()).in_order()] == [1]


def test_a_loader_with_a_generator_repeats_its_epochs():
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, generator=torch.Generator())
    batches = batches_of(loader, placed())
    first, other, again = (torch.cat([y for _, y in batches.epoch(epoch)]) for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_number_of_rows_is_that_of_the_subset_not_of_repeats():
    data = TensorDataset(X, Y)
    assert batches_of(DataLoader(data, sampler=SubsetRandomSampler(range(10))), placed()).rows == 10
    often = RandomSampler(data, replacement=True, num_samples=200)
    assert batches_of(DataLoader(data, sampler=often), placed()).rows == 45
    share = DistributedSampler(data, num_replicas=2, rank=0)
    assert batches_of(DataLoader(data, sampler=share), placed()).rows == 45  # those of all processes
    of_some = DistributedSampler(range(10), num_replicas=2, rank=0)  # as Lightning wraps a sampler
    assert batches_of(DataLoader(data, sampler=of_some), placed()).rows == 10


def test_a_loader_of_one_process_is_refused_where_fit_deals_the_rows():
    data = TensorDataset(X, Y)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    with pytest.raises(
        ValueError, match=r"expected a DataLoader of all rows, .* got a DistributedSampler; leave it out"
    ):
        batches_of(loader, placed(rank=1, world=2))


def test_augmentation_repeats_itself_differs_between_processes_and_leaves_noise_alone():
    x = torch.randn(32, 1, 8, 8)
    before = torch.get_rng_state()
    batches = batches_of((x, torch.arange(32)), placed(augment="crop_flip"))
    first, again = (torch.cat([x for x, _ in batches.epoch(0)]) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)
    (a, rows_a), (b, rows_b) = (
        next(batches_of((x[:1].expand(32, -1, -1, -1), torch.arange(32)), placed(rank, 2, augment="crop")).epoch(0))
        for rank in (0, 1)
    )
    assert not torch.equal(rows_a, rows_b)
    assert not torch.equal(a, b)
    plain = torch.cat([x for x, _ in batches.in_order()])
    assert torch.equal(plain, x)


def test_nested_inputs_and_memory_order():
    inputs = {"image": torch.randn(20, 3, 4, 4), "scale": 2.0}
    x, y = next(batches_of((inputs, torch.arange(20)), placed()).epoch(0))
    assert torch.equal(x["image"], inputs["image"][y])
    assert x["scale"] == 2.0
    x, _ = next(batches_of((inputs["image"], torch.arange(20)), placed(channels_last=True)).epoch(0))
    assert x.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(TypeError, match=r"augment='flip' needs images as one tensor \(B, C, H, W\), got dict"):
        next(batches_of((inputs, torch.arange(20)), placed(augment="flip")).epoch(0))


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Single(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return X[index]


def test_what_cannot_be_trained_on_is_refused():
    with pytest.raises(ValueError, match="expected as many inputs as targets, got 45 and 44"):
        batches_of((X, Y[:44]), placed())
    with pytest.raises(
        TypeError, match=r"expected data as a pair \(inputs, targets\), a Dataset or a DataLoader, got str"
    ):
        batches_of("cifar", placed())
    for pair in ((X.numpy(), Y.numpy()), (X.numpy(), Y), (X, Y.numpy())):
        with pytest.raises(
            TypeError, match=r"expected a pair \(inputs, targets\) of tensors, got .*ndarray.*as_tensor"
        ):
            batches_of(pair, placed())
    with pytest.raises(TypeError, match="expected data whose number of rows is known"):
        batches_of(DataLoader(Endless()), placed())
    with pytest.raises(TypeError, match=r"expected batches \(inputs, target\) with a tensor of targets, got Tensor"):
        next(batches_of(Single(), placed()).epoch(0))


def test_a_dataset_that_draws_is_told_the_epoch():
    class Drawn(Dataset):
        epoch = -1

        def set_epoch(self, number: int) -> None:
            self.epoch = number

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int):
            return torch.full((1,), float(self.epoch)), torch.tensor(index)

    batches = training_batches(Drawn(), placed(batch_size=2))
    for epoch in (0, 3):
        assert all((x == epoch).all() for x, _ in batches.epoch(epoch))


class Counted(Endless):
    """A stream whose number of rows is known."""

    def __len__(self) -> int:
        return 45


def test_data_of_other_shapes_have_their_remedy():
    for data, kind, message in (
        ((X, torch.tensor(3)), ValueError, r"expected a target for each row, got a tensor of shape \(\)"),
        (
            Counted(),
            TypeError,
            r"got Counted, which is read in its own order; pass DataLoader\(data, batch_size=\.\.\.\)",
        ),
        (Endless(), TypeError, r"got Endless, which is read in its own order; pass DataLoader"),
        (
            DataLoader(TensorDataset(X, Y), batch_size=64, drop_last=True),
            ValueError,
            "expected a DataLoader with batches, got none of its 45 rows; leave drop_last out, or take smaller batches",
        ),
    ):
        with pytest.raises(kind, match=message):
            training_batches(data, placed())
    with pytest.raises(
        TypeError, match=r"expected batches \(inputs, target\) with a row on the first axis.*batch_size"
    ):
        next(batches_of(DataLoader(TensorDataset(X, Y), batch_size=None), placed()).epoch(0))
    with pytest.raises(ValueError, match="expected a target for each row"):
        split_rows((X, torch.tensor(3)), 0.2, seed=0)
    with pytest.raises(TypeError, match="divides tensors or a Dataset, got Endless; give validation data"):
        split_rows(Endless(), 0.2, seed=0)
    assert split_rows((X, Y, Y), 0.2, seed=0)[0] == (X, Y, Y)  # `batches_of` explains it
