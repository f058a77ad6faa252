"""Composites are lowered by a conversion and torch's own again afterwards, in every method and layout."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import leanbayes as lb
from leanbayes.layers.composites.lowering import Attention, lower, raise_back, RowsFirst
from leanbayes.layers.composites.recurrent import Recurrent
from leanbayes.methods import all_methods
from leanbayes.methods._base import Method
from leanbayes.runtime.batches import rows_of

pytestmark = pytest.mark.filterwarnings("ignore:ModelPatch found no norms in this network")  # a tagger has none

ROWS, STEPS, CHANNELS = 4, 7, 8
LEAN = [name for name, kind in all_methods().items() if name != "deep_ensemble" and not kind.post_hoc]


def method_of(name: str) -> Method:
    """Return a method with its defaults; nested dropout adds noise alone where nothing can be cut."""
    return lb.NestedDropout(min_cut=0) if name == "nested" else all_methods()[name]()


class Tagger(nn.Module):
    """Two bidirectional layers over words; rows come first or, inside, second."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, CHANNELS)
        self.rnn = nn.LSTM(CHANNELS, 6, num_layers=2, bidirectional=True, batch_first=batch_first, dropout=0.3)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        h = self.words(x)
        y = self.rnn(h)[0] if self.rnn.batch_first else self.rnn(h.transpose(0, 1))[0].transpose(0, 1)
        return self.head(y).transpose(1, 2)


def transformer(kind: str, batch_first: bool) -> nn.Module:
    options = {"batch_first": batch_first, "dropout": 0.2}
    if kind == "encoder layer":
        return nn.TransformerEncoderLayer(CHANNELS, 2, 16, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of nested tensors
        if kind == "encoder":
            return nn.TransformerEncoder(nn.TransformerEncoderLayer(CHANNELS, 2, 16, **options), 2)
        if kind == "decoder":
            return nn.TransformerDecoder(nn.TransformerDecoderLayer(CHANNELS, 2, 16, **options), 2)
        return nn.Transformer(CHANNELS, 2, 1, 2, 16, **options)


def sequences(kind: str, batch_first: bool) -> tuple[torch.Tensor, ...]:
    x = [torch.randn(ROWS, STEPS + k, CHANNELS) for k in range(2 if kind in ("decoder", "transformer") else 1)]
    return tuple(part if batch_first else part.transpose(0, 1).contiguous() for part in x)


def agree(bnn: nn.Module, net: nn.Module, *x: torch.Tensor) -> None:
    """Draws are torch's own modules and compute what the stochastic pass of the same draw does."""
    for index in range(2):
        plain = lb.draw(bnn, seed=0, index=index)
        assert not [name for name, m in plain.named_modules() if type(m).__module__.startswith("leanbayes")]
        assert [type(module) for module in plain.modules()] == [type(module) for module in net.modules()]
        assert plain.state_dict().keys() == net.state_dict().keys()
        for mode in (torch.enable_grad, torch.no_grad):  # without gradients, torch may read weights instead of calling
            with lb.draws(bnn, seed=0, index=index), mode():
                torch.testing.assert_close(plain(*x), bnn(*x), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", LEAN)
def test_every_method_converts_trains_and_freezes_a_tagger(name, batch_first, tmp_path):
    torch.manual_seed(0)
    net = Tagger(batch_first).eval()
    x, y = torch.randint(20, (ROWS, STEPS)), torch.randint(5, (ROWS, STEPS))
    bnn = lb.convert(net, method_of(name), likelihood=lb.Categorical())
    bnn.train()
    lb.elbo(bnn, x, y, num_data=10).loss.backward()
    used = [p for p in bnn.rnn.parameters() if p.requires_grad and p.grad is not None]
    assert used
    assert all(p.grad.isfinite().all() for p in used)
    bnn.eval()
    agree(bnn, net, x)
    prediction = lb.predict(bnn, x, samples=2)
    torch.testing.assert_close(lb.draw(bnn, index=1)(x).softmax(1), prediction.samples[1], rtol=1e-4, atol=1e-5)
    lb.save(bnn, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", net)
    torch.testing.assert_close(lb.predict(again, x, samples=2).mean, prediction.mean)


KINDS = [(kind, first) for kind in ("encoder layer", "encoder", "decoder", "transformer") for first in (True, False)]


@pytest.mark.parametrize(
    ("name", "kind", "batch_first"),
    [
        (name, kind, first)
        for name in LEAN
        for kind, first in KINDS
        # A transformer holds all the others: every method meets it, and two methods meet every kind and layout.
        if name in ("rank1", "mean_field") or (kind, first) in (("transformer", False), ("encoder layer", True))
    ],
)
def test_every_method_converts_trains_and_freezes_torchs_transformers(name, kind, batch_first, tmp_path):
    torch.manual_seed(0)
    net, x = transformer(kind, batch_first).eval(), sequences(kind, batch_first)
    bnn = lb.convert(net, method_of(name))
    bnn.train()
    (bnn(*x).square().sum() + lb.kl(bnn)).backward()
    bnn.eval()
    agree(bnn, net, *x)
    loaded = bnn.load_state_dict(net.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    assert all(".posterior." in key for key in loaded.missing_keys)
    lb.save(bnn, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", net)
    with lb.draws(bnn, seed=1), lb.draws(again, seed=1):
        torch.testing.assert_close(again(*x), bnn(*x))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder layer", "encoder", "decoder", "transformer"])
def test_a_row_has_one_draw_in_either_layout(kind, batch_first):
    """Two equal sequences differ by their draws; with the draws of one row, a row alone is the row in a batch."""
    torch.manual_seed(0)
    bnn = lb.convert(transformer(kind, batch_first).eval(), lb.Rank1(components=2, init_std=0.5))
    axis = 0 if batch_first else 1
    one = tuple(part.narrow(axis, 0, 1) for part in sequences(kind, batch_first))
    same = tuple(part.repeat(*(ROWS if k == axis else 1 for k in range(3))) for part in one)
    y = bnn(*same)
    rows = y.unbind(axis)
    assert len(rows) == ROWS
    assert not torch.allclose(rows[0], rows[1], atol=1e-3)
    layer = next(layer for path, layer in lb.stochastic_layers(bnn) if path.endswith("linear1"))
    assert len(layer.state.noise[layer.path][0]) == ROWS


def test_rows_are_found_in_every_layout():
    x = torch.randn(STEPS, ROWS, CHANNELS)
    assert rows_of(nn.LSTM(CHANNELS, 2), (x,)) == ROWS
    assert rows_of(nn.LSTM(CHANNELS, 2, batch_first=True), (x,)) == STEPS
    assert rows_of(nn.LSTM(CHANNELS, 2), (x[:, 0],)) == 1
    assert rows_of(nn.Linear(CHANNELS, 2), (x,)) == STEPS
    assert rows_of(transformer("encoder", False), (x,)) == ROWS
    packed = pack_padded_sequence(x, torch.tensor([7, 5, 2, 1]))
    assert rows_of(nn.LSTM(CHANNELS, 2), ((packed,), {})) == ROWS


def test_a_recurrent_module_alone_keeps_its_draw_over_the_steps():
    bnn = lb.convert(Tagger(True).eval(), lb.Rank1(components=2, init_std=0.5))
    drawn = []
    hidden = bnn.rnn.cells["l0"].hidden
    hidden.register_forward_hook(lambda layer, args, y: drawn.append(layer.state.noise[layer.path][0]))
    bnn.rnn(torch.randn(ROWS, STEPS, CHANNELS))
    assert len(drawn) == STEPS
    assert all(noise is drawn[0] for noise in drawn)
    bnn.rnn(torch.randn(ROWS, STEPS, CHANNELS))
    assert drawn[-1] is not drawn[0]


@pytest.mark.parametrize("method", [lb.MeanField(init_std=0.5), lb.VarianceLayers(init_log_alpha=0.0)])
def test_gaussian_weights_are_the_same_at_every_step_of_training(method):
    """Of two sequences that are each constant over time, step t of the input map is equal for all t."""
    torch.manual_seed(0)
    bnn = lb.convert(nn.LSTM(CHANNELS, 6, batch_first=True), method)
    seen = []
    bnn.cells["l0"].input.register_forward_hook(lambda layer, args, y: seen.append(y))
    bnn(torch.randn(2, 1, CHANNELS).expand(2, STEPS, CHANNELS))
    torch.testing.assert_close(seen[0], seen[0][:, :1].expand_as(seen[0]))


def test_a_composite_or_a_path_before_lowering_names_the_layers_inside():
    tagger = lb.convert(Tagger(True), lb.Rank1(), where="rnn")
    assert len(list(lb.stochastic_layers(tagger))) == 8
    encoder = lb.convert(transformer("encoder", False), lb.Rank1(), where="layers.1.linear1")
    assert [path for path, _ in lb.stochastic_layers(encoder)] == ["layers.1.layer.linear1"]


def test_what_is_not_chosen_stays_torchs_own_and_the_summary_says_so():
    bnn = lb.convert(Tagger(True), lb.Rank1(), where="head")
    assert type(bnn.rnn) is nn.LSTM
    assert [row.reason for row in lb.summary(bnn).rows if row.path == "rnn"] == ["not chosen"]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # what the plain encoder makes
def test_an_encoder_with_one_converted_layer_is_taken_apart_as_a_whole():
    """Otherwise its first layer would make nested tensors out of padded rows, which the others cannot read."""
    net = transformer("encoder", True).eval()
    bnn = lb.convert(net, lb.Rank1(init_spread=0.0), where="layers.1.*")
    assert all(isinstance(layer.self_attn, Attention) for layer in bnn.layers)
    x, mask = torch.randn(ROWS, STEPS, CHANNELS), torch.zeros(ROWS, STEPS, dtype=torch.bool)
    mask[0, 4:] = True
    with torch.no_grad(), lb.draws(bnn, mean=True):
        ours, theirs = bnn(x, src_key_padding_mask=mask), net(x, src_key_padding_mask=mask)
    torch.testing.assert_close(ours[~mask], theirs[~mask], rtol=1e-4, atol=1e-5)


def test_in_place_conversion_that_fails_leaves_the_model_as_it_was():
    net = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.LSTM(CHANNELS, 4))
    seen = []
    net[1].register_forward_hook(lambda *call: seen.append(1))
    with pytest.raises(ValueError, match="matches no layer"):
        lb.convert(net, lb.Rank1(), where="nowhere", copy=False)
    assert type(net[1]) is nn.LSTM
    net[1](torch.randn(3, 2, CHANNELS))
    assert seen == [1]


def test_hooks_stay_with_what_was_taken_apart_and_with_draws():
    net, seen = Tagger(True).eval(), []
    net.rnn.register_forward_hook(lambda module, args, y: seen.append(type(module)))
    bnn = lb.convert(net, lb.Rank1())
    x = torch.randint(20, (ROWS, STEPS))
    bnn(x)
    lb.draw(bnn)(x)
    assert seen == [Recurrent, nn.LSTM]


def test_lowering_and_raising_is_the_identity_also_for_shared_modules():
    shared = nn.LSTM(CHANNELS, CHANNELS, batch_first=True)
    net = nn.ModuleList([shared, shared, transformer("encoder layer", False)])
    low = lower(net)
    assert low[0] is low[1]
    assert isinstance(low[2], RowsFirst)
    high = raise_back(low)
    assert high[0] is high[1]
    assert [type(module) for module in high] == [nn.LSTM, nn.LSTM, nn.TransformerEncoderLayer]
    assert high[2].self_attn.batch_first is False


def test_packed_sequences_go_through_elbo_and_predict():
    bnn = lb.convert(Last(), lb.Rank1(components=2), likelihood=lb.Categorical())
    packed = pack_padded_sequence(torch.randn(ROWS, STEPS, CHANNELS), torch.tensor([7, 5, 2, 1]), batch_first=True)
    lb.elbo(bnn, packed, torch.tensor([0, 1, 2, 0]), num_data=4).loss.backward()
    assert lb.predict(bnn, packed, samples=4).mean.shape == (ROWS, 3)


class Last(nn.Module):
    """Classes from the last state of a packed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(CHANNELS, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[1][-1])
