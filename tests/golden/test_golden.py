"""A small slice of the golden numbers; `make golden` compares the fast part as a whole."""

from __future__ import annotations

from tests.golden import fast
from tests.golden.record import compare, HERE

SLICE = {
    "mlp": ("rank1:cauchy", "nested:default", "mean_field:flipout"),
    "conv": ("patch:crossed", "batch_ensemble:default", "mc_dropout:default"),
    "transformer": ("rank1:default", "implicit:bias_node", "variance:neuron"),
}


def test_a_slice_of_the_golden_numbers_is_as_recorded():
    records = {key: value for name, methods in SLICE.items() for key, value in fast.record([name], methods).items()}
    assert len(records) > 250
    assert not compare(HERE / "fast.json", records, prefix=None)
