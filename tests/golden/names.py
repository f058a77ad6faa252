"""Names of leanbayes that the golden numbers use and that are on no public page: a move edits this file alone."""

from __future__ import annotations

from leanbayes.data import ood as ood_inputs
from leanbayes.methods import all_methods

__all__ = ["all_methods", "ood_inputs"]
