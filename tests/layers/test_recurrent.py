"""Lowered recurrent modules: torch's own outputs, states and gradients, and one draw per sequence."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn, Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, PackedSequence

import leanbayes as lb
from leanbayes.layers.composites.recurrent import Recurrent, refusal
from leanbayes.methods._base import one_draw, plain_copy
from leanbayes.runtime.passes import states_of
from leanbayes.runtime.twins import twin

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

STEPS, ROWS, FEATURES, HIDDEN = 5, 3, 4, 6
LENGTHS = [3, 5, 1]
EXACT = {"rtol": 1e-10, "atol": 1e-12}
MODES = {
    "tanh": (nn.RNN, {"nonlinearity": "tanh"}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 2}),
}


def make(mode: str, **options) -> nn.RNNBase:
    kind, own = MODES[mode]
    return kind(FEATURES, HIDDEN, dtype=options.pop("dtype", torch.float64), **own, **options)


def states(module: nn.RNNBase, rows: int | None = ROWS):
    """Return random initial states."""
    cells = module.num_layers * (2 if module.bidirectional else 1)
    batch = () if rows is None else (rows,)
    h = torch.randn(cells, *batch, module.proj_size or HIDDEN, dtype=torch.float64)
    if module.mode != "LSTM":
        return h.requires_grad_()
    return h.requires_grad_(), torch.randn(cells, *batch, HIDDEN, dtype=torch.float64).requires_grad_()


def inputs(form: str, batch_first: bool):
    """Return a leaf tensor, and a function that makes the input of the module from it."""
    if form == "unbatched":
        return torch.randn(STEPS, FEATURES, dtype=torch.float64).requires_grad_(), lambda x: x
    shape = (ROWS, STEPS, FEATURES) if batch_first else (STEPS, ROWS, FEATURES)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    if form == "padded":
        return x, lambda x: x
    lengths = sorted(LENGTHS, reverse=True) if form == "sorted" else LENGTHS
    return x, lambda x: pack_padded_sequence(x, lengths, batch_first, enforce_sorted=form == "sorted")


def flat(result) -> list[Tensor]:
    """Return every floating tensor of a result in order."""
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, Tensor) else [tensor for item in result for tensor in flat(item)]


def outputs_and_gradients(module, x, hx, parameters) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the gradients of a fixed random function of them."""
    result = flat(module(x[1](x[0]), *([] if hx is None else [hx])))
    generator = torch.Generator().manual_seed(1)
    loss = sum((y.sin() * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in result)
    leaves = [x[0], *([] if hx is None else flat(hx)), *parameters]
    return result, list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("form", ["padded", "unbatched", "sorted", "unsorted"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_states_and_gradients_are_those_of_torch(mode, batch_first, form):
    for layers, both, bias, given in itertools.product((1, 2), (False, True), (True, False), (False, True)):
        module = make(mode, num_layers=layers, bidirectional=both, bias=bias, batch_first=batch_first)
        twin = Recurrent(module)
        x = inputs(form, batch_first)
        hx = states(module, None if form == "unbatched" else ROWS) if given else None
        weights = list(module.parameters())  # the very same objects in both
        expected, found = (outputs_and_gradients(m, x, hx, weights) for m in (module, twin))
        assert {id(p) for p in twin.parameters()} == {id(p) for p in weights}
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_single_precision_agrees_to_the_promised_tolerance(mode):
    module = make(mode, num_layers=2, bidirectional=True, dtype=torch.float32)
    x = torch.randn(40, ROWS, FEATURES)
    torch.testing.assert_close(flat(Recurrent(module)(x)), flat(module(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_outputs_have_the_fields_of_torch(enforce_sorted):
    module = make("lstm", bidirectional=True)
    sequences = [torch.randn(n, FEATURES, dtype=torch.float64) for n in ((5, 3, 3) if enforce_sorted else (3, 5, 3))]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    expected, found = module(packed)[0], Recurrent(module)(packed)[0]
    assert type(found) is PackedSequence
    for name in ("data", "batch_sizes", "sorted_indices", "unsorted_indices"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_outputs_are_laid_out_as_torch_lays_them():
    twin = Recurrent(make("gru"))
    y, _ = twin(torch.randn(STEPS, ROWS, FEATURES, dtype=torch.float64))
    assert y.view(STEPS * ROWS, HIDDEN).shape == (STEPS * ROWS, HIDDEN)
    assert twin(torch.randn(STEPS, 0, FEATURES, dtype=torch.float64))[0].shape == (STEPS, 0, HIDDEN)


@pytest.mark.parametrize("form", ["padded", "unsorted"])
def test_dropout_acts_between_layers_in_training_alone(form):
    x = inputs(form, batch_first=False)
    for rate, training in [(0.5, False), (1.0, True)]:  # nothing is dropped, everything is: no chance in either
        module = make("lstm", num_layers=3, bidirectional=True, dropout=rate).train(training)
        torch.testing.assert_close(flat(Recurrent(module)(x[1](x[0]))), flat(module(x[1](x[0]))), **EXACT)


def test_dropout_drops_at_its_rate_and_rescales():
    rate = 0.25
    twin = Recurrent(make("gru", num_layers=3, dropout=rate, batch_first=True))
    seen = {}
    for name in ("l1", "l2"):
        twin.cells[name].input.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    x = torch.randn(200, STEPS, FEATURES, dtype=torch.float64)
    first, _ = twin.cells["l0"](x, (x.new_zeros(200, HIDDEN),))
    twin(x)
    dropped = seen["l1"] == 0
    torch.testing.assert_close(seen["l1"], torch.where(dropped, 0.0, first / (1 - rate)), **EXACT)
    error = (rate * (1 - rate) / dropped.numel()) ** 0.5
    assert abs(dropped.double().mean() - rate) < 5 * error
    assert not torch.equal(dropped, seen["l2"] == 0)


def test_attributes_mode_and_parameters_are_kept():
    module = make("tanh", num_layers=2, dropout=0.1, bidirectional=True, batch_first=True).eval()
    module.weight_hh_l1.requires_grad_(False)
    twin = Recurrent(module)
    for name in (*nn.RNNBase.__constants__, "nonlinearity"):
        assert getattr(twin, name) == getattr(module, name)
    assert not any(part.training for part in twin.modules())
    assert twin.cells["l1"].hidden.weight is module.weight_hh_l1
    assert twin.cells["l0_reverse"].input.bias is module.bias_ih_l0_reverse
    assert twin.flatten_parameters() is None
    assert "RNN, 4, 6" in repr(twin)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_raising_gives_the_original_again(mode, bias):
    module = make(mode, num_layers=2, bidirectional=True, bias=bias, dropout=0.3, batch_first=True).eval()
    module.weight_ih_l0.requires_grad_(False)
    raised = Recurrent(module).raised()
    assert type(raised) is type(module)
    assert repr(raised) == repr(module)
    assert not raised.training
    before, after = dict(module.named_parameters()), dict(raised.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    x = torch.randn(ROWS, STEPS, FEATURES, dtype=torch.float64)
    for again in (raised, copy.deepcopy(raised)):
        torch.testing.assert_close(flat(again(x)), flat(module(x)), **EXACT)


def test_raising_draws_no_random_number_and_warns_of_nothing():
    with pytest.warns(UserWarning, match="non-zero dropout"):
        module = make("gru", dropout=0.5)
    state = torch.get_rng_state()
    assert Recurrent(module).raised().dropout == 0.5
    assert torch.equal(state, torch.get_rng_state())


def test_a_gained_bias_is_raised_with_zeros_elsewhere():
    twin = Recurrent(make("lstm", num_layers=2, bias=False))
    twin.cells["l1"].hidden.bias = nn.Parameter(torch.randn(4 * HIDDEN, dtype=torch.float64))
    raised = twin.raised()
    assert raised.bias
    assert raised.bias_ih_l0.requires_grad
    assert raised.bias_hh_l1 is twin.cells["l1"].hidden.bias
    assert torch.equal(raised.bias_ih_l0, torch.zeros_like(raised.bias_ih_l0))
    x = torch.randn(STEPS, ROWS, FEATURES, dtype=torch.float64)
    torch.testing.assert_close(flat(raised(x)), flat(twin(x)), **EXACT)


def test_what_torch_cannot_hold_is_not_raised():
    twin = Recurrent(make("projected"))
    with pytest.raises(ValueError, match=r"got Rank1Layer at 'cells\.l0\.input'.*lb\.draw or lb\.mean"):
        lb.convert(twin, lb.Rank1(components=2)).raised()
    twin.cells["l0"].project.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"without bias at 'cells\.l0\.project'"):
        twin.raised()


@pytest.mark.parametrize("mode", MODES)
def test_the_original_state_dict_loads_strictly(mode):
    source, target = (nn.ModuleDict({"rnn": make(mode, num_layers=2, bidirectional=True)}) for _ in range(2))
    saved = source.state_dict()
    target["rnn"] = Recurrent(target["rnn"])
    target.load_state_dict(saved, strict=True)
    assert all(torch.equal(p, saved[f"rnn.{n}"]) for n, p in target["rnn"].raised().named_parameters())
    converted = lb.convert(target, lb.Rank1(components=2))
    with pytest.raises(RuntimeError, match=r"Missing key.*posterior"):  # those alone
        converted.load_state_dict(saved, strict=True)
    wrong = converted.load_state_dict(saved, strict=False)
    assert not wrong.unexpected_keys
    assert all(".posterior." in name for name in wrong.missing_keys)
    with pytest.raises(RuntimeError, match=r"Missing key.*cells\.l1\.hidden\.weight"):
        target.load_state_dict({n: p for n, p in saved.items() if not n.endswith("weight_hh_l1")})
    target.load_state_dict(target.state_dict(), strict=True)


def test_copies_and_files_keep_the_function():
    twin = Recurrent(make("projected", bidirectional=True))
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    x = torch.randn(STEPS, ROWS, FEATURES, dtype=torch.float64)
    for other in (copy.deepcopy(twin), torch.load(file, weights_only=False)):
        assert all(map(torch.equal, flat(other(x)), flat(twin(x))))


class Named(nn.LSTM):
    """A subclass that computes the same, with an attribute and a constructor of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(FEATURES, HIDDEN)
        self.name = name

    def shout(self) -> str:
        return self.name.upper()


class Doubled(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


def test_subclasses_that_compute_the_same_are_raised_to_themselves():
    twin = Recurrent(Named("inner"))
    assert twin.name == "inner"
    assert twin.raised().shout() == "INNER"


def test_other_maps_are_refused_with_a_reason():
    patched, normed, hooked, more = (make("gru") for _ in range(4))
    patched.forward = lambda x: x
    nn.utils.parametrizations.weight_norm(normed, "weight_hh_l0")
    nn.utils.weight_norm(hooked, "weight_hh_l0")
    more.register_buffer("seen", torch.zeros(()))
    assert refusal(make("gru")) is None
    for module, reason in {
        nn.Linear(2, 2): "no nn.RNN, nn.GRU or nn.LSTM",
        nn.LSTMCell(2, 2): "no nn.RNN, nn.GRU or nn.LSTM",
        Doubled(FEATURES, HIDDEN): "a forward of its own, other than nn.LSTM's",
        patched: "a forward of its own, other than nn.GRU's",
        normed: "weight_hh_l0 is computed by a parametrisation",
        hooked: "weight_hh_l0 is computed by a parametrisation",
        more: "tensors or modules of its own (seen)",
    }.items():
        assert reason in str(refusal(module))


def test_empty_and_contradictory_packed_sequences_raise_clearly():
    twin = Recurrent(make("gru"))
    data = torch.randn(5, FEATURES, dtype=torch.float64)
    order = torch.tensor([0, 1, 2])
    for sizes, index, entries, message in [
        ([3, 2, 0], None, data, "length zero.*leave empty sequences out"),  # a step without rows
        ([2, 2, 1], order, data, "2, 1] for 3 rows: a sequence has length zero"),  # a row without steps
        ([], None, data[:0], "length zero"),
        ([2, 3], None, data, "falling batch sizes"),
        ([3, 3], None, data, "5 entries"),
        ([4, 1], order, data, "an index for each row"),
        ([3, 2], None, data[:, 1:], r"shape \(5, 4\), got \(5, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            twin(PackedSequence(entries, torch.tensor(sizes, dtype=torch.int64), index))


def test_wrong_shapes_raise_one_clear_sentence():
    gru, lstm = Recurrent(make("gru")), Recurrent(make("projected", batch_first=True))
    x, h = torch.randn(STEPS, ROWS, FEATURES, dtype=torch.float64), torch.zeros(1, ROWS, HIDDEN, dtype=torch.float64)
    for module, arguments, message in [
        (gru, (x[..., 1:],), r"\(T, B, 4\), or \(T, 4\) without a batch, got \(5, 3, 3\)"),
        (lstm, (x[None],), r"\(B, T, 4\).*got \(1, 5, 3, 4\)"),
        (gru, (x[:0],), "at least one step"),
        (gru, (x, h[:, 1:]), r"one tensor h of shape \(1, 3, 6\).*got \(1, 2, 6\)"),
        (gru, (x, (h,)), r"one tensor h of shape \(1, 3, 6\).*got \[\(1, 3, 6\)\]"),
        (gru, (x[:, 0], h), r"one tensor h of shape \(1, 6\).*got \(1, 3, 6\)"),
        (lstm, (x.transpose(0, 1), h), r"a pair \(h, c\) of shape \(1, 3, 2\) and \(1, 3, 6\).*got \(1, 3, 6\)"),
        (lstm, (x.transpose(0, 1), (h, h)), r"got \[\(1, 3, 6\), \(1, 3, 6\)\]; leave them out"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(*arguments)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_computes_in_half_precision(mode):
    module = make(mode, num_layers=2, bidirectional=True, dtype=torch.float32)
    x = torch.randn(STEPS, ROWS, FEATURES)
    packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    twin = Recurrent(module)
    for given in (x, packed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = flat(twin(given))
        assert all(y.dtype == torch.bfloat16 for y in found)
        torch.testing.assert_close([y.float() for y in found], flat(module(given)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", ["relu", "gru", "projected"])
def test_one_graph_holds_the_whole_sequence(mode):
    twin = Recurrent(make(mode, bidirectional=True))
    x, hx = torch.randn(2, 2, FEATURES, dtype=torch.float64), states(twin, 2)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(flat(compiled(x, hx)), flat(twin(x, hx)), **EXACT)


class Tagger(nn.Module):
    """A label for every step of rows (B, T, d)."""

    def __init__(self, mode: str = "lstm", **options) -> None:
        super().__init__()
        self.rnn = Recurrent(make(mode, batch_first=True, dtype=torch.float32, **options))
        self.head = nn.LazyLinear(2)
        self(torch.zeros(1, 1, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_converted_model_trains(mode):
    model = lb.convert(Tagger(mode, num_layers=2, bidirectional=True), lb.Rank1(components=2))
    x = torch.randn(16, STEPS, FEATURES)
    y = (x.cumsum(1)[..., 0] > 0).long()

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) + lb.kl(model) / 1e4

    loss().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimiser.step()
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.parametrize("mode", MODES)
def test_a_draw_is_the_frozen_module_and_that_of_torch(mode):
    model = lb.convert(Tagger(mode, num_layers=2, bidirectional=True), lb.Rank1(components=2)).eval()
    x = torch.randn(ROWS, STEPS, FEATURES)
    plain = lb.draw(model, seed=0, index=1)
    with lb.draws(model, seed=0, index=1):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
    assert isinstance(plain.rnn, nn.RNNBase)


def test_a_converted_model_compiles_to_one_graph():
    model = lb.convert(Tagger("gru"), lb.Rank1(components=2))
    x = torch.randn(ROWS, 2, FEATURES)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with lb.draws(model, seed=0):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


class Packer(Tagger):
    """The same on packed rows; it returns their final state."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1]) if lengths is None else lengths
        _, (h, _) = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(h.transpose(0, 1).flatten(1))


def network_of_row(model: nn.Module, row: int) -> nn.Module:
    """Return the plain network that one row of the last pass saw, with torch's own recurrent module."""
    ((state, layers),) = states_of(model)
    state.live = True  # the pass continues: layers return their variables
    variables = [one_draw(layer.variables(), row) for layer in layers]
    state.live = False
    pairs = zip(layers, variables, strict=True)
    plain = twin(model, {id(layer): plain_copy(layer.base, layer.fold(own)) for layer, own in pairs})
    plain.rnn = plain.rnn.raised()
    return plain


@pytest.mark.parametrize("mode", MODES)
def test_every_row_has_one_draw_for_its_whole_sequence(mode):
    model = lb.convert(Tagger(mode, num_layers=2, bidirectional=True), lb.Rank1(components=2, init_std=0.5))
    x = torch.randn(1, STEPS, FEATURES).expand(4, -1, -1)
    y = model(x)
    for row in range(4):
        torch.testing.assert_close(y[row], network_of_row(model, row)(x[:1])[0], rtol=1e-5, atol=1e-5)
    assert (y[1:] - y[:1]).abs().amax(-1).min() > 1e-3  # equal rows, other draws


def test_packed_rows_keep_the_draws_of_their_places():
    model = lb.convert(Packer("projected", num_layers=2, bidirectional=True), lb.Rank1(components=3, init_std=0.5))
    x, lengths = torch.randn(ROWS, STEPS, FEATURES), torch.tensor(LENGTHS)
    y = model(x, lengths)
    for row in range(ROWS):
        alone = network_of_row(model, row)(x[row : row + 1, : LENGTHS[row]])
        torch.testing.assert_close(y[row], alone[0], rtol=1e-5, atol=1e-5)


def test_a_row_depends_on_no_other():
    model = lb.convert(Tagger("gru", bidirectional=True), lb.Rank1(components=2))
    x = torch.randn(4, STEPS, FEATURES)
    other = torch.cat([x[:1], torch.randn(3, STEPS, FEATURES)])
    torch.manual_seed(3)
    first = model(x)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(model(other)[0], first)
    assert not torch.allclose(model(x)[0], first)  # another pass, another draw
