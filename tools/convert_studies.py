"""Read the numbers of studies (`OUT/studies/NAME.json`) as records, also those written before records were introduced.

    python tools/convert_studies.py OUT/studies/*.json

rewrites old files in place. Old files hold nested `numbers`, new ones a list of flat `records`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Numbers = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return the records of a study, converted if need be.

    Raises:
        ValueError: if the study is not known by the name of its file.
    """
    study = json.loads(path.read_text(encoding="utf-8"))
    return study["records"] if "records" in study else convert(path.stem, study["numbers"])


def convert(name: str, numbers: Numbers) -> list[Record]:
    """Return the records of nested numbers; `name` is that of the study."""
    kinds = [kind for kind in CONVERTERS if name == kind or name.startswith(f"{kind}-")]
    if not kinds:
        raise ValueError(f"expected a study among {', '.join(CONVERTERS)}, got {name!r}")
    if kinds[0] == "components" and "maps" in numbers:
        return _map(numbers)
    return CONVERTERS[kinds[0]](numbers)


def flat(value: Mapping[str, Any], before: str = "") -> Record:
    """Join the keys of nested dicts by a space; a paper's numbers are left out, for they are in numbers.toml."""
    found: Record = {}
    for key, each in value.items():
        if key == "paper":
            continue
        if isinstance(each, Mapping) and key not in ("kappa", "sampled", "log_alpha by layer"):
            found |= flat(each, f"{before}{key} ")
        else:
            found[f"{before}{key}"] = each
    return found


def levels(numbers: Any, *names: str) -> Iterator[Record]:
    """Yield a record for each leaf: `names` are the columns of the keys above it, `seed` is a number."""
    if not names:
        rows = numbers if isinstance(numbers, list) else [numbers]
        yield from (flat(row) if isinstance(row, Mapping) else {"value": row} for row in rows)
        return
    for key, each in numbers.items():
        named = {names[0]: int(key) if names[0] in ("seed", "parameters") else key}
        yield from (named | record for record in levels(each, *names[1:]))


def _growth(numbers: Numbers) -> list[Record]:
    rows = levels(numbers, "method", "seed", "parameters")
    return [{("error" if name == "value" else name): v for name, v in row.items()} for row in rows]


def _map(numbers: Numbers) -> list[Record]:
    (xs, ys), maps = numbers["ticks"], numbers["maps"]
    points = zip(numbers["components"], numbers["at_components"], strict=True)
    star = dict(zip("xy", numbers["weights"], strict=True))
    return [
        *({"point": "component", "x": x, "y": y} | flat(at, "test ") for (x, y), at in points),
        {"point": "shared weights"} | star | flat(numbers["at_weights"], "test "),
        {"point": "averaged prediction"} | flat(numbers["at_average"], "test "),
        {"point": "plane", "explained": numbers["explained"]},
        *(
            {"point": "grid", "x": x, "y": y}
            | {f"{part} {m}": maps[part][m][j][i] for part in maps for m in maps[part]}
            for j, y in enumerate(ys)
            for i, x in enumerate(xs)
        ),
    ]


def _x_cubed(numbers: Numbers) -> list[Record]:
    rows = [{("std" if name == "spread" else name): v for name, v in row.items()} for row in numbers["rows"]]
    return [*rows, {name: numbers[name] for name in ("x", "y", "grid")}]


def _uci(numbers: Numbers) -> list[Record]:
    """Return means over splits; the scores of every split are in the files of the cells."""
    means = ({m: found["mean"] for m, found in row["ours"].items()} for row in numbers["rows"])
    rows = zip(numbers["rows"], means, strict=True)
    return [{"data": numbers["data"], "method": row["method"]} | mean for row, mean in rows]


def _ehr(numbers: Numbers) -> list[Record]:
    def named(row: Mapping[str, Any]) -> Record:
        return {name.replace("set-", "set "): value for name, value in flat(row).items()}

    rows = numbers["rows"].items()
    found = [
        {"method": name, "parameters": row["parameters"]} | named(seed) for name, row in rows for seed in row["seeds"]
    ]
    return [*found, {"method": "Logistic regression on counts of tokens"} | named(numbers["counts"])]


def _text(numbers: Numbers) -> list[Record]:
    plain = numbers["rows"]["Deterministic"]["parameters"]

    def named(row: Record) -> Record:
        found = {name.removeprefix("foreign "): value for name, value in flat(row).items()}
        shares = {f"surest {s} %": row["curve"][numbers["coverages"].index(s / 100)] for s in (80, 50)}
        return found | shares

    records = []
    for name, row in numbers["rows"].items():
        for seed in row["seeds"]:
            found = {"method": name, "parameters": row["parameters"] / plain} | named(seed)
            if name == "Deterministic":
                found = {k: None if k.endswith("mutual_information") else v for k, v in found.items()}
            records.append(found)
    return [*records, {"method": "TF-IDF, logistic regression"} | named(numbers["tfidf"])]


def _pretrained(numbers: Numbers) -> list[Record]:
    records = []
    for k, seed in enumerate(numbers["seeds"]):
        for name, row in numbers["rows"].items():
            for when in ("before", "after"):
                if row[when]:
                    bytes_ = {"posterior_bytes": row["posterior_bytes"]} if "posterior_bytes" in row else {}
                    records.append({"method": name, "when": when, "seed": seed} | row[when][k] | bytes_)
    return records


def _widths(numbers: Numbers) -> list[Record]:
    tails = numbers["importance"].items()
    return [*levels(numbers["methods"], "method", "width"), *({"layer": p, "importance": t} for p, t in tails)]


def _times(numbers: Numbers) -> list[Record]:
    facts = {name: numbers[name] for name in ("device", "rows")}
    rows = numbers["ratios"].items()
    return [{"method": name, "repeat": k} | facts | run for name, runs in rows for k, run in enumerate(runs)]


def _rows_by_method(numbers: Numbers) -> list[Record]:
    rows = levels(numbers, "method")
    return [{("used_std" if name == "spread" else name): value for name, value in row.items()} for row in rows]


def _correlation(numbers: Numbers) -> list[Record]:
    rows = zip(numbers["widths"], numbers["matrix"], strict=True)
    ends = numbers["smallest"].items()
    return [
        *({"width": width, "correlations": row} for width, row in rows),
        *({"correlation above": float(above), "smallest": width} for above, width in ends),
    ]


def _annotators(numbers: Numbers) -> list[Record]:
    codes = ((kind, zip(code["nats"], code["used"], strict=True)) for kind, code in numbers["codes"].items())
    return [
        {"model": "optimum"} | numbers["truth"],
        *levels(numbers["models"], "model"),
        *(
            {"code": kind, "dimension": k, "nats": n, "used": u}
            for kind, use in codes
            for k, (n, u) in enumerate(use, 1)
        ),
    ]


def _masks(numbers: Numbers) -> list[Record]:
    records = []
    for k, pixels in enumerate(numbers["images"]):
        records.append({"image": k, "shape": numbers["shape"], "pixels": pixels})
        records += [{"image": k, "model": name, "masks": groups[k]} for name, groups in numbers["masks"].items()]
    return records


def _generation(numbers: Numbers) -> list[Record]:
    data = {"data": numbers["data"]}
    records = []
    for name, row in numbers["methods"].items():
        for percent, runs in row.items():
            names = data | {"method": name, "code, %": int(percent)}
            records += [names | {"seed": k} | run for k, run in enumerate(runs)]
    orders = [data | {"order": name, "errors": errors} for name, errors in numbers["order"].items()]
    facts = {name: numbers[name] for name in ("network", "accuracy", "images")}
    return [*records, *orders, data | facts | numbers["real"]]


def _pictures(numbers: Numbers) -> list[Record]:
    return [{"picture": p, "lengths": numbers["lengths"]} | numbers[p] for p in ("new", "again", "tree")]


def _seeds(numbers: Numbers) -> list[Record]:
    return [{"method": name} | flat(seed) for name, row in numbers.items() for seed in row["seeds"]]


def _epochs(numbers: Numbers) -> list[Record]:
    return list(numbers["epochs"])


def _sparse(numbers: Numbers) -> list[Record]:
    names = {
        "full ensemble": "ensemble",
        "means alone": "deterministic",
        "zero means": "zero means",
        "permuted deviations": "permuted scales",
    }
    return [*numbers["thresholds"], *({"network": name, "accuracy": numbers[old]} for name, old in names.items())]


def _adversarial(numbers: Numbers) -> list[Record]:
    return [
        {"method": name, "step": step} | {curve: values[step] for curve, values in curves.items()}
        for name, curves in numbers["curves"].items()
        for step in range(len(curves["success"]))
    ]


CONVERTERS: dict[str, Callable[[Numbers], list[Record]]] = {
    "growth": _growth,
    "components": lambda numbers: list(levels(numbers, "method", "seed")),
    "disagreement": lambda numbers: list(levels(numbers, "method", "seed")),
    "x-cubed": _x_cubed,
    "noise": lambda numbers: list(levels(next(iter(numbers.values())), "noise", "method", "seed")),
    "overhead": lambda numbers: list(levels(numbers, "method", "net")),
    "sample-size": lambda numbers: list(levels(numbers, "method", "seed")),
    "uci": _uci,
    "ehr": _ehr,
    "text-reviews": _text,
    "pretrained": _pretrained,
    "widths": _widths,
    "times": _times,
    "limited": _rows_by_method,
    "student": _rows_by_method,
    "correlation": _correlation,
    "annotators": _annotators,
    "masks": _masks,
    "generation": _generation,
    "pictures": _pictures,
    "table1": _seeds,
    "parameterizations": _seeds,
    "transition": _epochs,
    "criterion": _epochs,
    "sparse": _sparse,
    "adversarial": _adversarial,
}
"""By name of the study, or its first words."""


def main(paths: list[str]) -> int:
    """Rewrite old files in place."""
    for path in map(Path, paths):
        study = json.loads(path.read_text(encoding="utf-8"))
        if "numbers" in study:
            study["records"] = convert(path.stem, study.pop("numbers"))
            path.write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
