"""Try every layer method on many networks of timm, torchvision and transformers: `make sweep`.

    python -m tools.network_sweep --out runs/sweep [--only 'timm/*'] [--workers 2]

Networks are built from configuration, with random weights; nothing is downloaded. Each network runs in a process of its
own and leaves one JSON file; a second run continues with those that are missing. For each network and method:

* `draw`: a pass inside `lb.draws` equals the network of `lb.draw` (relative difference in float32, eval mode). Where
  float32 itself is further off, since the network of the draw differs more from its own float64 copy, pass and draw are
  compared in float64;
* `step`: a training step has a finite loss, and every posterior parameter of a layer that is used has a gradient; a
  layer that has none in the plain network either is not counted;
* `rows`: other noise for one row changes the outputs of that row alone, and other contents of the other rows change
  nothing in it;
* or the conversion is refused in a sentence that names a remedy.

`sweep_networks.toml` lists the networks, and the families that are left out, with reasons.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.sweep_catalogue import catalogue, declare_missing_operators, LIBRARIES, ROWS, unlisted, versions

ROOT = Path(__file__).parents[1]
METHODS = (
    "rank1 batch_ensemble implicit patch variance nested mc_dropout dropconnect mean_field".split()  # noqa: SIM905
)
PER_ROW = ("rank1", "batch_ensemble", "implicit", "mc_dropout")
TOLERANCE = 1e-4
TOLERANCE_OF_DOUBLES = 1e-8
SECONDS = 900
LONGEST_REFUSAL = 900
REMEDIES = ("where=", "batch_axis", "example=", "name what to convert", "use ", "pass ", "take ", "other methods")


def main() -> int:
    """Run the networks that have no result yet, and print a summary of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="folder of the results")
    parser.add_argument("--only", default="*", help="glob on names such as timm/resnet18")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return run_one(options.one, options.methods.split(","), options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in catalogue() if fnmatch.fnmatch(name, options.only)]
    waiting = [name for name in names if not file_of(options.out, name).is_file()]
    with ThreadPoolExecutor(options.workers) as pool:
        for name, line in zip(waiting, pool.map(lambda name: in_process(name, options), waiting), strict=True):
            print(f"{name}: {line}", flush=True)
    report = summarise(options.out, names) | {"versions": versions(), "unlisted": unlisted()}
    (options.out / "summary.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({key: value for key, value in report.items() if key != "faults"}, indent=1))
    for fault in report["faults"]:
        print("fault:", fault)
    return 1 if report["faults"] else 0


def file_of(out: Path, name: str) -> Path:
    """Return where the result of a network is."""
    return out / f"{name.replace('/', '-')}.json"


def in_process(name: str, options: argparse.Namespace) -> str:
    """Run one network in a process of its own."""
    arguments = ["--one", name, "--out", str(options.out.resolve()), "--methods", options.methods]
    command = [sys.executable, "-m", "tools.network_sweep", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        message = f"took more than {SECONDS} seconds"
    else:
        if file_of(options.out, name).is_file():
            return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "done"
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
    file_of(options.out, name).write_text(json.dumps({"name": name, "failed": message}))
    return f"failed: {message}"


def run_one(name: str, methods: list[str], out: Path) -> int:
    """Build a network, try all methods on it, and write the result."""
    import torch

    from leanbayes.evaluation.result import commit

    declare_missing_operators()
    start = time.process_time()
    torch.manual_seed(0)
    spec = catalogue()[name]
    net, inputs = LIBRARIES[name.split("/")[0]](name.split("/", 1)[1], spec)
    size = sum(p.numel() for p in net.parameters())
    result: dict[str, Any] = {"name": name, "commit": commit(), "parameters": size, "methods": {}}
    for method in methods:
        begun = time.process_time()
        result["methods"][method] = attempt(net, inputs, method) | {"seconds": time.process_time() - begun}
    result["seconds"] = time.process_time() - start
    file_of(out, name).write_text(json.dumps(result, indent=1))
    words = [f"{method} {outcome(found)}" for method, found in result["methods"].items()]
    print(f"{result['seconds']:.0f} s: {', '.join(words)}")
    return 0


def attempt(net: Any, inputs: dict[str, Any], name: str) -> dict[str, Any]:
    """Try one method on a network; an error that is not a refusal is a fault."""
    import leanbayes as lb
    from leanbayes.methods import all_methods

    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            bnn = lb.convert(net, all_methods()[name]())
            counted = lb.summary(bnn)
            found |= {"headline": counted.headline, "covered": getattr(counted, "covered", None)}
            found |= norms(bnn)
            found |= draw_difference(bnn, inputs)
            found |= training_step(bnn, inputs, net)
            if name in PER_ROW:
                found |= row_changes(bnn, inputs)
        except (ValueError, TypeError) as error:
            found["refused"] = str(error)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["where"] = traceback.format_exc()[-1500:]
    found["warnings"] = [str(w.message) for w in caught if "leanbayes" in str(w.filename) or "lb." in str(w.message)][
        :5
    ]
    return found


def norms(bnn: Any) -> dict[str, int]:
    """Count the norms of a network, and those that a method has converted."""
    import leanbayes as lb

    converted = [layer for _, layer in lb.stochastic_layers(bnn) if "Norm" in type(layer.base).__name__]
    inside = {id(layer.base) for layer in converted}
    all_norms = [
        m for m in bnn.modules() if "Norm" in type(m).__name__ and any(True for _ in m.parameters(recurse=False))
    ]
    return {"norms": len({id(m) for m in all_norms}), "norms_converted": len(inside)}


def draw_difference(bnn: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Return how much a pass of a draw and the network of the draw differ, relative to the size of the outputs.

    Where this is too much, the answer also has the difference in float64, and how far the network of the draw, which
    has no layer of leanbayes, is from its own float64 copy.
    """
    bnn.eval()
    worst = {"draw": max(pass_against_draw(bnn, inputs, index)[0] for index in range(2))}
    if worst["draw"] > TOLERANCE:
        double, exact = copy.deepcopy(bnn).double(), doubled(inputs)
        worst["draw_in_float64"] = max(pass_against_draw(double, exact, index)[0] for index in range(2))
        drawn = [pass_against_draw(bnn, inputs, index)[1] for index in range(2)]
        worst["rounding"] = max(rounding(net, inputs) for net in drawn)
    return worst


def pass_against_draw(bnn: Any, inputs: dict[str, Any], index: int) -> tuple[float, Any]:
    """Return the difference of one draw, and the network of the draw."""
    import torch

    import leanbayes as lb

    with torch.no_grad():
        with lb.draws(bnn, seed=0, index=index):
            torch.manual_seed(0)
            one = outputs(bnn, inputs)
        drawn = lb.draw(bnn, seed=0, index=index).eval()
        torch.manual_seed(0)
        other = outputs(drawn, inputs)
    return farthest(one, other), drawn


def rounding(net: Any, inputs: dict[str, Any]) -> float:
    """Return how far a network in float32 is from the same network in float64."""
    import torch

    with torch.no_grad():
        torch.manual_seed(0)
        single = outputs(net, inputs)
        torch.manual_seed(0)
        return farthest(single, outputs(copy.deepcopy(net).double(), doubled(inputs)))


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs with all floating tensors in float64."""
    return {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}


def training_step(bnn: Any, inputs: dict[str, Any], net: Any) -> dict[str, Any]:
    """Return the loss of a training step, and the parameters that should have a gradient and have none."""
    import leanbayes as lb

    loss = backward(bnn, inputs)
    layers = [(path, layer) for path, layer in lb.stochastic_layers(bnn) if layer.used is not False]
    without = {path: [name for name, p in layer.posterior.named_parameters() if is_still(p)] for path, layer in layers}
    idle = without_gradient(net, inputs) if any(without.values()) else set()
    bnn.zero_grad()
    return {
        "loss": loss,
        "without_gradient": [f"{path}.{name}" for path, names in without.items() if path not in idle for name in names][
            :5
        ],
        "idle": sum(path in idle for path in without),
        "unused": sum(layer.used is False for _, layer in lb.stochastic_layers(bnn)),
        "one_draw": sum(
            str(layer.layout) == "Layout(axis=None, tiled=False)" for _, layer in lb.stochastic_layers(bnn)
        ),
    }


def backward(net: Any, inputs: dict[str, Any]) -> float:
    """Compute the gradients of a training step, and return its loss; the KL divergence of a plain network is 0."""
    import torch

    import leanbayes as lb

    net.train()
    torch.manual_seed(0)
    loss = sum(y.float().square().mean() for y in outputs(net, inputs)) + lb.kl(net) / 1e6
    loss.backward()
    return float(loss)


def is_still(parameter: Any) -> bool:
    """Return whether a parameter has no gradient, or zeros: layers of one method are sampled together."""
    return parameter.grad is None or not bool(parameter.grad.any())


def without_gradient(net: Any, inputs: dict[str, Any]) -> set[str]:
    """Return the paths of layers whose parameters all have no gradient in a training step of the plain network."""
    plain = copy.deepcopy(net)
    plain.zero_grad()
    backward(plain, inputs)
    owned = {path: list(layer.parameters(recurse=False)) for path, layer in plain.named_modules()}
    return {path for path, own in owned.items() if own and all(map(is_still, own))}


def row_changes(bnn: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Return the change of the other rows' outputs under other noise for one row, and of a row under other rows."""
    import torch

    import leanbayes as lb

    bnn.eval()
    permuted = {
        key: x[[0, 1, 3, 2]] if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == ROWS else x
        for key, x in inputs.items()
    }
    with torch.no_grad():
        base, _ = passes(bnn, inputs, other_noise=False)
        other_noise, row = passes(bnn, inputs, other_noise=True)
        other_rows, _ = passes(bnn, permuted, other_noise=False)
        with lb.draws(bnn, mean=True):
            torch.manual_seed(3)
            straight = outputs(bnn, inputs)
            torch.manual_seed(3)
            turned = outputs(bnn, permuted)
    # An output whose row depends on the other rows without any noise is no output of single rows.
    alone = [
        y.dim() and y.shape[0] == ROWS and relative(y[1], z[1]) <= TOLERANCE
        for y, z in zip(straight, turned, strict=True)
    ]
    per_row = [k for k, single in enumerate(alone) if single]
    keep = [other for other in range(ROWS) if other != row]
    leak = max((relative(base[k][keep], other_noise[k][keep]) for k in per_row), default=0.0)
    moved = max((relative(base[k][row], other_noise[k][row]) for k in per_row), default=0.0)
    mixed = max((relative(base[k][1], other_rows[k][1]) for k in per_row), default=0.0)
    return {"noise_leak": leak, "noise_moves": moved, "rows_mixed": mixed}


def passes(bnn: Any, inputs: dict[str, Any], *, other_noise: bool) -> tuple[list[Any], int]:
    """Run a pass with fixed noise, and return its outputs and a row, whose noise and component may be others.

    The row is not the one whose draw serves the whole batch where a layer sees no rows.
    """
    import torch

    from leanbayes.distributions.assignment import Assignment
    from leanbayes.runtime.passes import states_of

    rows: list[int] = []

    def change(module: Any, args: Any, kwargs: Any) -> None:
        for state, _ in states_of(bnn):
            row = (state.key % ROWS + 1) % ROWS
            rows.append(row)
            if not other_noise or state.component is None:
                continue
            generator = torch.Generator().manual_seed(9)
            component = state.component.rows().clone()
            component[row] = (component[row] + 1) % state.components
            state.component = Assignment(component)
            for parts in state.noise.values():
                for part in parts:
                    if len(part) == ROWS and part.numel():
                        part[row] = torch.randn(part[row].shape, generator=generator).to(part).abs() % 1
            state.variables = {}  # they were sampled from the noise of before

    handle = bnn.register_forward_pre_hook(change, with_kwargs=True)
    try:
        torch.manual_seed(3)
        return [y.clone() for y in outputs(bnn, inputs)], rows[0]
    finally:
        handle.remove()


def outputs(net: Any, inputs: dict[str, Any]) -> list[Any]:
    """Return all floating tensors of an output."""
    from leanbayes.runtime.batches import tensors_in

    given = {key: x.clone() if callable(getattr(x, "clone", None)) else x for key, x in inputs.items()}
    positional = [given.pop(key) for key in sorted(given) if key.startswith("_")]
    return [y for y in tensors_in(net(*positional, **given)) if y.is_floating_point() and y.numel()]


def relative(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12))


def farthest(some: list[Any], others: list[Any]) -> float:
    """Return the largest relative difference of two lists of tensors."""
    return max(relative(a, b) for a, b in zip(some, others, strict=True))


def outcome(found: dict[str, Any]) -> str:
    """Return one word for a result: the fault, or that all is well."""
    if "refused" in found:
        return "UNHELPFUL" if unhelpful(found) else "refused"
    if "error" in found:
        return "ERROR"
    checks = {
        "DRAW": not (found["draw"] <= TOLERANCE or beyond_float32(found)),
        "LOSS": not abs(found["loss"]) < float("inf"),
        "GRADIENT": bool(found["without_gradient"]),
        "ROWS": found.get("noise_leak", 0) > TOLERANCE or found.get("rows_mixed", 0) > TOLERANCE,
    }
    return "+".join(name for name, wrong in checks.items() if wrong) or "ok"


def beyond_float32(found: dict[str, Any]) -> bool:
    """Return whether float32 cannot tell a pass from its draw, and float64 shows them to be equal."""
    return found.get("rounding", 0) > TOLERANCE and found["draw_in_float64"] <= TOLERANCE_OF_DOUBLES


def unhelpful(found: dict[str, Any]) -> bool:
    """Return whether a refusal is no sentence with a remedy."""
    text = found.get("refused", "")
    return len(text) > LONGEST_REFUSAL or not any(word in text for word in REMEDIES)


def summarise(out: Path, names: list[str]) -> dict[str, Any]:
    """Return counts over all networks and methods, the coverage, and every fault by name."""
    results = [json.loads(file_of(out, name).read_text()) for name in names if file_of(out, name).is_file()]
    whole = [result for result in results if "methods" in result]
    pairs = [(r["name"], method, found) for r in whole for method, found in r["methods"].items()]
    counts = Counter(outcome(found) for _, _, found in pairs)
    covered = [r["methods"]["rank1"]["covered"] for r in whole if r["methods"].get("rank1", {}).get("covered")]
    timm = [r["methods"]["patch"] for r in whole if r["name"].startswith("timm/") and "patch" in r["methods"]]
    normed = [found for found in timm if found.get("norms", 0) > 0]
    faults = [f"{r['name']}: {r['failed']}" for r in results if "failed" in r]
    faults += [f"{name}, {method}: {outcome(found)} {found.get('error', found.get('refused', ''))}"[:300]
               for name, method, found in pairs if outcome(found) not in ("ok", "refused")]  # fmt: skip
    return {
        "networks": len(whole),
        "commits": Counter(r.get("commit", "unknown") for r in whole),
        "by_library": Counter(r["name"].split("/")[0] for r in whole),
        "pairs": len(pairs),
        "outcomes": counts,
        "refused_by_method": Counter(method for _, method, found in pairs if outcome(found) == "refused"),
        "compared_in_float64": [f"{name}, {method}" for name, method, found in pairs if "draw_in_float64" in found],
        "median_share_of_weights_rank1": statistics.median(covered) if covered else None,
        "timm_networks_with_norms": len(normed),
        "timm_networks_whose_norms_are_patched": sum(
            found.get("norms_converted", 0) >= 0.9 * found["norms"] for found in normed
        ),
        "cpu_minutes": sum(r["seconds"] for r in whole) / 60,
        "faults": faults,
    }


if __name__ == "__main__":
    sys.exit(main())
