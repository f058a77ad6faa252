"""Codes of a table become learned vectors, and every method converts the network."""

from __future__ import annotations

import pytest
import torch

import leanbayes as lb
from leanbayes.methods import all_methods
from leanbayes.models import EmbedCodes, MLP, TableNet
from leanbayes.models.table import vector_size


def network():
    torch.manual_seed(0)
    return TableNet(lambda inputs: MLP(inputs, 3), 4, {1: 40, 3: 6})


def rows(count=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    x[:, 1] = torch.randint(40, (count,), generator=generator)
    x[:, 3] = torch.randint(6, (count,), generator=generator)
    return x


def test_codes_become_vectors_and_other_columns_stay():
    embed = EmbedCodes(4, {1: 40, 3: 6})
    x = rows()
    vectors = [embed.vectors[i].weight[x[:, column].long()] for i, column in enumerate((1, 3))]
    expected = torch.cat([x[:, [0, 2]], *vectors], 1)
    torch.testing.assert_close(embed(x), expected, rtol=0, atol=0)
    assert embed.outputs == expected.shape[1] == 2 + vector_size(40) + vector_size(6)


def test_codes_that_nobody_knows_count_as_unseen():
    embed = EmbedCodes(2, {1: 5})
    found = embed(torch.tensor([[1.0, 0.0], [1.0, -3.0], [1.0, 5.0], [1.0, 1e9]]))
    assert (found[1:] == found[0]).all()
    assert (found[0, 1:] == 0).all()


def test_a_table_of_codes_alone_has_a_network():
    assert TableNet(lambda inputs: MLP(inputs, 2), 1, {0: 9})(torch.zeros(3, 1)).shape == (3, 2)


@pytest.mark.parametrize(("inputs", "codes"), [(2, {2: 5}), (0, {0: 1}), (2, {1: 0})])
def test_wrong_sizes_are_refused(inputs, codes):
    with pytest.raises(ValueError, match="EmbedCodes expected"):
        EmbedCodes(inputs, codes)


@pytest.mark.parametrize("name", all_methods())
def test_every_method_converts_and_trains_it(name):
    method = all_methods()[name](**({"first": True} if name == "nested" else {}))
    x = rows()
    y = torch.arange(len(x)) % 3
    if method.targets:
        model = lb.convert(network(), method)
        assert lb.summary(model).converted > 0
    else:
        model = lb.Ensemble([network(), network()])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    lb.fit(model, (x, y), lb.Recipe(epochs=2, batch_size=8, accelerator="cpu"), progress=False)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert any("embed" in key for key in changed)
    p = lb.predict(model, x, samples=3)
    assert p.mean.shape == (24, 3)
    torch.testing.assert_close(p.mean.sum(1), torch.ones(24))
