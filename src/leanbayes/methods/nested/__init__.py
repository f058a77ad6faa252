"""Variational nested dropout: the method, its ordered units, and the layers that can be cut."""

from leanbayes.methods.nested.config import NestedDropout as NestedDropout
