"""The regressions of ensemble model patching: scores against SciPy, cells that are kept, the page next to the paper."""

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
from leanbayes_papers import SUITES
from leanbayes_papers.harness import printed, Run
from leanbayes_papers.harness.suite import present, run_named
from leanbayes_papers.patch import uci
from leanbayes_papers.patch.uci import (
    against,
    Cell,
    COLUMNS,
    COUNTS,
    functions,
    load_splits,
    METHODS,
    Protocol,
    protocol_of,
    records_of,
    run_cells,
    score,
    SETS,
    Splits,
    TABLE,
)
from tests.papers.test_runs import flags

RMSE, LPD = COLUMNS
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------ scores


def targets(y: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> Splits:
    """Return splits; only their targets matter."""
    return Splits(y, y, y, y, mean, std, "")


def test_scores_are_those_of_the_gaussian_and_of_the_mixture():
    rng = np.random.default_rng(0)
    draws, y = rng.normal(size=(40, 3, 7)), rng.normal(5, 2, size=(3, 7))
    mean, std, tau = rng.normal(size=3), rng.uniform(1, 2, 3), 0.1
    f = draws * std[:, None] + mean[:, None]
    expected_lpd = norm.logpdf(y, f.mean(0), np.sqrt(f.var(0) + 1 / tau)).mean(1)
    expected_mixture = (logsumexp(norm.logpdf(y, f, tau**-0.5), 0) - math.log(40)).mean(1)
    pieces = [torch.from_numpy(piece) for piece in np.split(draws, [1, 15])]
    found = score(pieces, targets(*map(torch.from_numpy, (y, mean, std))), precision=tau)
    assert found["rmse"] == pytest.approx(np.sqrt(((y - f.mean(0)) ** 2).mean(1)))
    assert found["lpd"] == pytest.approx(expected_lpd)
    assert found["lpd_mixture"] == pytest.approx(expected_mixture)


def test_the_floor_is_the_papers():
    y = torch.randn(1, 9)
    found = score([y.unsqueeze(0)] * 3, targets(y, torch.zeros(1), torch.ones(1)), precision=0.1)
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
    monkeypatch.setitem(uci.NUMBERS, "cpu", 3 * 2 * 6 * 5)
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
        assert splits.std[t].item() == pytest.approx(y.std(correction=0).item())


def test_the_papers_protocol_is_the_default():
    for budget in ("short", "full"):
        protocol = protocol_of(Run(budget=budget))
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
    run = Run(root=root, device="cpu", out=tmp_path / "out")
    first = run_cells(run, ["uci-yacht"], METHODS)
    assert set(first) == {("uci-yacht", method) for method in METHODS}
    for record in first.values():
        assert {name: len(values) for name, values in record["scores"].items()} == dict.fromkeys(record["scores"], 2)
    files = sorted((run.out / "uci-yacht").iterdir())
    assert [file.name for file in files] == ["dropout.json", "ecmp.json", "emp.json", "ensemble.json"]
    stamps = [file.stat().st_mtime_ns for file in files]
    assert run_cells(run, ["uci-yacht"], METHODS) == first
    assert [file.stat().st_mtime_ns for file in files] == stamps

    files[0].write_text("{")  # as no kill leaves it, but a full disk may
    again = run_cells(run, ["uci-yacht"], METHODS)
    assert again["uci-yacht", "Dropout"]["scores"] == first["uci-yacht", "Dropout"]["scores"]
    assert [file.stat().st_mtime_ns for file in files][1:] == stamps[1:]

    other = run_cells(replace(run, seeds=(1,)), ["uci-yacht"], ["EMP"])
    assert other["uci-yacht", "EMP"]["scores"] != first["uci-yacht", "EMP"]["scores"]
    monkeypatch.setattr(uci, "protocol_of", lambda run: Protocol(epochs=1, draws=5, splits=2))
    assert run_cells(run, ["uci-yacht"], ["EMP"])["uci-yacht", "EMP"]["settings"]["protocol"]["epochs"] == 1


def test_fresh_trains_again(root, tmp_path):
    run = Run(root=root, device="cpu", out=tmp_path)
    first = run_cells(run, ["uci-yacht"], ["EMP"])
    file = tmp_path / "uci-yacht/emp.json"
    file.write_text(json.dumps(first["uci-yacht", "EMP"] | {"scores": {"rmse": [0, 0]}}))
    assert run_cells(run, ["uci-yacht"], ["EMP"])["uci-yacht", "EMP"]["scores"] == {"rmse": [0, 0]}
    again = run_cells(replace(run, fresh=True), ["uci-yacht"], ["EMP"])
    assert again["uci-yacht", "EMP"]["scores"] == first["uci-yacht", "EMP"]["scores"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method, root, tmp_path, monkeypatch):
    monkeypatch.setattr(uci, "protocol_of", lambda run: Protocol(epochs=150, lr=0.01, draws=50, splits=3))
    record = run_cells(Run(root=root, device="cpu", out=tmp_path), ["uci-yacht"], [method])["uci-yacht", method]
    for error, std in zip(record["scores"]["rmse"], record["target_std"], strict=True):
        assert error < std / 2


def test_wrong_names_say_what_was_expected(root, tmp_path):
    run = Run(root=root, device="cpu", out=tmp_path)
    with pytest.raises(ValueError, match="expected methods among ECMP, EMP, Dropout, Ensemble, got 'emp'"):
        run_cells(run, ["uci-yacht"], ["emp"])
    with pytest.raises(ValueError, match=r"expected data sets among uci-boston, .*, uci-yacht, got 'digits'"):
        run_cells(run, ["digits"], ["EMP"])


# ------------------------------------------------------------------------------------ the suite


def test_papers_numbers():
    """Some numbers, copied from the paper a second time; the whole tables by their sums."""
    rmse, lpd = (printed("patch", table) for table in ("table12", "table13"))
    assert rmse["uci-concrete"]["EMP"].value == 5.64
    assert rmse["uci-yacht"]["Ensemble"].spread == 5.14
    assert lpd["uci-boston"]["ECMP"].value == -2.65
    assert lpd["uci-energy"]["Dropout"].spread == 0.01
    assert list(rmse) == list(lpd) == list(SETS)
    sums = ((rmse, (18.90, 19.03, 33.36, 53.23)), (lpd, (-21.99, -22.15, -32.13, -27.20)))  # ECMP to ensemble
    for table, expected in sums:
        columns = [sum(row[method].value for row in table.values()) for method in METHODS]
        assert columns == pytest.approx(expected, abs=1e-9)


def splits(name: str, rmse: float, lpd: float, sem: float = 0.03) -> list[dict]:
    """Return two splits of EMP with these means and this standard error: they are sem above and below."""
    return [{"data": name, "method": "EMP", "rmse": rmse + d, "lpd": lpd + d} for d in (-sem, sem)]


@pytest.mark.parametrize(
    ("rmse", "lpd", "expected"),
    [  # EMP on boston: 3.56±0.22 and -2.70±0.07; two combined errors are 0.444 and 0.152
        (3.56 + 0.448, -2.70 - 0.156, ("equal", "equal")),
        (3.56 - 0.448, -2.70 + 0.156, ("equal", "equal")),
        (3.56 + 0.450, -2.70 - 0.158, ("worse", "worse")),
        (3.56 - 0.450, -2.70 + 0.158, ("better", "better")),
    ],
)
def test_a_number_is_equal_within_two_errors_and_rounding_on_both_sides(rmse, lpd, expected):
    found = splits("uci-boston", rmse, lpd)
    assert (against(RMSE, found), against(LPD, found)) == expected


def test_tables_compare_with_the_paper_and_count():
    records = [*splits("uci-boston", 3.56, -2.70), *splits("uci-energy", 1.24, -3.3)]
    lines = TABLE.lines(records)
    assert lines[2:] == [
        ["uci-energy", "EMP", "ours", "1.240 ± 0.030", "-3.300 ± 0.030", "equal", "worse"],
        ["", "", "paper", "1.24 ± 0.04", "-2.15 ± 0.01", "-", "-"],
    ]
    counted = ["EMP", "1 of 2", "0 worse, 2 equal, 0 better", "1 worse, 1 equal, 0 better"]
    assert COUNTS.lines(records) == [counted]
    energy = next(s for s in SUITES["patch-uci"](Run(budget="full")).studies if s.name == "uci-energy")
    assert energy.claim.endswith("The paper has both targets, our copy the heating load alone.")


def test_budgets_choose_the_sets():
    def sets(**flags):
        return [study.name for study in SUITES["patch-uci"](Run(**flags)).studies]

    assert sets() == ["uci-yacht", "uci-boston"]
    assert len(sets(budget="short")) == 6
    assert sets(budget="full") == list(SETS)


def test_the_suite_runs_and_is_kept(root, tmp_path, capsys):
    given = flags(root, name="patch-uci", seeds="0")
    assert run_named(SUITES, given, tmp_path) == 0
    record = json.loads((tmp_path / "reproduce.json").read_text())
    assert [len(record["tables"][0]["rows"]), record["remarks"]] == [8, []]
    assert "standard error over the standard splits" in record["legend"]
    assert "| uci-boston | ECMP |" in (tmp_path / "reproduce.md").read_text()
    records = json.loads((tmp_path / "studies/uci-yacht.json").read_text())["records"]
    cell = json.loads((tmp_path / "uci-yacht/emp.json").read_text())
    assert [r for r in records if r["method"] == "EMP"] == records_of(cell)
    emp = next(row for row in record["tables"][0]["rows"] if (row["data"], row["method"]) == ("uci-yacht", "EMP"))
    assert emp["ours"]["rmse"]["mean"] == pytest.approx(np.mean(cell["scores"]["rmse"]))
    assert emp["ours"]["rmse"]["sem"] == pytest.approx(np.std(cell["scores"]["rmse"], ddof=1) / 2**0.5)
    assert (tmp_path / "studies/uci-boston.svg").read_text().rstrip().endswith("</svg>")
    assert not list(tmp_path.rglob("*.tmp"))

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "studies").iterdir()}
    assert run_named(SUITES, given, tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert "paper" in capsys.readouterr().out


def test_data_sets_can_be_chosen(root, tmp_path):
    given = flags(root, name="patch-uci", seeds="0", data="uci-yacht")
    assert run_named(SUITES, given, tmp_path) == 0
    assert [path.name for path in tmp_path.glob("uci-*")] == ["uci-yacht"]
    with pytest.raises(ValueError, match="expected data sets among uci-yacht, uci-boston, got 'uci-power'"):
        run_named(SUITES, flags(root, name="patch-uci", data="uci-power"), tmp_path)
    run = Run(root=str(tmp_path), data=("uci-yacht",))
    with pytest.raises(
        ValueError, match=r"nothing to run: uci-yacht is not here, .*`leanbayes data prepare uci-yacht`"
    ):
        present(SUITES["patch-uci"](run), run)


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
    cells = run_cells(Run(budget="full", device="cpu", out=tmp_path), ["uci-yacht"], ["ECMP", "EMP"])
    for cell in cells.values():
        assert all(against(column, records_of(cell)) != "worse" for column in COLUMNS)


DOCS = Path(__file__).parents[2] / "docs" / "results"


def published() -> dict[str, dict]:
    """Return the cells of the committed files, by set and method."""
    sets = [name for name in SETS if (DOCS / "patch-uci" / name).is_dir()]
    assert len(sets) == 9
    files = {name: {m: DOCS / "patch-uci" / name / f"{m.lower()}.json" for m in METHODS} for name in sets}
    return {name: {m: json.loads(file.read_text()) for m, file in row.items()} for name, row in files.items()}


def test_the_published_tables_are_those_of_their_files():
    records = [record for row in published().values() for cell in row.values() for record in records_of(cell)]
    page = (DOCS / "patch-uci.md").read_text()
    assert TABLE.markdown(records) in page
    assert COUNTS.markdown(records) in page


def ahead(one: list[float], other: list[float]) -> float:
    """Return by how many standard errors the first has the lower RMSE, paired by split."""
    differences = np.subtract(other, one)
    return float(differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences))))


def test_the_published_page_counts_all_nine_sets():
    files = published()

    def count(method, columns, kinds):
        cells = (records_of(row[method]) for row in files.values())
        return sum(all(against(column, cell) in kinds for column in columns) for cell in cells)

    kept = [count(method, COLUMNS, ("equal", "better")) for method in METHODS]
    better = {method: count(method, (RMSE,), ("better",)) for method in METHODS}
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
        f"dropout is better than printed on {better['Dropout']} sets in RMSE, the ensemble on {better['Ensemble']}.",
        f"The lowest mean RMSE is a patched network's on {len(won)} of 9 sets. On {len(clear)} of them "
        f"({', '.join(clear)}) it is ahead",
        f"On {len(lost)} ({', '.join(lost)}) dropout and the ensemble are ahead",
    ):
        assert sentence in page, sentence
