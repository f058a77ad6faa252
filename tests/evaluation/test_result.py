"""Provenance: the commit is that of leanbayes or none; the commit of a user's project has a name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import leanbayes
from leanbayes.evaluation import result as results

PACKAGE = Path(leanbayes.__file__).parent
TOP = PACKAGE.parent.parent
ASK = "import sys; sys.path.insert(0, {!r}); from leanbayes.evaluation import result; print(result.commit())"


def git(folder, *arguments):
    said = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(said, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder):
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def asked_again(monkeypatch):
    monkeypatch.delenv("LEANBAYES_COMMIT", raising=False)
    results.commit.cache_clear()
    results.project_commit.cache_clear()
    yield
    results.commit.cache_clear()
    results.project_commit.cache_clear()


@pytest.mark.skipif(not (TOP / ".git").exists(), reason="the source lies outside of its repository")
def test_the_commit_of_the_source_is_recorded():
    assert results.commit().removesuffix("+") == git(TOP, "rev-parse", "HEAD")


@pytest.mark.parametrize("place", [".venv/lib/site-packages", "src", "vendor/src"])
def test_a_copy_inside_another_project_has_no_commit(place, tmp_path, monkeypatch):
    repository(tmp_path / "project")
    copy = tmp_path / "project" / place / "leanbayes" / "evaluation" / "result.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(results.__file__, copy)
    (tmp_path / "project" / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    monkeypatch.setattr(results, "__file__", str(copy))
    assert results.commit() == "unknown"


def test_a_copy_of_the_whole_repository_has_the_commit_of_the_copy(tmp_path, monkeypatch):
    head = repository(tmp_path / "leanbayes")
    copy = tmp_path / "leanbayes" / "src" / "leanbayes" / "evaluation" / "result.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(results.__file__, copy)
    (tmp_path / "leanbayes" / "pyproject.toml").write_text('[project]\nname = "leanbayes"\n')
    monkeypatch.setattr(results, "__file__", str(copy))
    assert results.commit() == head
    installed = tmp_path / "leanbayes" / ".venv" / "leanbayes" / "evaluation" / "result.py"
    shutil.copytree(copy.parent, installed.parent)
    monkeypatch.setattr(results, "__file__", str(installed))
    results.commit.cache_clear()
    assert results.commit() == "unknown"


def test_outside_of_any_repository_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(results, "__file__", str(tmp_path / "evaluation" / "result.py"))
    monkeypatch.chdir(tmp_path)
    assert results.commit() == "unknown"
    assert results.project_commit() is None


def test_a_project_has_a_commit_of_its_own(tmp_path, monkeypatch):
    head = repository(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    assert results.project_commit() == head
    (tmp_path / "project" / "file").touch()
    git(tmp_path / "project", "add", "file")
    results.project_commit.cache_clear()
    assert results.project_commit() == head + "+"


@pytest.mark.parametrize("text", ["[project", "project = 5", '[project]\nname = ["leanbayes"]\n'])
def test_a_damaged_pyproject_is_not_ours(text, tmp_path):
    (tmp_path / "pyproject.toml").write_text(text)
    assert not results._is_leanbayes(tmp_path)


def test_our_own_repository_is_no_project(monkeypatch):
    monkeypatch.chdir(TOP)
    assert results.project_commit() is None


@pytest.mark.slow  # a whole copy of the package, in a process of its own
def test_a_package_that_is_installed_below_a_project(tmp_path):
    repository(tmp_path / "p")
    site = tmp_path / "p" / ".venv" / "site"
    shutil.copytree(PACKAGE, site / "leanbayes")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(str(site))], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "unknown"


def test_processes_are_said_by_the_launcher_else_by_the_recipe():
    assert results.processes_of({}) == 1
    assert results.processes_of({"recipe": {"devices": 2, "nodes": 3}}) == 6
    assert results.processes_of({"recipe": {"devices": 2, "nodes": 3}, "processes": 4}) == 4
    assert results.processes_of({"recipe": "damaged", "processes": "damaged"}) == 1
    assert results.processes_of({"recipe": {"devices": None}}) == 1


def test_the_first_setting_that_differs_is_named():
    one = {"recipe": {"lr": 0.1, "devices": 1}, "where": ["a"]}
    assert results.difference(one, one) == ""
    assert results.difference(one, one | {"recipe": {"lr": 0.2, "devices": 1}}) == "recipe.lr: 0.1 there, 0.2 now"
    assert results.difference(one, one | {"processes": 2}) == "processes: 1 there, 2 now"
    assert results.difference(one | {"more": 1}, one) == "a newer format"
    assert results.difference({}, one) == "recipe.lr: None there, 0.1 now"
