"""Stopped and resumed equals unbroken, bit for bit; a state that does not fit is refused in a sentence."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager, ExitStack, nullcontext

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.training import TrainingError
from leanbayes.training.data import same_values, values_of
from leanbayes.training.fit import fit
from leanbayes.training.progress import COSTS

from .problems import images, network, rank1, same, short

HARD = {"epochs": 6, "convert_at_epoch": 2, "tile_last_epochs": 2, "augment": "crop_flip", "anneal_epochs": 3}


class Stop(Exception):
    """Raised by a callback, as an interruption would be."""


def stop_after(epoch):
    def stop(state):
        if state.epoch == epoch:
            raise Stop

    return stop


def file_of(folder):
    return folder / "checkpoint" / "last.safetensors"


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "lr": 0.01}, {"restart_at_conversion": 0.5}])
def test_a_resumed_training_equals_an_unbroken_one(tmp_path, optimizer):
    """One training keeps its states; each of them is resumed. Another one is really stopped."""
    recipe, unbroken, states = short(**HARD | optimizer), rank1(), {}

    def keep(state):
        state.save()
        states[state.epoch] = file_of(tmp_path / "unbroken").read_bytes()

    whole = fit(unbroken, images(90), recipe, folder=tmp_path / "unbroken", callbacks=[keep])
    with pytest.raises(Stop):
        fit(rank1(), images(90), recipe, folder=tmp_path / "stopped", callbacks=[stop_after(3)])
    folders = {epoch: put(states[epoch], tmp_path / f"{epoch}") for epoch in (1, 2, 4, 5)}
    for epoch, folder in (folders | {3: tmp_path / "stopped"}).items():
        fresh = rank1()
        torch.randn(99)
        history = fit(fresh, images(90), recipe, folder=folder, resume=True)
        assert same(fresh, unbroken), epoch
        assert without_costs(history) == without_costs(whole)


def without_costs(history):
    return [{name: value for name, value in row.items() if name not in COSTS} for row in history]


def test_a_loader_in_an_order_of_its_own_is_resumed_too(tmp_path):
    def loader(generator):
        return DataLoader(TensorDataset(*images()), 16, shuffle=True, generator=generator)

    for generator in (None, torch.Generator()):
        unbroken, fresh = rank1(), rank1()
        fit(unbroken, loader(generator), short())
        with pytest.raises(Stop):
            fit(rank1(), loader(generator), short(), folder=tmp_path, callbacks=[stop_after(2)])
        fit(fresh, loader(torch.Generator() if generator else None), short(), folder=tmp_path, resume=True)
        assert same(fresh, unbroken)


def test_a_finished_training_ends_at_once_with_its_weights(tmp_path):
    done, fresh = rank1(), rank1()
    history = fit(done, images(), short(), folder=tmp_path)
    written = file_of(tmp_path).stat().st_mtime_ns
    assert fit(fresh, images(), short(), folder=tmp_path, resume=True, callbacks=[stop_after(3)]) == history
    assert same(fresh, done)
    assert file_of(tmp_path).stat().st_mtime_ns == written


def test_resuming_without_a_state_begins_and_beginning_removes_the_old_one(tmp_path):
    first = rank1()
    fit(first, images(), short(), folder=tmp_path, resume=True)
    seen = []
    fit(rank1(), images(), short(lr=0.01), folder=tmp_path, callbacks=[lambda state: seen.append(state.epoch)])
    assert seen == [1, 2, 3]
    with pytest.raises(Stop):
        fit(rank1(), images(), short(seed=9), folder=tmp_path, callbacks=[stop_after(1)])
    assert len(json.loads(header(tmp_path))["history"]) == 1


def header(folder):
    with safe_open(file_of(folder), framework="pt") as file:
        return file.metadata()["leanbayes.training"]


def test_the_file_is_readable_by_people_and_holds_no_objects(tmp_path):
    fit(rank1(), images(), short(), folder=tmp_path)
    head = json.loads(header(tmp_path))
    assert head["format"] == 1
    assert head["epoch"] == 3
    assert head["recipe"]["lr"] == 0.05
    assert head["layers"]["0"].startswith("Rank1(components=2")
    tensors = load_file(file_of(tmp_path))
    assert tensors["random/cpu"].dtype == torch.uint8
    assert "optimizer/momentum_buffer/network.0.base.weight" in tensors
    assert "model/network.0.posterior.bias" in tensors
    assert not (file_of(tmp_path).stat().st_mode & 0o777) & ~0o666


def test_tied_weights_are_resumed(tmp_path):
    def tied():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
        net[3].weight = net[1].weight
        return net

    unbroken, fresh = tied(), tied()
    fit(unbroken, images(), short())
    with pytest.raises(Stop):
        fit(tied(), images(), short(), folder=tmp_path, callbacks=[stop_after(1)])
    fit(fresh, images(), short(), folder=tmp_path, resume=True)
    assert same(fresh, unbroken)


def test_another_recipe_training_set_conversion_or_network_is_refused(tmp_path):
    fit(rank1(), images(), short(), folder=tmp_path)

    def resume(model, data=None, **fields):
        return fit(model, data or images(), short(**fields), folder=tmp_path, resume=True)

    with pytest.raises(
        ValueError,
        match=r"belongs to another recipe: lr was 0\.05 and is 0\.1; pass the same recipe; "
        "to begin again: resume=False, on the command line --fresh",
    ):
        resume(rank1(), lr=0.1)
    with pytest.raises(ValueError, match="belongs to another training set: rows was 96 and is 64"):
        resume(rank1(), images(64))
    with pytest.raises(ValueError, match=r"another conversion: 0 was Rank1\(.*prior_std=0.1.* and is .*=0.2"):
        resume(lb.convert(network(), lb.Rank1(components=2, prior_std=0.2)))
    wide = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    fit(wide, images(), short(), folder=tmp_path)
    with pytest.raises(ValueError, match=r"belongs to another network: '1.bias' is \(3,\) of .* there and \(5,\) of"):
        resume(nn.Sequential(nn.Flatten(), nn.Linear(16, 5)))


def test_a_training_goes_on_under_another_name_of_the_device(tmp_path):
    unbroken, broken, fresh = rank1(), rank1(), rank1()
    fit(unbroken, images(90), short(epochs=3, accelerator="cpu"))
    with pytest.raises(Stop):
        fit(broken, images(90), short(epochs=3, accelerator="cpu"), folder=tmp_path, callbacks=[stop_after(1)])
    fit(fresh, images(90), short(epochs=3, accelerator="auto"), folder=tmp_path, resume=True)
    assert same(fresh, unbroken) or torch.cuda.is_available()


def test_a_damaged_state_is_refused_and_left_alone(tmp_path):
    fit(rank1(), images(), short(), folder=tmp_path)
    content = file_of(tmp_path).read_bytes()
    tensors = load_file(file_of(tmp_path))
    other = tmp_path / "other.safetensors"
    save_file(tensors, other, {"leanbayes.training": '{"format": 1}'})
    for broken in (content[: len(content) // 2], b"", b"no state at all", other.read_bytes()):
        file_of(tmp_path).write_bytes(broken)
        with pytest.raises(
            ValueError,
            match=r"the checkpoint '.*last\.safetensors' is damaged; remove this file, or, "
            "to begin again: resume=False, on the command line --fresh",
        ):
            fit(rank1(), images(), short(), folder=tmp_path, resume=True)
        assert file_of(tmp_path).read_bytes() == broken
    save_file(tensors, file_of(tmp_path), {"leanbayes.training": header_with(content, tmp_path, format=9)})
    with pytest.raises(ValueError, match="has format 9, this leanbayes reads up to 1: update it"):
        fit(rank1(), images(), short(), folder=tmp_path, resume=True)


def header_with(content, folder, **changes):
    file_of(folder).write_bytes(content)
    return json.dumps(json.loads(header(folder)) | changes)


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    fit(rank1(), images(), short(), folder=tmp_path)
    leftover = file_of(tmp_path).with_name(".last.safetensors.1a2b3c4d.tmp")
    leftover.write_bytes(b"half a state")
    fit(rank1(), images(), short(), folder=tmp_path, resume=True)
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == ["last.safetensors"]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        TrainingError, match=r"checkpoints cannot be written to '.*file/run/checkpoint' \(Not a directory\)"
    ):
        fit(rank1(), images(), short(), folder=tmp_path / "file" / "run", callbacks=[stop_after(1)])


@contextmanager
def small_files():
    """Let files be no larger than 64 KiB: longer writes fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_breaks_off_loses_nothing(tmp_path):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 1000), nn.ReLU(), nn.Linear(1000, 3))

    unbroken, fresh = net(), net()
    fit(unbroken, images(), short())
    sentence = r"the checkpoint of epoch 2 could not be written to '.*' \(.*File too large.*\); that of epoch 1 is kept"
    stack = ExitStack()
    with stack, pytest.raises(TrainingError, match=sentence):
        fit(
            net(),
            images(),
            short(),
            folder=tmp_path,
            callbacks=[lambda state: (state.save(), stack.enter_context(small_files()))],
        )
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == ["last.safetensors"]
    history = fit(fresh, images(), short(), folder=tmp_path, resume=True)
    assert len(history) == 3
    assert same(fresh, unbroken)


def test_a_full_disk_says_so_and_that_there_is_nothing_yet(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        TrainingError,
        match=r"epoch 1 could not be written to .* \(No space left on device\); there is none before it: make",
    ):
        fit(rank1(), images(), short(), folder=tmp_path)
    assert list(file_of(tmp_path).parent.iterdir()) == []


def edited(folder, change=None, drop=(), replaced=None):
    """Change the header, or leave tensors out, or replace some; there are no checksums afterwards."""
    with safe_open(file_of(folder), framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor for name, tensor in load_file(file_of(folder)).items() if not name.startswith(tuple(drop))}
    head = json.loads(metadata["leanbayes.training"])
    if callable(change):
        change(head)
    text = change if isinstance(change, str) else json.dumps(head)
    save_file(tensors | (replaced or {}), file_of(folder), {"leanbayes.training": text})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stop):
        fit(rank1(), images(), short(), folder=folder, callbacks=[stop_after(2)])
    return file_of(folder).read_bytes()


def put(content, folder):
    file_of(folder).parent.mkdir(parents=True)
    file_of(folder).write_bytes(content)
    return folder


def refused(folder, message):
    """Resume from a damaged state: one sentence with the file and the field, and an untouched model."""
    model, before = rank1(), rank1()
    with pytest.raises(ValueError, match=rf"checkpoint '.*last\.safetensors' .*{message}"):
        fit(model, images(), short(), folder=folder, resume=True)
    assert same(model, before)


def rows(head, *epochs):
    head["history"] = [head["history"][epoch - 1] for epoch in epochs]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(history=5), "expected history to be list.*, got 5"),
        (lambda h: h.update(history=[5]), "expected history to be list"),
        (lambda h: h.update(history=[]), "expected history to have the epochs 1 to 2, once each, got none"),
        (lambda h: rows(h, 1), "expected history to have the epochs 1 to 2, once each, got 1"),
        (lambda h: rows(h, 1, 1), "expected history to have the epochs 1 to 2, once each, got 1, 1"),
        (lambda h: rows(h, 1, 2, 1, 2), "got 1, 2, 1, 2"),
        (lambda h: h["history"][1].pop("seconds"), "the field history.1.seconds is missing"),
        (lambda h: h["history"][0].update(seconds="long"), "expected history.0.seconds to be float, got 'long'"),
        (lambda h: h.update(epoch=0, history=[]), "expected epoch to be from 1 to 3, got 0"),
        (lambda h: h.update(epoch=10**9), "expected epoch to be from 1 to 3, got 1000000000"),
        (lambda h: h.update(epoch="2"), "expected epoch to be int, got '2'"),
        (lambda h: h.update(format="1"), "expected format to be int, got '1'"),
        (lambda h: h.update(format=None), "expected format to be int, got None"),
        (lambda h: h.update(recipe=None), "expected recipe to be dict.*, got None"),
        (lambda h: h.update(recipe=[1]), "expected recipe to be dict"),
        (lambda h: h.update(layers=5), "expected layers to be dict"),
        (lambda h: h.update(layers={"0": 5}), "expected layers to be dict"),
        (lambda h: h.update(tied=[["a", "b"]]), "expected tied to be dict"),
        (lambda h: h.update(rows="96"), "expected rows to be int, got '96'"),
        (lambda h: h.update(tensors=5), "expected tensors to be dict"),
        (lambda h: h.pop("layers"), "the field layers is missing"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected the header to be an object"),
        ("", "is damaged"),
    ],
)
def test_a_wrong_header_of_a_state_is_refused(stopped, tmp_path, change, message):
    edited(put(stopped, tmp_path), change)
    refused(tmp_path, message)


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "of an earlier version"])
@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("random/", "random"),
        ("optimizer/", "optimi"),
        ("model/network.4.base.weight", "(tensors|network)"),
    ],
)
def test_missing_tensors_are_refused(stopped, tmp_path, drop, message, counted):
    edited(put(stopped, tmp_path), None if counted else lambda head: head.pop("tensors"), drop=[drop])
    refused(tmp_path, message)


def test_one_missing_tensor_of_the_optimiser_is_refused(stopped, tmp_path):
    edited(put(stopped, tmp_path), drop=["optimizer/momentum_buffer/network.4.base.bias"])
    refused(tmp_path, "expected the tensors .*'optimizer': .*, as stated, got")


def test_an_incomplete_state_of_adam_is_refused(tmp_path):
    recipe = short(optimizer="adam", lr=0.01)
    with pytest.raises(Stop):
        fit(rank1(), images(), recipe, folder=tmp_path, callbacks=[stop_after(1)])
    missing = "optimizer/exp_avg_sq/network.4.base.weight"
    edited(tmp_path, lambda head: head.pop("tensors"), drop=[missing])
    with pytest.raises(ValueError, match=f"the tensor of {missing} is missing"):
        fit(rank1(), images(), recipe, folder=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("random/cpu", torch.zeros(7, dtype=torch.uint8), "expected random/cpu to be a state of torch's generator"),
        ("random/cpu", torch.zeros(5056), "expected random/cpu to be a state of torch's generator"),
        ("optimizer/momentum_buffer/network.4.base.bias", torch.zeros(7), r"floats of shape \(3,\), got .*\(7,\)"),
        ("optimizer/momentum_buffer/network.4.base.bias", torch.zeros(3).long(), "floats of shape"),
        ("model/network.4.base.bias", torch.zeros(3).half(), "of torch.float16 there and .* of torch.float32 here"),
    ],
)
def test_tensors_of_a_wrong_kind_are_refused(stopped, tmp_path, name, value, message):
    edited(put(stopped, tmp_path), replaced={name: value})
    refused(tmp_path, message)


def test_a_tensor_of_an_unknown_parameter_is_refused(stopped, tmp_path):
    name = "optimizer/momentum_buffer/network.9.weight"
    edited(put(stopped, tmp_path), lambda head: head.pop("tensors"), replaced={name: torch.zeros(3)})
    refused(tmp_path, f"the parameter of {name} is missing")


def test_a_flipped_bit_of_a_state_is_refused(stopped, tmp_path):
    broken = bytearray(stopped)
    broken[-100] ^= 4
    put(bytes(broken), tmp_path)
    refused(tmp_path, "the checksum differs")


def test_a_state_of_an_earlier_version_is_resumed(stopped, tmp_path):
    unbroken, fresh = rank1(), rank1()
    fit(unbroken, images(), short())
    edited(put(stopped, tmp_path), lambda head: head.pop("tensors"))
    fit(fresh, images(), short(), folder=tmp_path, resume=True)
    assert same(fresh, unbroken)


def test_another_likelihood_is_refused(tmp_path):
    def resume(likelihood=None):
        return fit(rank1(), images(), short(), folder=tmp_path, resume=True, likelihood=likelihood)

    def mean_loss(outputs, y):
        return nn.functional.cross_entropy(outputs, y)

    resume()
    resume(lb.Categorical())
    with pytest.raises(
        ValueError,
        match=r"belongs to another likelihood: the loss was Categorical\(axis=1, .*label_smoothing=0\) and is "
        r"Categorical\(axis=1, ignore_index=-100, class_weight=1, 2, 0.3333, label_smoothing=0.1\); pass the same",
    ):
        resume(lb.Categorical(class_weight=[1, 2, 1 / 3], label_smoothing=0.1))
    with pytest.raises(ValueError, match=r"is CrossEntropyLoss; pass the same likelihood; to begin again"):
        resume(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"is test_another_likelihood_is_refused.*mean_loss; pass the same"):
        resume(mean_loss)
    edited(tmp_path, lambda head: head.pop("likelihood"))  # as of an earlier version
    resume(nn.CrossEntropyLoss())


def test_members_with_a_noise_of_their_own_resume(tmp_path):
    x = torch.randn(40, 2)
    for epochs in (1, 2):
        ensemble = lb.convert(nn.Linear(2, 1), lb.DeepEnsemble(components=2), likelihood=lb.Gaussian(learn=True))
        with pytest.raises(Stop) if epochs == 1 else nullcontext():
            heard = [stop_after(1)] if epochs == 1 else []
            fit(ensemble, (x, x[:, :1]), short(epochs=2), folder=tmp_path, resume=True, callbacks=heard)
    fit(ensemble, (x, x[:, :1]), short(epochs=2), folder=tmp_path, resume=True)
    assert ensemble.likelihood.log_std.shape == (2,)


def test_training_data_that_have_changed_are_refused(tmp_path):
    x, y = images()

    def resume(data):
        fit(rank1(), data, short(epochs=1), folder=tmp_path, resume=True)

    resume((x, y))
    resume((x * (1 + 1e-7), y))  # as another number of threads rounds
    last = y.clone()
    last[-1] = (last[-1] + 1) % 3
    order = torch.arange(len(x)).roll(1)
    for data in ((x * 2, y), (x[order], y[order]), (x, last)):
        with pytest.raises(
            ValueError,
            match="belongs to another training set: rows are as many, but have other values; pass the same training "
            "set; to begin again: resume=False",
        ):
            resume(data)
    edited(tmp_path, lambda head: head.pop("values"))  # as of an earlier version
    resume((x * 2, y))
    fit(rank1(), TensorDataset(x, y), short(epochs=1), folder=tmp_path / "other")
    fit(rank1(), TensorDataset(x * 2, y), short(epochs=1), folder=tmp_path / "other", resume=True)  # is not read


def test_data_of_any_kind_have_values_to_compare():
    x, y = torch.randn(8, 3), torch.arange(8)
    broken, much = x.clone(), x.double() * 1e300
    broken[0, 0], broken[1, 1] = torch.nan, torch.inf
    for inputs in (x, x > 0, x.half(), broken, much, x.to_sparse(), {"a": x, "b": (y, torch.tensor(3.0))}, x[:, :0]):
        values = values_of(inputs, y)
        json.dumps(values, allow_nan=False)
        assert same_values(values, values_of(inputs, y))
        assert not same_values(values, values_of(inputs, y + 1))
        assert not same_values(values, values_of(inputs, y)[1:])
