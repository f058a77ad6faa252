"""A path with a scheme is refused wherever a path is taken, as it was spelt, and leaves no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.cli.main import main
from leanbayes.compare.batch_predict import read_scores, score
from leanbayes.compare.load_run import load_run
from leanbayes.compare.run_all import run_all
from leanbayes.data.annotated.published import prepare_bsds500
from leanbayes.data.cache import data_root
from leanbayes.integrations.onnx import export
from leanbayes.report import build, load_results
from leanbayes.runtime._files import local, write_text

S3 = "s3://bucket/run"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def test_local_paths_stay_what_they_are():
    for path in ("runs/a", "./s3://x", "/a:/b", "C:/data", "C:\\data", "~/x", "a:b", "", ".", Path("runs/a")):
        assert local(path) == Path(path)


@pytest.mark.parametrize("path", [S3, "gs://b", "hf://datasets/x", "file:///tmp/x", "S3://b", "abfs+x://b", Path(S3)])
def test_a_scheme_is_refused_as_it_was_spelt(path):
    with pytest.raises(ValueError, match="expected a path on this machine, got") as refused:
        local(path)
    assert f"got '{path}';" in str(refused.value)


@pytest.mark.parametrize("arguments", [
    ["compare", "--out", S3],
    ["compare", f"--out={S3}"],
    ["compare", "--data", S3],
    ["compare", "--data", "s3://bucket/run.npz"],
    ["compare", "--root", S3],
    ["compare", "--ood", S3],
    ["train", "--out", S3],
    ["evaluate", "--out", S3],
    ["predict", S3],
    ["predict", "run", "--out", S3],
    ["predict", "run", "--data", S3],
    ["report", S3],
    ["report", "folder", "--out", S3],
    ["bench", "--out", S3],
    ["reproduce", "x-cubed", "--out", S3],
    ["data", "list", "--root", S3],
    ["data", "prepare", "mnist", "--root", S3],
    ["data", "prepare", "mnist", "--source", S3],
])  # fmt: skip
def test_the_command_line_refuses_a_scheme_at_once(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("leanbayes: expected a path on this machine, got 's3://bucket/run")
    assert said.err.count("\n") == 1
    assert said.out == ""


def calls():
    bnn, x, y = lb.convert(nn.Linear(4, 2), lb.Rank1()), torch.zeros(8, 4), torch.arange(8) % 2
    digits = lb.data.load("digits")
    yield "save", lambda: lb.save(bnn, S3)
    yield "load", lambda: lb.load(S3, nn.Linear(4, 2))
    yield "fit", lambda: lb.fit(bnn, (x, y), folder=S3)
    yield "data.load", lambda: lb.data.load(S3)
    yield "data.load a file", lambda: lb.data.load(Path("s3://bucket/run.npz"))
    yield "data.load root", lambda: lb.data.load("mnist", S3)
    yield "data.load_annotated", lambda: lb.data.load_annotated("bsds500", S3)
    yield "data.load_lidc", lambda: lb.data.load_lidc(S3)
    yield "data.foreign", lambda: lb.data.ood(S3, digits)
    yield "data.describe", lambda: lb.data.describe(S3)
    yield "data.prepare", lambda: lb.data.prepare("mnist", S3)
    yield "prepare_bsds500", lambda: prepare_bsds500(S3)
    yield "report.build", lambda: build(S3)
    yield "report.build out", lambda: build("folder", S3)
    yield "load_results", lambda: load_results(S3)
    yield "score", lambda: score(bnn, x, S3)
    yield "score a file of rows", lambda: score(bnn, S3, "out")
    yield "score a saved model", lambda: score(S3, x, "out", net=nn.Linear(4, 2))
    yield "read_scores", lambda: read_scores(S3)
    yield "onnx.export", lambda: export(bnn, x, S3)
    yield "load_run", lambda: load_run(Path(S3))
    yield "run_all", lambda: run_all([], Path(S3))
    yield "write_text", lambda: write_text("", Path(S3) / "report.html")


@pytest.mark.parametrize("name", [name for name, _ in calls()])
def test_every_function_that_takes_a_path_refuses_a_scheme(name):
    call = dict(calls())[name]
    with pytest.raises(ValueError, match="expected a path on this machine, got 's3:/") as refused:
        call()
    given_as_text = name not in ("data.load a file", "load_run", "run_all", "write_text")
    assert (f"'{S3}'" in str(refused.value)) is given_as_text


def test_the_variable_of_the_data_folder_refuses_a_scheme(monkeypatch):
    monkeypatch.setenv("LEANBAYES_DATA", S3)
    with pytest.raises(ValueError, match="got 's3://bucket/run'"):
        data_root()
