"""Files of a run folder are data: hostile names in any field of any of them are never imported nor called."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import struct
import sys
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.cli.main import main
from leanbayes.compare.experiment import maker
from leanbayes.compare.load_run import load_run
from tests.fixtures.comparison import FLAGS

NAMES = ("evil:make", "os:abort", "os.path:join")
FAST = [*FLAGS, "--methods", "rank1", "--seeds", "0"]
RUN = "digits/small/rank1/seed0"
EVIL = """
from pathlib import Path
from torch import nn
Path(__file__).with_name("PWNED").touch()
def make(num_outputs=10, **_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs))
"""


@pytest.fixture(scope="module")
def single(trained, tmp_path_factory):
    """Return a copy of one run, with predictions."""
    out = tmp_path_factory.mktemp("single")
    shutil.copytree(trained / RUN, out / RUN)
    assert predict(out / RUN, out / "predictions") == 0
    return out


@pytest.fixture
def guarded(single, tmp_path, monkeypatch):
    """Return a copy of the comparison, in a folder with evil.py; afterwards, nothing may have been imported."""
    out = tmp_path / "out"
    shutil.copytree(single, out)
    (tmp_path / "evil.py").write_text(EVIL)
    asked = []
    imports = importlib.import_module

    def import_module(name, package=None):
        asked.append(name)
        return imports(name, package)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(os, "abort", lambda: asked.append("os.abort()"))
    yield out
    assert not (tmp_path / "PWNED").exists()
    assert "evil" not in sys.modules
    assert not {name.partition(".")[0] for name in asked} & {"evil", "os"}


def predict(run, out, *flags):
    return main(["predict", str(run), "--device", "cpu", "--samples", "2", "--out", str(out), *flags])


def text_fields(record, above=()):
    """Yield the path of every text in a record, also of those that are null; of equal siblings in a list the first."""
    if isinstance(record, dict):
        for name, value in record.items():
            yield from text_fields(value, (*above, name))
    elif isinstance(record, list):
        yield from text_fields(record[0], (*above, 0)) if record else ()
    elif record is None or isinstance(record, str):
        yield above


def planted(record, path, name):
    """Return a copy of a record with a name in one field."""
    if not path:
        return name
    copy = list(record) if isinstance(record, list) else dict(record)
    copy[path[0]] = planted(record[path[0]], path[1:], name)
    return copy


def each_planted(record):
    """Yield records, each with a hostile name in one of its fields; then some with one in all of them."""
    fields = list(text_fields(record))
    assert fields
    for path, name in zip(fields, cycle(NAMES)):  # names come again and again
        yield planted(record, path, name)
    for name in NAMES:
        everywhere = record
        for path in fields:
            everywhere = planted(everywhere, path, name)
        yield everywhere


def read_header(path):
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:end]), raw[end:]


def write_header(path, header, tensors):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)


def headers_planted(path):
    """Yield the file's header with hostile names inside the JSON texts that its metadata hold."""
    header, tensors = read_header(path)
    metadata = header["__metadata__"]
    for key, text in metadata.items():
        for record in each_planted(json.loads(text)):
            write_header(path, header | {"__metadata__": metadata | {key: json.dumps(record)}}, tensors)
            yield
    for record in each_planted(metadata):
        write_header(path, header | {"__metadata__": record}, tensors)
        yield


def open_or_refuse(run, *errors):
    """Open a run as predict does; a sentence is as good."""
    with contextlib.suppress(ValueError, OSError, *errors):
        load_run(run)


def test_job_json(guarded, capsys):
    path = guarded / RUN / "job.json"
    record, (result, aside) = json.loads(path.read_text()), (guarded / RUN / "result.json", guarded / "aside")
    for hostile in each_planted(record):
        path.write_text(json.dumps(hostile))
        open_or_refuse(guarded / RUN)
    for name in NAMES:
        path.write_text(json.dumps(record | {"net": name}))
        assert predict(guarded / RUN, guarded / "predictions") == 2
        assert f"add --net {name} if you trust" in capsys.readouterr().err
        assert main(["evaluate", "--out", str(guarded), *FAST]) == 2
        assert f"net: '{name}' there, 'small' now" in capsys.readouterr().err
        result.rename(aside)  # a run that is resumed
        assert main(["compare", "--out", str(guarded), *FAST]) == 2
        assert f"net: '{name}' there, 'small' now" in capsys.readouterr().err
        aside.rename(result)


def test_result_json(guarded, capsys):
    path = guarded / RUN / "result.json"
    record = json.loads(path.read_text())
    for number, hostile in enumerate(each_planted(record)):
        path.write_text(json.dumps(hostile))
        if hostile["data"] != record["data"]:  # all that predict reads of it
            open_or_refuse(guarded / RUN)
        (guarded / "all" / str(number)).mkdir(parents=True)
        shutil.copy(path, guarded / "all" / str(number))
    assert main(["report", str(guarded / "all")]) == 0
    assert main(["evaluate", "--out", str(guarded), *FAST]) in (0, 1, 2)
    assert main(["evaluate", "--fresh", "--out", str(guarded), *FAST]) == 0


def test_the_model(guarded):
    for _ in headers_planted(guarded / RUN / "model.safetensors"):
        open_or_refuse(guarded / RUN, TypeError, AttributeError)


def test_the_training_state_of_a_run(guarded, capsys):
    (guarded / RUN / "result.json").unlink()
    (*_,) = headers_planted(guarded / RUN / "checkpoint" / "last.safetensors")
    assert main(["train", "--out", str(guarded), *FAST]) == 1
    assert "last.safetensors' is damaged" in capsys.readouterr().err


def test_any_training_state(guarded):
    """A small network, for each of them is resumed."""
    bnn, data = lb.convert(nn.Linear(4, 2), lb.Rank1()), (torch.randn(8, 4), torch.arange(8) % 2)
    how = {"recipe": lb.Recipe(epochs=1, batch_size=8, accelerator="cpu"), "folder": guarded, "progress": False}
    lb.fit(bnn, data, **how)
    for _ in headers_planted(guarded / "checkpoint" / "last.safetensors"):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            lb.fit(bnn, data, resume=True, **how)


def test_predictions(guarded):
    path = guarded / "predictions" / "scores.json"
    for hostile in each_planted(json.loads(path.read_text())):
        path.write_text(json.dumps(hostile))
        assert predict(guarded / RUN, guarded / "predictions") in (0, 2)
    part = guarded / "predictions" / "part-00000.npz"
    with np.load(part) as arrays:
        np.savez(part, **{name: np.array([NAMES[0]], dtype=object) for name in arrays})
    assert predict(guarded / RUN, guarded / "predictions") == 2


@pytest.mark.parametrize("damage", [
    [], "evil:make", {"net": ["evil:make"]}, {"net": "evil:make; ls"}, {"data": "evil:make"}, {"method": "evil:make"},
    {"data": {"evil:make": 1}}, {"data": {"name": 5}},
])  # fmt: skip
def test_a_job_of_other_types_is_a_sentence(guarded, damage, capsys):
    path = guarded / RUN / "job.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | damage if isinstance(damage, dict) else damage))
    assert predict(guarded / RUN, guarded / "predictions") == 2
    assert main(["evaluate", "--out", str(guarded), *FAST]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("leanbayes:")]
    assert len(said) == 2
    assert "job.json' is damaged" in said[0] or "neither known nor package.module:function" in said[0]
    assert "job.json' is damaged" in said[1] or "holds a run with other settings" in said[1]


def test_an_own_network_needs_a_word_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_for_hostile.py").write_text(EVIL)
    flags = ["--out", "out", "--net", "own_for_hostile:make", *FAST]
    assert main(["compare", *flags]) == 0
    run = "out/digits/own_for_hostile-make/rank1/seed0"
    (tmp_path / "PWNED").unlink()
    monkeypatch.delitem(sys.modules, "own_for_hostile")
    assert predict(run, "p") == 2
    assert "'out/digits/own_for_hostile-make/rank1/seed0' was trained on the network own_for_hostile:make" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "PWNED").exists()
    assert predict(run, "p", "--net", "own_for_hostile:other") == 2
    assert "expected --net 'own_for_hostile:make', which the run was trained on, got 'own_for_hostile:other'" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "PWNED").exists()
    assert predict(run, "p", "--net", "own_for_hostile:make") == 0
    assert (tmp_path / "PWNED").exists()


@pytest.mark.slow  # two processes import everything from the beginning
def test_workers_get_an_own_network_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_for_workers.py").write_text(EVIL)
    net = ["--net", "own_for_workers:make"]
    assert main(["compare", "--out", "out", *net, *FAST, "--seeds", "0,1", "--workers", "2", "--backend", "local"]) == 0
    run = "out/digits/own_for_workers-make/rank1/seed0"
    assert predict(run, "p", "--workers", "2", "--part-rows", "400", "--backend", "local") == 2
    assert predict(run, "p", *net, "--workers", "2", "--part-rows", "400", "--backend", "local") == 0


def test_the_current_folder_is_importable_for_own_networks_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    maker("small", num_outputs=2, input_shape=(1, 8, 8))()
    assert str(tmp_path) not in sys.path
