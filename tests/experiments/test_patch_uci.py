"""The regressions of ensemble model patching: scores against SciPy, cells that are kept, the page beside the paper."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm

from leanbayes import data
from leanbayes_papers import SUITES, uci_cells, uci_scores
from leanbayes_papers.patch_uci import numbers_of, row_of, TABLE
from leanbayes_papers.runner import present, run_named
from leanbayes_papers.suite import Setting
from leanbayes_papers.uci_cells import Cell, Progress, protocol_of, run
from leanbayes_papers.uci_page import against, overview, say_set
from leanbayes_papers.uci_protocol import load_splits, METHODS, Protocol, SETS
from leanbayes_papers.uci_scores import functions, score, Unit

from .test_suite_runs import flags

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------ scores


def test_scores_are_those_of_the_gaussian_and_of_the_mixture():
    rng = np.random.default_rng(0)
    draws, y = rng.normal(size=(40, 3, 7)), rng.normal(5, 2, size=(3, 7))
    mean, std, tau = rng.normal(size=3), rng.uniform(1, 2, 3), 0.1
    f = draws * std[:, None] + mean[:, None]
    expected_lpd = norm.logpdf(y, f.mean(0), np.sqrt(f.var(0) + 1 / tau)).mean(1)
    expected_mixture = (logsumexp(norm.logpdf(y, f, tau**-0.5), 0) - math.log(40)).mean(1)
    pieces = [torch.from_numpy(piece) for piece in np.split(draws, [1, 15])]
    unit = Unit(torch.from_numpy(mean), torch.from_numpy(std))
    found = score(pieces, torch.from_numpy(y), unit, precision=tau)
    assert found["rmse"] == pytest.approx(np.sqrt(((y - f.mean(0)) ** 2).mean(1)))
    assert found["lpd"] == pytest.approx(expected_lpd)
    assert found["lpd_mixture"] == pytest.approx(expected_mixture)


def test_the_floor_is_the_papers():
    y = torch.randn(1, 9)
    found = score([y.unsqueeze(0)] * 3, y, Unit(torch.zeros(1), torch.ones(1)), precision=0.1)
    assert found["rmse"] == [0.0]
    assert found["lpd"] == pytest.approx([-0.5 * math.log(20 * math.pi)])
    assert found["lpd_mixture"] == pytest.approx(found["lpd"])
    assert round(found["lpd"][0], 2) == -2.07


def emp(nets: int = 2):
    torch.manual_seed(0)
    net = replace(Protocol(), copies=3, spread=2.0).network("EMP", nets=nets, inputs=4, hidden=6)
    return net.eval()


def test_draws_average_to_all_assignments():
    """EMP with two norms has K^2 functions, each with the same probability."""
    net, x = emp(), torch.randn(2, 4, 5)
    shape = (1, 2, 2, 1)
    with torch.no_grad():
        every = [
            net(x[None], (torch.full(shape, a).expand(1, 2, 2, 4), torch.full(shape, b).expand(1, 2, 2, 6)))[0, :, 0]
            for a, b in itertools.product(range(3), repeat=2)
        ]
    exact = torch.stack(every)
    count = 5000
    drawn = torch.cat([*functions(net, x, draws=count, members=1, generator=torch.Generator().manual_seed(0))])
    assert drawn.shape == (count, 2, 5)
    errors = exact.std(0, correction=0) / count**0.5
    assert ((drawn.mean(0) - exact.mean(0)).abs() <= 4 * errors).all()
    assert torch.allclose(drawn.var(0), exact.var(0, correction=0), rtol=0.1)


def test_memory_is_bounded_and_pieces_are_the_whole(monkeypatch):
    net, x = emp(), torch.randn(2, 4, 5)
    monkeypatch.setitem(uci_scores.NUMBERS, "cpu", 3 * 2 * 6 * 5)
    pieces = list(functions(net, x, draws=8, members=1, generator=torch.Generator().manual_seed(0)))
    assert [len(piece) for piece in pieces] == [3, 3, 2]
    assert not any(piece.requires_grad for piece in pieces)


def test_members_of_a_split_are_its_draws():
    torch.manual_seed(0)
    net = Protocol().network("Ensemble", nets=6, inputs=4, hidden=5).eval()
    x = torch.randn(2, 4, 7).repeat_interleave(3, 0)
    (found,) = functions(net, x, draws=1, members=3, generator=torch.Generator())
    outputs = net(x[None], net.noise(1, 1, torch.Generator()))[0, :, 0]
    for split, member in itertools.product(range(2), range(3)):
        assert torch.equal(found[member, split], outputs[3 * split + member])


# ------------------------------------------------------------------------------------ cells


@pytest.fixture
def root(tmp_path):
    """A small file of two sets in the form of the real one: 40 rows, targets that are easy to learn."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name, columns in (("yacht", 6), ("boston", 13)):
        x = rng.normal(3, 2, size=(40, columns))
        masks = np.zeros((20, 40), bool)
        for mask in masks:
            mask[rng.permutation(40)[:4]] = True
        arrays |= {f"{name}_X": x, f"{name}_y": 10 + 5 * x[:, 0], f"{name}_test_mask": masks}
    folder = tmp_path / "data"
    folder.mkdir()
    written = io.BytesIO()
    np.savez(written, **arrays)
    (folder / "uci_regression.npz").write_bytes(written.getvalue())
    return str(folder)


def test_splits_are_standardised_by_their_own_training_rows(root):
    splits = load_splits("uci-yacht", 3, root, CPU)
    assert splits.x.shape == (3, 36, 6)
    assert splits.x_test.shape == (3, 6, 4)
    for t in range(3):
        one = data.load("uci-yacht", root, split=t)
        x, y = one.train.x.double(), one.train.y[:, 0].double()
        assert torch.allclose(splits.x[t].double(), (x - x.mean(0)) / x.std(0, correction=0), atol=1e-5)
        assert torch.allclose(splits.y[t].double(), (y - y.mean()) / y.std(correction=0), atol=1e-5)
        assert torch.allclose(splits.x_test[t].T.double(), (one.test.x - x.mean(0)) / x.std(0, correction=0), atol=1e-5)
        assert torch.equal(splits.y_test[t], one.test.y[:, 0])
        assert splits.unit.std[t].item() == pytest.approx(y.std(correction=0).item())


def test_the_papers_protocol_is_the_default():
    for budget in ("short", "full"):
        protocol = protocol_of(Setting(budget=budget))
        assert protocol == Protocol()
    assert (protocol.epochs, protocol.batch, protocol.draws, protocol.copies) == (4000, 100, 10_000, 5)
    assert (protocol.dropout, protocol.weight_decay, protocol.precision, protocol.scale) == (0.005, 0.01, 0.1, 0.2)
    assert protocol.steps(455) == 18_200  # 4000 passes over Boston in batches of 100
    assert protocol.steps(60) == 4000  # all rows are the batch
    assert [protocol.members(name) for name in METHODS] == [1, 1, 1, 5]
    cell = Cell("uci-protein", "EMP", protocol, 0)
    assert (cell.sizes.hidden, cell.sizes.splits, cell.steps) == (100, 5, 1_646_280)
    assert Cell("uci-yacht", "EMP", protocol, 0).sizes == (50, 20)


def test_cells_are_kept_while_nothing_that_matters_changes(root, tmp_path, monkeypatch):
    out, setting = tmp_path / "out", Setting(root=root, device="cpu")
    first = run(["uci-yacht"], METHODS, out, setting)
    assert set(first) == {("uci-yacht", method) for method in METHODS}
    for record in first.values():
        assert {name: len(values) for name, values in record["scores"].items()} == dict.fromkeys(record["scores"], 2)
    files = sorted((out / "uci-yacht").iterdir())
    assert [file.name for file in files] == ["dropout.json", "ecmp.json", "emp.json", "ensemble.json"]
    stamps = [file.stat().st_mtime_ns for file in files]
    assert run(["uci-yacht"], METHODS, out, setting) == first
    assert [file.stat().st_mtime_ns for file in files] == stamps

    files[0].write_text("{")  # as no kill leaves it, but a full disk may
    again = run(["uci-yacht"], METHODS, out, setting)
    assert again["uci-yacht", "Dropout"]["scores"] == first["uci-yacht", "Dropout"]["scores"]
    assert [file.stat().st_mtime_ns for file in files][1:] == stamps[1:]

    other = run(["uci-yacht"], ["EMP"], out, replace(setting, seeds=(1,)))
    assert other["uci-yacht", "EMP"]["scores"] != first["uci-yacht", "EMP"]["scores"]
    monkeypatch.setattr(uci_cells, "protocol_of", lambda setting: Protocol(epochs=1, draws=5, splits=2))
    assert run(["uci-yacht"], ["EMP"], out, setting)["uci-yacht", "EMP"]["settings"]["protocol"]["epochs"] == 1


def test_fresh_trains_again(root, tmp_path):
    setting = Setting(root=root, device="cpu")
    first = run(["uci-yacht"], ["EMP"], tmp_path, setting)
    file = tmp_path / "uci-yacht/emp.json"
    file.write_text(json.dumps(first["uci-yacht", "EMP"] | {"scores": {"rmse": [0, 0]}}))
    assert run(["uci-yacht"], ["EMP"], tmp_path, setting)["uci-yacht", "EMP"]["scores"] == {"rmse": [0, 0]}
    anew = run(["uci-yacht"], ["EMP"], tmp_path, setting, fresh=True)
    assert anew["uci-yacht", "EMP"]["scores"] == first["uci-yacht", "EMP"]["scores"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method, root, tmp_path, monkeypatch):
    monkeypatch.setattr(uci_cells, "protocol_of", lambda setting: Protocol(epochs=150, lr=0.01, draws=50, splits=3))
    record = run(["uci-yacht"], [method], tmp_path, Setting(root=root, device="cpu"))["uci-yacht", method]
    for error, std in zip(record["scores"]["rmse"], record["target_std"], strict=True):
        assert error < std / 2


def test_wrong_names_say_what_was_expected(root, tmp_path):
    setting = Setting(root=root, device="cpu")
    with pytest.raises(ValueError, match="expected methods among ECMP, EMP, Dropout, Ensemble, got 'emp'"):
        run(["uci-yacht"], ["emp"], tmp_path, setting)
    with pytest.raises(ValueError, match=r"expected data sets among uci-boston, .*, uci-yacht, got 'digits'"):
        run(["digits"], ["EMP"], tmp_path, setting)


def test_progress_names_the_cell_its_share_and_the_time_left(root, monkeypatch, capsys):
    clock = iter([0.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr(uci_cells.time, "monotonic", lambda: next(clock))
    progress = Progress(100)

    class Made:
        def __init__(self, **fields):
            self.__dict__ |= fields

    running = [Made(cell=Made(data="uci-yacht", method="EMP", steps=50), training=Made(done=20))]
    for steps in (5, 15, 5):
        progress.show(steps, running)
    assert capsys.readouterr().err == "uci-yacht EMP 40%; all 20%, 24 s left\n"  # 20 steps in 6 s, 80 are left


# ------------------------------------------------------------------------------------ the suite


def test_papers_numbers():
    """Some numbers, copied from the paper a second time; the whole tables by their sums."""
    assert numbers_of("uci-concrete", "EMP")["rmse"].value == 5.64
    assert numbers_of("uci-yacht", "Ensemble")["rmse"].spread == 5.14
    assert numbers_of("uci-boston", "ECMP")["lpd"].value == -2.65
    assert numbers_of("uci-energy", "Dropout")["lpd"].spread == 0.01
    assert {tuple(lines) for lines in TABLE.values()} == {tuple(SETS)}
    sums = {  # column by column, ECMP to ensemble
        "rmse": (18.90, 19.03, 33.36, 53.23),
        "lpd": (-21.99, -22.15, -32.13, -27.20),
    }
    for measure, expected in sums.items():
        columns = [sum(numbers_of(name, method)[measure].value for name in SETS) for method in METHODS]
        assert columns == pytest.approx(expected, abs=1e-9)


def row(rmse: float, lpd: float, *, method: str = "EMP", sem: float | None = 0.03) -> dict:
    ours = {"rmse": {"mean": rmse, "sem": sem}, "lpd": {"mean": lpd, "sem": sem}}
    paper = {"rmse": {"value": 4.0, "spread": 0.04}, "lpd": {"value": -3.0, "spread": 0.04}}
    return {"method": method, "splits": 20, "ours": ours, "paper": paper}


@pytest.mark.parametrize(
    ("rmse", "lpd", "sem", "expected"),
    [  # two combined errors are 0.1, or 0.08 without ours
        (4.104, -3.104, 0.03, ("equal", "equal")),
        (3.896, -2.896, 0.03, ("equal", "equal")),
        (4.106, -3.106, 0.03, ("worse", "worse")),
        (3.894, -2.894, 0.03, ("better", "better")),
        (4.084, -3.086, None, ("equal", "worse")),
    ],
)
def test_a_number_is_equal_within_two_errors_and_rounding_on_both_sides(rmse, lpd, sem, expected):
    found = row(rmse, lpd, sem=sem)
    assert (against(found, "rmse"), against(found, "lpd")) == expected


def test_the_overview_counts_worse_equal_and_better():
    studies = {
        "uci-boston": {"data": "uci-boston", "rows": [row(4.0, -3.0)]},
        "uci-energy": {"data": "uci-energy", "rows": [row(4.0, -3.3)]},
    }
    found = overview(studies)
    assert found.rows[1] == [
        "uci-energy", "EMP", "4.000 ± 0.030", "4.00 ± 0.04", "equal", "-3.300 ± 0.030", "-3.00 ± 0.04", "worse",
    ]  # fmt: skip
    assert found.says[0] == (
        "EMP: neither is worse on 1 of 2 sets (RMSE 0 worse, 2 equal, 0 better; LPD 1 worse, 1 equal, 0 better); "
        "worse: uci-energy (LPD -3.300 ± 0.030, paper -3.00 ± 0.04)."
    )
    assert found.says[1].startswith("uci-energy: The paper has both targets")
    assert "| uci-energy | EMP | 4.000 ± 0.030 |" in found.markdown()
    assert say_set(studies["uci-boston"]) == [
        "EMP: RMSE 4.000 ± 0.030, paper 4.00 ± 0.04; LPD -3.000 ± 0.030, paper -3.00 ± 0.04"
    ]


def test_budgets_choose_the_sets():
    def sets(**flags):
        return [study.name for study in SUITES["patch-uci"](Setting(**flags)).studies]

    assert sets() == ["uci-yacht", "uci-boston"]
    assert len(sets(budget="short")) == 6
    assert sets(budget="full") == list(SETS)


def test_the_suite_runs_and_is_kept(root, tmp_path, capsys):
    given = flags(root, name="patch-uci", seeds="0")
    assert run_named(SUITES, given, tmp_path) == 0
    record = json.loads((tmp_path / "reproduce.json").read_text())
    assert [len(record["overview"]["rows"]), record["tables"], record["remarks"]] == [8, [], []]
    assert "standard error over the standard splits" in record["legend"]
    page = (tmp_path / "reproduce.md").read_text()
    assert "| uci-boston | ECMP |" in page
    numbers = json.loads((tmp_path / "studies/uci-yacht.json").read_text())["numbers"]
    cell = json.loads((tmp_path / "uci-yacht/emp.json").read_text())
    emp = next(row for row in numbers["rows"] if row["method"] == "EMP")
    for measure, values in cell["scores"].items():
        assert emp["ours"][measure]["mean"] == pytest.approx(np.mean(values))
        assert emp["ours"][measure]["sem"] == pytest.approx(np.std(values, ddof=1) / 2**0.5)
    assert (tmp_path / "studies/uci-boston.svg").read_text().rstrip().endswith("</svg>")
    assert not list(tmp_path.rglob("*.tmp"))

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "studies").iterdir()}
    assert run_named(SUITES, given, tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert "RMSE, paper" in capsys.readouterr().out


def test_data_sets_can_be_chosen(root, tmp_path):
    given = flags(root, name="patch-uci", seeds="0", data="uci-yacht")
    assert run_named(SUITES, given, tmp_path) == 0
    assert [path.name for path in tmp_path.glob("uci-*")] == ["uci-yacht"]
    with pytest.raises(ValueError, match="expected data sets among uci-yacht, uci-boston, got 'uci-power'"):
        run_named(SUITES, flags(root, name="patch-uci", data="uci-power"), tmp_path)
    setting = Setting(root=str(tmp_path), data=("uci-yacht",))
    with pytest.raises(
        ValueError, match=r"nothing to run: uci-yacht is not here, .*`leanbayes data prepare uci-yacht`"
    ):
        present(SUITES["patch-uci"](setting), setting)


def test_chosen_data_sets_leave_out_rows_of_tables(monkeypatch):
    monkeypatch.setattr(Setting, "has", lambda self, name, foreign=False: True)
    setting = Setting(data=("cifar10",))
    suite, remarks = present(SUITES["rank1-cifar"](setting), setting)
    assert {row.job.source.name for table in suite.tables for row in table.rows} == {"cifar10"}
    assert remarks == []


@pytest.mark.skipif("LEANBAYES_DATA" not in os.environ, reason="needs the data folder (LEANBAYES_DATA)")
@pytest.mark.parametrize("name", SETS)
def test_the_real_sets_have_the_papers_sizes(name):
    count = SETS[name].splits
    splits = load_splits(name, count, None, CPU)
    rows = {row.name: row for row in data.describe()}[name]
    assert splits.x.shape == (count, rows.train, *rows.shape)
    assert splits.y_test.shape == (count, rows.test)
    assert splits.y.mean(1).abs().max() < 1e-3
    with pytest.raises(ValueError, match=f"has the splits 0 to {count - 1}"):
        data.load(name, split=count)


@pytest.mark.slow
@pytest.mark.skipif("LEANBAYES_DATA" not in os.environ, reason="needs the data folder (LEANBAYES_DATA)")
def test_yacht_is_not_worse_than_printed(tmp_path: Path):
    """Table 12 and 13, EMP and ECMP on the smallest set, all splits: a minute on one thread."""
    records = run(["uci-yacht"], ["ECMP", "EMP"], tmp_path, Setting(budget="full", device="cpu"))
    for (name, method), record in records.items():
        assert all(against(row_of(name, method, record), measure) != "worse" for measure in ("rmse", "lpd"))


DOCS = Path(__file__).parents[2] / "docs" / "results"


def published() -> dict[str, dict]:
    """Return what the committed files hold, by set and method."""
    sets = [name for name in SETS if (DOCS / "patch-uci" / name).is_dir()]
    assert len(sets) == 9
    return {
        name: {
            method: json.loads((DOCS / "patch-uci" / name / f"{method.lower()}.json").read_text()) for method in METHODS
        }
        for name in sets
    }


def test_the_published_table_is_what_its_files_say():
    studies = {
        name: {"data": name, "rows": [row_of(name, method, record) for method, record in records.items()]}
        for name, records in published().items()
    }
    assert overview(studies).markdown() in (DOCS / "patch-uci.md").read_text()


def ahead(one: list[float], other: list[float]) -> float:
    """Return by how many standard errors the first has the lower RMSE, paired by split."""
    differences = np.subtract(other, one)
    return float(differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences))))


def test_the_published_page_counts_all_nine_sets():
    files = published()
    rows = {name: {m: row_of(name, m, record) for m, record in records.items()} for name, records in files.items()}

    def count(method, measures, kinds):
        return sum(all(against(each[method], measure) in kinds for measure in measures) for each in rows.values())

    kept = [count(method, ("rmse", "lpd"), ("equal", "better")) for method in METHODS]
    better = {method: count(method, ("rmse",), ("better",)) for method in METHODS}
    rmse = {name: {m: record["scores"]["rmse"] for m, record in records.items()} for name, records in files.items()}
    best = {name: min(each, key=lambda m, each=each: np.mean(each[m])) for name, each in rmse.items()}
    patched, plain = ("ECMP", "EMP"), ("Dropout", "Ensemble")
    won = {
        name.removeprefix("uci-"): min(ahead(rmse[name][best[name]], rmse[name][other]) for other in plain)
        for name in best
        if best[name] in patched
    }
    clear = sorted(name for name, errors in won.items() if errors > 2)
    lost = sorted(
        name.removeprefix("uci-")
        for name, each in rmse.items()
        if min(ahead(each[one], each[other]) for one in plain for other in patched) > 2
    )
    page = " ".join((DOCS / "patch-uci.md").read_text().split())
    for sentence in (
        f"On nine sets ECMP is not worse than printed on {kept[0]}, EMP on {kept[1]}, dropout on {kept[2]} and the "
        f"explicit "
        f"ensemble on {kept[3]}.",
        f"dropout is better than printed on {better['Dropout']} sets in RMSE, the ensemble on {better['Ensemble']},",
        f"The lowest mean RMSE is a patched network's on {len(won)} of 9 sets; on {len(clear)} of them "
        f"({', '.join(clear)}) it is ahead",
        f"On {len(lost)} ({', '.join(lost)}) dropout and the ensemble are ahead",
    ):
        assert sentence in page, sentence
