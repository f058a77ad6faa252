"""Shared fixtures: one thread, a restored generator, and where the real data are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.fixtures.comparison import comparison as comparison
from tests.fixtures.comparison import trained as trained

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    """Start every test from the same state of torch's generator, and restore it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def data_root() -> Path:
    """Return the folder with the real data sets, or skip."""
    root = os.environ.get("LEANBAYES_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("needs the data folder: set LEANBAYES_DATA")
    return Path(root)


def pytest_configure(config):
    """Let tests of all methods use networks too small to have a stream that could be ordered, and plain networks."""
    config.addinivalue_line("filterwarnings", "ignore:NestedDropout adds only noise here")
    config.addinivalue_line("filterwarnings", "ignore:NestedDropout. of .* weights width")
    config.addinivalue_line("filterwarnings", "ignore:this network has no stochastic layer")
    config.addinivalue_line("filterwarnings", "ignore:ModelPatch found no norms in this network")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a worker whole files and groups: a fixture of a module is made once, a slow library imported once."""
    from xdist.scheduler import LoadGroupScheduling

    class FilesAndGroups(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return nodeid.split("::")[0] if scope == nodeid else scope

    return FilesAndGroups(config, log)
