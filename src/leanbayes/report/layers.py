"""Which layers carry the method of a contender, as far as its runs tell."""

from __future__ import annotations

from dataclasses import dataclass

from leanbayes.coverage import percent
from leanbayes.report.load import Contender, Group, Run


@dataclass(frozen=True)
class Layers:
    """What conversion did to one contender's network.

    Attributes:
        contender: who.
        sentence: how many layers were converted, of how many.
        skipped: a line for every layer with parameters that stayed as it was: its path, its kind, the reason.
    """

    contender: Contender
    sentence: str
    skipped: tuple[str, ...]


def converted_layers(group: Group) -> list[Layers]:
    """Tell of every contender but the plain network, which has no layer to convert; old results do not say."""
    found = (_layers(contender) for contender in group.contenders if not contender.is_reference)
    return [layers for layers in found if layers]


def _layers(contender: Contender) -> Layers | None:
    """Read the first run that tells: all seeds of a contender convert the same network."""
    for run in contender.runs:
        converted, total = (run.part("cost", "layers", name) for name in ("converted", "total"))
        if isinstance(converted, int) and isinstance(total, int):
            skipped = run.part("cost", "layers", "skipped")
            lines = tuple(str(line) for line in skipped) if isinstance(skipped, list) else ()
            return Layers(contender, _sentence(run, converted, total), lines)
    return None


def _sentence(run: Run, converted: int, total: int) -> str:
    """Return the share of weights and layers that carry the method; older results count layers of all kinds."""
    eligible, things, covered = (run.part("cost", "layers", name) for name in ("eligible", "things", "covered"))
    if not isinstance(eligible, int) or not isinstance(things, str):
        return f"{converted} of {total} layers converted"
    share = f"{percent(covered)} of the weights, " if isinstance(covered, (int, float)) else ""
    return f"{share}{converted} of {eligible} {things} converted"
