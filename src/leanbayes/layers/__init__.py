"""Layer families (channels, linear maps), layer selectors and activation exchange."""

from leanbayes.layers.family import Family as Family
from leanbayes.layers.family import family_of as family_of
from leanbayes.layers.family import register as register
from leanbayes.layers.select import Abs as Abs
from leanbayes.layers.select import activate as activate
from leanbayes.layers.select import first as first
from leanbayes.layers.select import head as head
from leanbayes.layers.select import last as last
from leanbayes.layers.select import last_block as last_block
from leanbayes.layers.select import last_stage as last_stage
from leanbayes.layers.select import Selector as Selector
from leanbayes.layers.select import Where as Where

__all__ = [
    *("Abs", "Family", "Selector", "Where"),
    *("activate", "family_of", "first", "head", "last", "last_block", "last_stage", "register"),
]
