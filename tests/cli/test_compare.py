"""The command line as a user meets it: help, exit codes, one sentence for each error, own data and networks."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import leanbayes as lb
from leanbayes.cli import bench
from leanbayes.cli.compare import comparison_options, parse, plan_of
from leanbayes.cli.main import main
from leanbayes.compare import workers
from leanbayes.compare.experiment import load
from leanbayes.compare.job import DataSpec, plain_of
from leanbayes.training.state import Checkpoint
from tests.distributed.together import one_worker, together
from tests.fixtures.comparison import PAIR
from tests.report import make

FAST = ["--recipe.epochs", "1", "--no-shift", "--ood", "none", "--test-images", "40", "--train-rows", "100"]
FAST += ["--seeds", "0"]


def complaint(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_help_teaches_and_costs_nothing(capsys):
    assert main(["--help"]) == 0
    assert "leanbayes compare" in capsys.readouterr().out
    for command in ("compare", "report", "bench", "reproduce", "list"):
        assert main([command, "--help"]) == 0
        assert "usage" in capsys.readouterr().out


def test_lists(capsys):
    for what, name in (("methods", "rank1"), ("nets", "lenet"), ("data", "digits"), ("suites", "rank1-cifar")):
        assert main(["list", what]) == 0
        assert name in capsys.readouterr().out
    assert main(["data", "list"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "expected a command among"),
        (["compare", "--methods", "rank2"], "expected methods among plain"),
        (["compare", "--seeds", "a"], "expected seeds such as 0,1,2"),
        (["compare", "--net", "lenot"], "lenot"),
        (["compare", "--data", "no-such-set"], "no-such-set"),
        (["compare", "--data", "absent.npz"], "absent.npz"),
        (["compare", "--recipe.lr", "-1"], "expected lr to be a positive number"),
        (["compare", "--rank1.prior-std", "-1"], "prior_std"),
        (["compare", "--net", "lenet"], "8"),
        (["report", "no-such-folder"], "no-such-folder"),
        (["bench", "--methods", "rank2"], "expected methods among"),
        (["reproduce", "no-such-suite"], "no-such-suite"),
        (["compare", "--samples", "0"], "expected samples to be at least 1, got 0"),
        (["compare", "--late", "2"], "below 1, got 2.0"),
        (["compare", "--late", "nan"], "below 1, got nan"),
        (["compare", "--ood", "mnits"], "mnits"),
        (["compare", "--train-rows", "-5"], "expected train-rows to be at least 0"),
        (["compare", "--train-rows", "3"], "leave class"),
        (["compare", "--device", "cda"], "expected a device among auto"),
        (["compare", "--devices", "3"], "expected a batch size that 3 processes can share"),
        (["compare", "--net", ":"], "package.module:function"),
        (["evaluate"], "run leanbayes train with the same flags first"),
        (["compare", "--out", "a-file/below"], "cannot make the folder 'a-file/below'"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    assert said in complaint(capsys, *arguments)
    assert not (tmp_path / "runs").exists()  # no folder is left


def test_flags_reach_the_jobs():
    options = parse(
        comparison_options(),
        ["--methods", "plain,rank1", "--seeds", "3,4", "--rank1.components", "2", "--recipe.epochs", "10", "--late",
         "0.5", "--resume"],
        "compare",
    )  # fmt: skip
    jobs = plan_of(options).jobs
    assert [(job.name, job.seed) for job in jobs] == [("plain", 3), ("rank1", 3), ("plain", 4), ("rank1", 4)]
    assert jobs[1].method.components == 2
    assert jobs[1].recipe.epochs == 10
    assert jobs[1].recipe.convert_at_epoch == 5
    assert jobs[0].net == "small"


@pytest.mark.parametrize(
    ("flags", "scaled"),
    [
        ([], {"rank1", "implicit"}),
        (["--rank1.init-std", "0.1"], {"implicit"}),  # the default, but given
        (["--rank1.init_spread=0.1", "--implicit.components", "2"], {"implicit"}),
        (["--methods", "plain,rank1,implicit[init_std=0.15]"], {"rank1"}),
        (["--recipe.schedule", "cosine"], set()),
        (["--validation", "0"], set()),
        (["--late", "0"], set()),
    ],
)
def test_initial_noise_that_is_given_does_not_follow_the_plain_network(flags, scaled, tmp_path):
    path = tmp_path / "houses.csv"
    path.write_text("size,price\n" + "".join(f"{i % 37 + i / 1000},{i * i / 100}\n" for i in range(80)))
    written = ["--data", str(path), "--methods", "plain,rank1,implicit,patch", *flags]
    jobs = plan_of(parse(comparison_options(), written, "compare"), written).jobs
    assert {job.name for job in jobs if job.scaled} == scaled
    assert all(job.settings().get("scaled", False) == job.scaled for job in jobs)
    assert not any(plain_of(job).scaled for job in jobs if job.scaled)


def test_classes_keep_the_initial_noise(tmp_path):
    path = tmp_path / "flowers.csv"
    path.write_text("size,kind\n" + "".join(f"{i % 37 + i / 1000},{'ab'[i % 2]}\n" for i in range(80)))
    written = ["--data", str(path), "--methods", "plain,rank1"]
    assert not any(job.scaled for job in plan_of(parse(comparison_options(), written, "compare"), written).jobs)


def test_compare_writes_results_table_and_report(comparison, capsys):
    out = comparison
    command = [*PAIR, "--out", str(out)]
    (out / "report.html").unlink()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "rank1" in said
    assert "report.html" in said
    assert (out / "report.html").stat().st_size > 10_000
    results = [path for name in ("plain", "rank1") for path in sorted(out.rglob(f"{name}/*/result.json"))]
    assert len(results) == 4
    stamps = [json.loads(path.read_text())["created"] for path in results]
    assert main(command) == 0  # finished runs are kept
    assert [json.loads(path.read_text())["created"] for path in results] == stamps
    assert "evaluate --fresh" in complaint(capsys, *command, "--samples", "5")
    assert "recipe.lr" in complaint(capsys, *command, "--recipe.lr", "0.3")
    assert main(["evaluate", *command[1:], "--samples", "5", "--fresh"]) == 0
    again = [json.loads(path.read_text()) for path in results]
    assert [result["settings"]["judging"]["samples"] for result in again] == [5] * 4
    assert again[0]["history"][0]["seconds"] > 0
    capsys.readouterr()
    assert main(["report", str(out), "--markdown"]) == 0
    assert "| rank1" in capsys.readouterr().out


def test_seeds_of_other_settings_are_refused_and_other_methods_are_welcome(comparison, capsys):
    command = [*PAIR, "--methods", "plain", "--out", str(comparison)]
    for flags, said in (
        (["--recipe.epochs", "3"], "recipe.epochs: 2 there, 3 now"),
        (["--samples", "5"], "judging.samples: 4 there, 5 now"),
        (["--train-rows", "120", "--fresh"], "data.train_rows: 200 there, 120 now"),
    ):
        told = complaint(capsys, *command, "--seeds", "2", *flags)
        assert said in told
        assert "another --out" in told
    assert main([*command, "--seeds", "2"]) == 0
    assert main([*command, "--methods", "mc_dropout", "--seeds", "0", "--recipe.epochs", "1"]) == 0
    assert main([*command, "--seeds", "0,1,2", "--recipe.epochs", "1", "--fresh"]) == 0  # all of them again
    assert len(list(comparison.rglob("result.json"))) == 8


def test_a_report_may_be_written_into_a_folder_and_its_table_to_ascii(tmp_path, monkeypatch):
    make.tree(tmp_path / "results", {"plain": make.METHODS["plain"]})
    command = ["report", str(tmp_path / "results")]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main([*command, "--markdown"]) == 0
    sys.stdout.flush()
    assert b" ? " in written.getvalue()  # mean and standard error


def test_a_closed_pipe_does_not_lose_the_report(comparison):
    (comparison / "report.html").unlink()
    command = [sys.executable, "-m", "leanbayes", *PAIR, "--out", str(comparison)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.close()
    assert process.wait() == 0
    assert (comparison / "report.html").exists()


def test_converting_at_epoch_0_is_heard():
    flags = ["--methods", "rank1", "--recipe.epochs", "4", "--recipe.convert-at-epoch", "0", "--seeds", "0"]
    (job,) = plan_of(parse(comparison_options(), flags, "compare")).jobs
    assert job.recipe.convert_at_epoch == 0


def test_a_failed_run_is_exit_code_1_and_in_the_report(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", "--methods", "plain", "--out", str(out), *FAST, "--recipe.lr", "1e9"]) == 1
    assert "failed" in (out / "report.html").read_text()


def test_own_network_and_npz_go_through_unchanged(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    y = np.arange(150) % 5
    x = rng.integers(0, 255, (150, 24, 40, 3), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_outputs):\n"
        "        super().__init__()\n"
        "        norm, pool = nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2)\n"
        "        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2), norm, nn.ReLU(), pool)\n"
        "        self.head = nn.Linear(16, num_outputs)\n"
        "    def forward(self, x): return self.head(self.body(x).flatten(1))\n"
        "def make(num_outputs): return Net(num_outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["compare", "--data", "mine.npz", "--net", "my_networks:make", "--methods", "plain,rank1,deep_ensemble",
               "--recipe.epochs", "1", "--shift-images", "5", "--samples", "2", "--seeds", "0"]  # fmt: skip
    assert main(command) == 0
    found = json.loads(next((tmp_path / "runs").rglob("rank1/seed0/result.json")).read_text())
    assert found["data"]["classes"] == ["0", "1", "2", "3", "4"]
    assert len(found["metrics"]["shift"]) == 76


def test_regression_from_csv(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    rows = np.column_stack([x, x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=120)])
    np.savetxt(tmp_path / "table.csv", rows, delimiter=",", header="a,b,c,price", comments="")
    monkeypatch.chdir(tmp_path)
    command = [
        "compare",
        "--data",
        "table.csv",
        "--target",
        "price",
        "--methods",
        "plain,implicit",
        "--recipe.epochs",
        "15",
        "--seeds",
        "0",
    ]
    assert main(command) == 0
    found = json.loads(next((tmp_path / "runs").rglob("implicit/seed0/result.json")).read_text())
    assert found["data"]["task"] == "regression"
    assert found["metrics"]["test"]["rmse"] < rows[:, 3].std()


def test_results_of_a_table_that_has_changed_are_not_kept(tmp_path, monkeypatch, capsys):
    """Neither at the same place nor where a file of the same name was moved to."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(60, 2))
    flags = ["--methods", "mean", "--seeds", "0", "--out", "runs"]

    def compare(folder: str, slope: float, *more: str) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        np.savetxt(tmp_path / folder / "t.csv", np.c_[x, slope * x[:, 0]], delimiter=",", header="a,b,y", comments="")
        return main(["compare", "--data", f"{folder}/t.csv", *flags, *more])

    assert compare("here", 1.0) == 0
    assert compare("here", 1.0) == 0  # kept
    assert compare("here", 2.0) == 2
    assert "holds a finished run on other data" in capsys.readouterr().err
    (tmp_path / "here" / "t.csv").unlink()
    assert compare("there", 2.0) == 2
    assert "--fresh" in capsys.readouterr().err
    assert compare("there", 2.0, "--fresh") == 0


def test_own_data_are_found_from_every_folder(tmp_path, monkeypatch, capsys):
    rows = np.random.default_rng(0).normal(size=(60, 3))
    np.savetxt(tmp_path / "table.csv", rows, delimiter=",", header="a,b,price", comments="")
    (tmp_path / "below").mkdir()
    out = tmp_path / "out"
    run = out / "table" / "mlp" / "plain" / "seed0"

    def compare(name: str) -> int:
        flags = ["--methods", "plain", "--recipe.epochs", "1", "--seeds", "0"]
        return main(["compare", *flags, "--out", str(out), "--data", name])

    monkeypatch.chdir(tmp_path)
    assert compare("table.csv") == 0
    first = json.loads((run / "result.json").read_text())
    assert first["settings"]["data"]["name"] == str(tmp_path / "table.csv")
    monkeypatch.chdir(tmp_path / "below")
    assert main(["predict", str(run), "--out", "predictions"]) == 0
    assert compare("../table.csv") == 0  # kept
    (tmp_path / "table.csv").rename("table.csv")  # moved
    assert compare("table.csv") == 0
    assert main(["predict", str(run), "--out", "again"]) == 0
    first["settings"]["data"]["name"] = "table.csv"  # as older results have it
    training = {name: value for name, value in first["settings"].items() if name != "judging"}
    (run / "result.json").write_text(json.dumps(first | {"id": "older"}))
    (run / "job.json").write_text(json.dumps(training))
    assert compare("table.csv") == 0
    assert json.loads((run / "result.json").read_text())["created"] == first["created"]
    (tmp_path / "other").mkdir()
    np.savetxt(tmp_path / "other" / "table.csv", rows, delimiter=",", header="a,b,price", comments="")
    assert compare("../other/table.csv") == 2
    assert "data.name: " in capsys.readouterr().err


@pytest.fixture
def interruptible():
    """Restore interrupts: a shell starts background processes with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupting_keeps_what_was_done_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    """In this process; tests/cli/test_predict.py interrupts one of its own."""
    flags = ["--methods", "plain,implicit", *FAST, "--recipe.epochs", "3"]
    save, saved = Checkpoint.save, []

    def interrupted(checkpoint, *state):
        save(checkpoint, *state)
        saved.append(checkpoint.path)
        if sum("implicit" in str(path) for path in saved) == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", interrupted)
        assert main(["compare", *flags, "--out", str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err
    assert "The same command resumes" in said
    assert "Traceback" not in said
    one, other = (tmp_path / name / "digits" / "small" / "implicit" / "seed0" for name in ("out", "other"))
    assert not (one / "result.json").exists()
    plain = one.parents[1] / "plain" / "seed0" / "result.json"
    before = json.loads(plain.read_text())
    assert main(["compare", *flags, "--out", str(tmp_path / "out")]) == 0
    after = json.loads(plain.read_text())
    assert after | {"cost": before["cost"]} == before
    assert "answer_ms" in after["cost"].keys() - before["cost"].keys()  # prices come last
    assert main(["compare", *flags, "--methods", "implicit", "--out", str(tmp_path / "other")]) == 0  # not interrupted
    resumed, whole = (json.loads((folder / "result.json").read_text()) for folder in (one, other))
    assert resumed["metrics"] == whole["metrics"]
    assert len(resumed["history"]) == 3


TWO = ["compare", "--methods", "rank1", "--no-shift", "--ood", "noise", "--recipe.epochs", "2", "--late", "0.5"]
TWO += ["--seeds", "0", "--devices", "2", "--device", "cpu", "--train-rows", "200", "--out"]


def _compare(rank: int, world: int, out: str) -> dict[str, str]:
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as told:
        assert main([*TWO, out]) == 0, told.getvalue()
    return {"stdout": said.getvalue(), "stderr": told.getvalue()}


def joined(out: Path) -> dict[str, str]:
    """Return the output of two processes that have joined, as a launcher starts them."""
    ranks = together(2, partial(_compare, out=str(out)), out.parent)
    return {name: "".join(rank[name] for rank in ranks) for name in ("stdout", "stderr")}


def started(out: Path) -> dict[str, str]:
    """Return the output of a command that starts its second process itself."""
    command = [sys.executable, "-m", "leanbayes", *TWO, str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return {"stdout": done.stdout, "stderr": done.stderr}


@one_worker
@pytest.mark.parametrize("run", [joined, pytest.param(started, marks=pytest.mark.slow)])
def test_two_processes_train_and_evaluate_as_one(tmp_path, run):
    said = run(tmp_path / "out")
    assert said["stderr"].count("rank1, seed 0: accuracy") == 1
    assert said["stdout"].count("report:") == 1
    (path,) = tmp_path.rglob("result.json")
    found = json.loads(path.read_text())
    assert sum(b["count"] for b in found["figures"]["reliability"]["bins"]) == found["data"]["test"]
    loaded = lb.load(path.parent / "model.safetensors", lb.models.SmallConvNet(input_shape=(1, 8, 8)))
    digits = load(DataSpec(name="digits", train_rows=200))  # its training rows set the scale of the inputs
    alone = lb.evaluate(loaded, (digits.inputs(digits.test.x), digits.test.y))
    assert alone.metrics["test"]["nll"] == pytest.approx(found["metrics"]["test"]["nll"], rel=1e-5)


def test_workers_share_the_jobs(tmp_path, monkeypatch):
    """Shares in this process, pickled as for others; tests/compare/test_workers.py starts processes."""
    shares = []

    def here(function, tasks, **how):
        shares.append([[job.name for job in jobs] for jobs, *_ in tasks])
        for task in tasks:
            function(*pickle.loads(pickle.dumps(task)), **how)

    monkeypatch.setattr(workers, "on_processes", here)
    command = ["--methods", "plain,mc_dropout", "--workers", "2", *FAST, "--out", str(tmp_path)]
    command += ["--backend", "local"]  # where Ray is installed, too
    monkeypatch.setattr(sys, "argv", ["leanbayes", "train", *command])
    assert main(["train", *command]) == 0  # which writes models and no results
    assert not list(tmp_path.rglob("result.json"))
    monkeypatch.setattr(sys, "argv", ["leanbayes", "compare", *command])
    assert main(["compare", *command]) == 0
    assert shares == [[["plain"], ["mc_dropout"]]] * 2
    found = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    assert sorted(result["method"]["name"] for result in found) == ["mc_dropout", "plain"]
    assert all(result["command"].startswith("leanbayes compare --methods plain,mc_dropout") for result in found)


def test_a_warning_is_one_sentence_however_often_it_is_given(monkeypatch, capsys):
    def warns(arguments: list[str]) -> int:
        for category in (UserWarning, RuntimeWarning):
            warnings.warn("2 of 3 classes have no test example", category, stacklevel=1)
        return 0

    monkeypatch.setattr(bench, "bench", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["bench"]) == 0
    assert capsys.readouterr().err == "leanbayes: warning: 2 of 3 classes have no test example\n"


@pytest.mark.parametrize(("asked", "said"), [(0, "1,000 + 797 rows"), (100, "1,000 + 100 rows"), (5000, "+ 797 rows")])
def test_the_first_line_counts_the_rows_that_are_evaluated(asked, said):
    options = parse(comparison_options(), ["--test-images", str(asked)], "compare")
    assert said in plan_of(options).sentence
