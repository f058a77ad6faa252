"""The package itself: a light import, a small public page, the import order of methods."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest

import leanbayes as lb
from leanbayes.methods import all_methods

ROOT = Path(__file__).parents[1]

HEAVY = (
    "matplotlib", "sklearn", "rich", "scipy", "torchmetrics", "lightning_fabric", "onnx", "pandas", "torchvision",
    "torch._dynamo", "torch._inductor", "transformers", "tyro", "PIL", "jinja2", "ray",
)  # fmt: skip


def test_import_is_light_and_silent():
    core = [name for name, home in lb._HOME.items() if not home.startswith(("leanbayes.training", "leanbayes.eval"))]
    code = "import sys; import torch; before = set(sys.modules); from leanbayes import " + ", ".join(core)
    code += "; print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert not [name for name in loaded if name.startswith(HEAVY)]
    others = [name for name in loaded if not name.startswith("leanbayes")]
    assert len(others) < 20
    assert len(loaded) - len(others) <= 80
    assert run.stderr == ""


def test_a_training_on_one_device_imports_no_fabric():
    code = "import sys, torch, leanbayes as lb; from torch import nn; x, y = torch.randn(8, 2), torch.zeros(8).long(); "
    code += "net = lb.convert(nn.Linear(2, 2), lb.Rank1()); "
    code += "lb.fit(net, (x, y), lb.Recipe(epochs=1, accelerator='cpu'), progress=False); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = ("lightning_fabric", "pytorch_lightning", "torchmetrics", "transformers", "matplotlib", "sklearn", "pandas")
    assert not [name for name in run.stdout.split() if name.startswith(slow)]


def test_the_package_is_imported_before_torch_is():
    code = "import sys; import leanbayes; print('torch' in sys.modules); leanbayes.Rank1; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


def test_inner_packages_are_there_without_an_import():
    code = "import leanbayes as lb; lb.methods.all_methods, lb.core, lb.runtime, lb.training.Recipe, lb.distributions"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_name_of_a_package_hides_a_module():
    packages = [path.parent for path in sorted((ROOT / "src").rglob("__init__.py"))]
    for package in packages:
        name = ".".join(package.relative_to(ROOT / "src").parts)
        inside = importlib.import_module(name)
        for path in package.iterdir():
            inner = path.stem if path.suffix == ".py" else path.name
            is_module = path.suffix == ".py" or (path / "__init__.py").exists()
            if is_module and not inner.startswith("__"):
                assert isinstance(vars(inside).get(inner, sys), ModuleType), f"{name}.{inner}"


def test_the_public_page_is_small_and_documented():
    public = [name for name in lb.__all__ if callable(getattr(lb, name))]
    assert len(public) <= 35
    assert all(getattr(lb, name).__doc__ for name in public)


def readme_names():
    """Return the names in the README's table of the public page, `lb.` left out."""
    table = (ROOT / "README.md").read_text().partition("The public page is small:")[2].partition("\n\n**")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name.removeprefix("lb.") for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_the_public_page_is_what_the_readme_lists():
    assert set(lb.__all__) == readme_names()
    assert len(lb.__all__) == len(set(lb.__all__))
    assert dir(lb) == sorted([*lb.__all__, "__version__"])
    assert all(getattr(lb, name) is not None for name in lb.__all__)
    found: dict[str, object] = {}
    exec("from leanbayes import *", found)
    assert set(lb.__all__) <= set(found)


def test_inner_modules_are_importable_though_not_offered():
    assert lb.metrics.accuracy
    assert lb.training.Recipe is lb.Recipe
    assert "sampling" not in dir(lb)


def test_methods_are_found_by_scanning_and_named():
    assert {"rank1", "batch_ensemble", "implicit", "patch"} <= set(all_methods())
    for name, kind in all_methods().items():
        assert kind.name == name
        assert kind().fields() == json.loads(json.dumps(kind().fields()))
        assert kind(**kind().fields()) == kind()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CALLS = ("import_module", "importlib.import_module", "pytest.importorskip")
ALTERNATIVES = "PACKAGES"  # a module's tuple of names under which one library may be installed


def normalised(requirement):
    """Return the name in a requirement such as `torch>=2.4`, in the one spelling that packaging has for it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def declared(*extras):
    """Return the packages of `dependencies`, or of extras with the extras that they name."""
    groups = PROJECT["optional-dependencies"]
    wanted = [each for extra in extras for each in groups[extra]] if extras else PROJECT["dependencies"]
    inner = [re.findall(r"\[(\w+)\]", each) for each in wanted]
    found = {normalised(each) for each, names in zip(wanted, inner, strict=True) if not names}
    return found.union(*(declared(name) for names in inner for name in names))


def package_of(module):
    """Return the package that has a module; one that is not installed is taken to be called like it."""
    root = module.partition(".")[0]
    having = [normalised(package) for package in installed().get(root, [])]
    return normalised(root) if normalised(root) in having or not having else having[0]


installed = functools.cache(packages_distributions)


def nodes(tree):
    """Yield every node of a module, with whether it stands inside a function."""
    waiting = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        yield node, inside
        inside = inside or isinstance(node, ast.FunctionDef)
        waiting += [(inner, inside) for inner in ast.iter_child_nodes(node)]


def imports(folder):
    """Return what the files of a folder import: at their top level, inside functions, and as sets of alternatives."""
    top, lazy, either = set(), set(), []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node, inside in nodes(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                (lazy if inside else top).update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                (lazy if inside else top).add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
                lazy.update(each.value for each in node.args if isinstance(each, ast.Constant))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ALTERNATIVES:
                either.append(set(map(package_of, ast.literal_eval(node.value))))
    return third_party(top), third_party(lazy), either


def third_party(modules):
    own = {"leanbayes", "leanbayes_papers", "tests", "examples", "benchmarks", "tools", *sys.stdlib_module_names}
    own.add("triton")  # comes with torch's builds for GPUs, and is not imported elsewhere
    return {package_of(module) for module in modules if module.partition(".")[0] not in own}


def test_dependencies_are_those_that_are_imported():
    """Required: all that is imported, but for what an extra brings; top-level imports are never left to an extra."""
    top, lazy, either = imports("src")
    required, extras = declared(), declared(*(set(PROJECT["optional-dependencies"]) - {"dev"}))
    assert not required & extras
    assert top - required == set()
    assert lazy - required - extras == set()
    assert [names for names in either if not names & (required | extras)] == []
    assert required - top - lazy - set().union(*either) == set()
    assert "torchmetrics" not in required


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "tools"])
def test_the_dev_extra_has_what_tests_and_tools_import(folder):
    top, lazy, _ = imports(folder)
    others = {"timm", "torchvision"} if folder == "tools" else set()  # of `make sweep`, which has its own environment
    others |= declared("loggers") if folder == "tests" else set()  # their tests are skipped without them
    assert (top | lazy) - declared() - declared("dev") - others == set()


def test_the_tests_of_ray_have_ray():
    assert "ray" in declared("dev")


def test_every_package_that_is_tested_with_is_pinned_once():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [normalised(line) for line in lines if "==" in line]
    assert len(pinned) == len(lines) == len(set(pinned))
    assert (declared() | declared("dev")) - set(pinned) == set()


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", lb.__version__)
    assert f"## [{lb.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_metadata_names_python_and_the_licence():
    assert PROJECT["license"] == "Apache-2.0"
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in PROJECT["classifiers"]


def test_the_source_archive_has_what_its_tests_read():
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    for folder in ("tests", "docs", "examples", "benchmarks", "tools"):
        assert f"graft {folder}" in lines
    (files,) = [line.split()[1:] for line in lines if line.startswith("include ")]
    assert {"CHANGELOG.md", "constraints.txt", "Makefile", "CONTRIBUTING.md"} <= set(files)
    assert all((ROOT / file).is_file() for file in files)
