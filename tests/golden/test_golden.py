"""A small slice of the golden numbers; `make golden` compares the fast part as a whole."""

from __future__ import annotations

import torch

from tests.golden import digest, fast
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


def test_a_difference_is_named_with_its_old_and_new_record():
    one, other = (digest.tensors(torch.tensor([1.0, last])) for last in (2.0, 2.0 + 1e-6))
    assert digest.differences({"a": one, "b": one}, {"a": one, "b": one}) == []
    assert digest.differences({"a": one, "b": one}, {"a": other}) == [
        f"a: recorded {one}, now {other}",
        f"b: recorded {one}, now missing",
    ]
    assert digest.differences({"a": one}, {"a": other}, lambda key: 1e-6) == []
    assert digest.differences({"a": one}, {"a": other}, lambda key: 1e-8)
    assert digest.differences({"a": digest.text("x")}, {"a": digest.text("y")}, lambda key: 1.0)


def test_records_depend_on_names_shapes_and_dtypes():
    x = torch.zeros(2, 3)
    assert len({digest.tensors(v) for v in (x, x.T, x.half(), {"a": x}, {"b": x}, [x, x[:0]])}) == 6
    assert digest.tensors({"a": x, "b": x + 1}) == digest.tensors({"b": x + 1, "a": x})
