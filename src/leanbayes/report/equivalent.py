"""How many networks of a deep ensemble is a method worth?"""

from __future__ import annotations

from leanbayes.metrics import ensemble_equivalent
from leanbayes.report.columns import Key
from leanbayes.report.estimate import Estimate
from leanbayes.report.load import Contender, Group

ENSEMBLE = "deep_ensemble"  # whole copies of the network: what others are measured in
SIGNS = {"at least": "≥ ", "at most": "≤ ", "": ""}


def ensemble_equivalents(group: Group, estimates: list[dict[Key, Estimate]]) -> list[Estimate | None]:
    """Measure every contender in networks of a deep ensemble with the same calibrated NLL.

    The curve, a + b / K between two measured sizes K, goes through the plain network, which is an ensemble of one, and
    the ensembles of the group; without both there is none.
    """
    scores = [found.get(("test", "cnll")) for found in estimates]
    known = [(c, score) for c, score in zip(group.contenders, scores, strict=True) if score is not None]
    curve = {size: score.mean for contender, score in known if (size := _networks(contender))}
    if 1 not in curve or len(curve) < 2:
        return [None for _ in estimates]
    found = [None if score is None else ensemble_equivalent(score.mean, curve) for score in scores]
    return [None if e is None else Estimate(e.networks, None, 1, SIGNS[e.bound]) for e in found]


def _networks(contender: Contender) -> int | None:
    """Return how many independent networks a contender consists of; None for methods inside one network."""
    if contender.is_reference:
        return 1
    size = contender.runs[0].fields.get("components")
    return size if contender.name == ENSEMBLE and isinstance(size, int) and size > 0 else None
