"""Every suite of `leanbayes reproduce` at its quick budget: the numbers of its tables and studies, and its runs.

Sentences have a record of their own: they may be written otherwise while the numbers stay.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.golden import digest
from tests.golden.compare import call, without_machine

NAMES = (
    "patch-overhead", "patch-uci", "patch-samples", "implicit-pretrained", "variance-criterion",
    "variance-adversarial", "variance-table1", "variance-parameterizations", "nested-limited", "nested-widths",
    "nested-student", "nested-generation", "nested-annotators", "rank1-ehr", "text-reviews", "rank1-cifar",
    "implicit-noise", "implicit-complexity", "rank1-ablations", "implicit-cifar",
)  # fmt: skip
"""The suites, those that are done in seconds first."""

TIMED = "times"
"""How the studies begin that measure times alone."""


def record(name: str) -> digest.Records:
    """Return the records of one suite, run from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        code = call(["reproduce", name, "--budget", "quick", "--device", "cpu", "--out", "out"], Path(folder))
        return {"exit": str(code), **read(Path(folder) / "out")}


def read(out: Path) -> digest.Records:
    """Return the records of a suite's folder."""
    page = out / "reproduce.json"
    if not page.is_file():
        return {"page": "missing"}
    suite = without_machine(_json(page))
    records = _page(suite)
    for path in sorted(out.rglob("*.json")):
        name = str(path.relative_to(out).with_suffix(""))
        if path.parent.name == "studies":
            study = _json(path)
            found = without_machine(study.pop("records"))
            records |= {} if path.stem.startswith(TIMED) else {f"{name}/records": digest.data(found)}
            records[f"{name}/of"] = str(study.pop("of"))
            suite[name] = study
        elif path.name == "result.json":
            records |= _run(path)
        elif path.name not in ("reproduce.json", "job.json"):
            records[name] = digest.data(without_machine(_json(path)))
    return records | {"sentences": digest.data(suite)}


def _page(suite: dict[str, Any]) -> digest.Records:
    """Return the records of a suite's page, and take its numbers out of it."""
    records = {"seeds": digest.data(suite.pop("seeds"))}
    for number, table in enumerate(suite["tables"]):
        records[f"table {number}"] = digest.data(table.pop("rows"))
    for study in suite["studies"]:
        name = Path(study["file"]).stem
        rows = [table.pop("rows") for table in study["tables"]]
        if not name.startswith(TIMED):
            records[f"tables/{name}"] = digest.data(rows)
    return records


def _run(path: Path) -> digest.Records:
    result, model = _json(path), path.parent / "model.safetensors"
    numbers = without_machine([result["metrics"], result["figures"], result["history"]])
    name = "/".join(path.parent.parts[-4:])
    records = {f"{name}/id": result["id"], f"{name}/status": result["status"], f"{name}/numbers": digest.data(numbers)}
    return records | ({f"{name}/model": digest.tensors(load_file(model))} if model.is_file() else {})


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
