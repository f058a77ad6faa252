"""RNN, GRU and LSTM as ordinary Linear layers: one for the inputs, one for the hidden state, one for a projection.

With a = W_ih x_t + b_ih and b = W_hh h_{t-1} + b_hh, cut into gates of `hidden_size` channels each,

    RNN:    h_t = tanh(a + b)  or  relu(a + b)
    GRU:    r, z = sigmoid(a + b),    n = tanh(a_n + r * b_n),    h_t = n + z * (h_{t-1} - n)
    LSTM:   i, f, o = sigmoid(a + b),    g = tanh(a_g + b_g),    c_t = f * c_{t-1} + i * g,    h_t = o * tanh(c_t)

and h_t = W_hr (o * tanh(c_t)) with a projection. Rows are on the first axis: the input map sees all sequences
(B, T, d) at once, the hidden map sees (B, H) at every step. Noise that is drawn once per pass and layer is hence drawn
once per sequence and used at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn.utils.rnn import pack_padded_sequence, PackedSequence, pad_packed_sequence

from leanbayes.layers.composites import Composite, linear_of

State = tuple[Tensor, ...]  # the hidden state; in an LSTM also the cell state
Alive = Sequence[Tensor | None]  # for each step, which rows (B, 1) still have an input; None: all

PARTS = {"ih": "input", "hh": "hidden", "hr": "project"}
"""Torch's names of the linear maps of a cell, and the names here."""


class Recurrent(Composite):
    """Lowered `nn.RNN`, `nn.GRU` or `nn.LSTM`, with the same call and results.

    Its linear maps are `cells.<cell>.input`, `.hidden` and `.project`, where `<cell>` is torch's own suffix: `l0`,
    `l0_reverse`, `l1`, ... They share their parameters with the original and keep its attributes (`mode`, ...).

    Example:
        >>> recurrent = Recurrent(nn.LSTM(8, 16, num_layers=2, bidirectional=True))
        >>> output, (h, c) = recurrent(x)
    """

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool
    proj_size: int

    def __init__(self, module: nn.RNNBase) -> None:
        super().__init__()
        self.kind = type(module)
        self.attributes = _attributes(module)
        for name in self.attributes:
            setattr(self, name, getattr(module, name))
        self.names = list(module._parameters)
        directions = ("", "_reverse") if module.bidirectional else ("",)
        cells = [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]
        self.cells = nn.ModuleDict({cell: Cell(module, cell) for cell in cells})
        # One for each place: a method that stores its masks must not drop the same channels in all of them.
        self.dropouts = nn.ModuleList(nn.Dropout(module.dropout) for _ in range(module.num_layers - 1))
        self.train(module.training)

    def raised(self) -> nn.RNNBase:
        """Return a module of the original's class that shares the parameters.

        If one linear map has a bias, the others get zeros. A mask in place of a dropout multiplies the next weights.
        """
        _check_plain(self)
        bias = any(isinstance(layer, nn.Linear) and layer.bias is not None for layer in self.modules())
        sizes = (self.input_size, self.hidden_size, self.num_layers, bias)
        plain = self.kind.__new__(self.kind)
        nn.RNNBase.__init__(
            plain, self.mode, *sizes, bidirectional=self.bidirectional, proj_size=self.proj_size, device="meta"
        )
        for name in self.attributes:
            setattr(plain, name, getattr(self, name))
        plain.bias = bias
        for name in list(plain._parameters):
            setattr(plain, name, self._parameter(name))
        self._fold_masks(plain)
        plain._init_flat_weights()  # as torch does after parameters are replaced
        return plain.train(self.training and all(between.training for between in self.dropouts))

    def _fold_masks(self, plain: nn.RNNBase) -> None:
        """Multiply weights by the dropout masks before them."""
        for layer, between in enumerate(self.dropouts, 1):
            if isinstance(between, nn.Dropout) and (between.p > 0 or not between._forward_hooks):
                continue  # not a draw: the mask of a draw is a hook
            for name in [name for name in plain._parameters if name.startswith(f"weight_ih_l{layer}")]:
                weight = plain._parameters[name]
                assert weight is not None
                with torch.no_grad():
                    mask = between(weight.new_ones(1, 1, weight.shape[1]))[0, 0]
                    setattr(plain, name, nn.Parameter(weight * mask, weight.requires_grad))
            plain.dropout = 0.0

    def flatten_parameters(self) -> None:
        """Do nothing: only torch's fused kernels need it."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Return the outputs and the final states, as torch's module does.

        Args:
            input: (T, B, d), or (B, T, d) if `batch_first`; (T, d) without a batch; or a packed sequence.
            hx: initial hidden states (layers * directions, B, H), for an LSTM a pair with the cell states; default 0.
        """
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            batch = "B, T" if self.batch_first else "T, B"
            raise ValueError(
                f"expected an input of shape ({batch}, {self.input_size}), or (T, {self.input_size}) without a batch, "
                f"got {tuple(input.shape)}; the last axis holds the features of a step"
            )
        if input.dim() == 2:
            states = self._initial(hx, input, None)
            y, final = self._run(input.unsqueeze(0), tuple(state.unsqueeze(1) for state in states))
            return y.squeeze(0), self._returned(tuple(state.squeeze(1) for state in final))
        x = input if self.batch_first else input.transpose(0, 1)
        y, final = self._run(x, self._initial(hx, input, x.shape[0]))
        return y if self.batch_first else y.transpose(0, 1).contiguous(), self._returned(final)

    def _packed(self, input: PackedSequence, hx: Any) -> Any:
        """Run on padded rows in the caller's order, so that a row's draw belongs to its place in the batch."""
        _check_packed(input, self.input_size)
        x, lengths = pad_packed_sequence(input, batch_first=True)
        shortest, longest = int(lengths.min()), int(lengths.max())
        remaining = (torch.arange(shortest, longest)[:, None, None] < lengths[:, None]).to(x.device)
        states = self._initial(hx, input.data, x.shape[0])
        y, final = self._run(x, states, [*[None] * shortest, *remaining])
        if input.sorted_indices is not None:
            y = y[input.sorted_indices]
        data = pack_padded_sequence(y, lengths.sort(descending=True).values, batch_first=True).data
        packed = PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        return packed, self._returned(final)

    def _run(self, x: Tensor, states: State, alive: Alive | None = None) -> tuple[Tensor, State]:
        """Send rows (B, T, d) through all layers; states are (cells, B, H)."""
        if x.shape[1] == 0:
            raise ValueError("expected a sequence of at least one step, got one of length 0; leave it out of the batch")
        cells, directions = list(self.cells.values()), 2 if self.bidirectional else 1
        finals: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for index in range(layer * directions, (layer + 1) * directions):
                y, final = cells[index](x, tuple(state[index] for state in states), alive)
                outputs.append(y)
                finals.append(final)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if layer < self.num_layers - 1:
                x = self.dropouts[layer](x)
        return x, tuple(torch.stack(state) for state in zip(*finals, strict=True))

    def _initial(self, hx: Any, like: Tensor, rows: int | None) -> State:
        """Return the initial states, by default zeros; `rows` is None without a batch."""
        cells, batch = len(self.cells), () if rows is None else (rows,)
        sizes = [self.proj_size or self.hidden_size, *[self.hidden_size] * (self.mode == "LSTM")]
        shapes = [(cells, *batch, size) for size in sizes]
        if hx is None:
            return tuple(like.new_zeros(shape) for shape in shapes)
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        found = [tuple(state.shape) for state in states]
        if found != shapes or isinstance(hx, Tensor) != (len(shapes) == 1):
            what = "a pair (h, c)" if len(shapes) == 2 else "one tensor h"
            got = found[0] if isinstance(hx, Tensor) else found
            wanted = " and ".join(map(str, shapes))
            raise ValueError(
                f"expected the initial states as {what} of shape {wanted} (layers and directions, rows "
                f"where the input has a batch, channels), got {got}; leave them out to start from zero"
            )
        return tuple(states)

    def _returned(self, states: State) -> Any:
        return states if self.mode == "LSTM" else states[0]

    def _parameter(self, name: str) -> nn.Parameter:
        """Return the parameter that torch calls `name`, or a zero bias."""
        path, _, kind = _renamed(name).rpartition(".")
        layer: Any = self.get_submodule(path)
        if layer._parameters[kind] is None:
            return nn.Parameter(layer.weight.new_zeros(layer.out_features), layer.weight.requires_grad)
        found: nn.Parameter = layer._parameters[kind]
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.names:  # the original's key weight_ih_l0 is cells.l0.input.weight here
            if prefix + name in state_dict:
                state_dict[prefix + _renamed(name)] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, {self.input_size}, {self.hidden_size}"


class Cell(nn.Module):
    """One layer in one direction."""

    def __init__(self, module: nn.RNNBase, name: str) -> None:
        super().__init__()
        self.mode = module.mode
        self.reverse = name.endswith("_reverse")
        own: Any = module._parameters
        maps = {
            part: linear_of(own[f"weight_{part}_{name}"], own.get(f"bias_{part}_{name}"))
            for part in PARTS
            if f"weight_{part}_{name}" in own
        }
        self.input, self.hidden, self.project = maps["ih"], maps["hh"], maps.get("hr")

    def forward(self, x: Tensor, state: State, alive: Alive | None = None) -> tuple[Tensor, State]:
        """Return the outputs (B, T, H) of rows (B, T, d), and the last state.

        A row whose sequence has ended keeps its state. In reverse it keeps its initial state until its last step.
        """
        equation = EQUATIONS[self.mode]
        steps = self.input(x).unbind(1)
        state = tuple(part.to(steps[0].dtype) for part in state)
        outputs: list[Tensor] = [state[0]] * len(steps)
        for t in reversed(range(len(steps))) if self.reverse else range(len(steps)):
            new = equation(steps[t], self.hidden(state[0]), state)
            if self.project is not None:
                new = (self.project(new[0]), *new[1:])
            if alive is not None and (rows := alive[t]) is not None:
                new = tuple(torch.where(rows, after, before) for after, before in zip(new, state, strict=True))
            state = new
            outputs[t] = state[0]
        return torch.stack(outputs, 1), state


def refusal(module: nn.Module) -> str | None:
    """Return why a module cannot be lowered; None if it can.

    A subclass must compute the same map with the same parameters.
    """
    parent = next((kind for kind in (nn.RNN, nn.GRU, nn.LSTM) if isinstance(module, kind)), None)
    if parent is None or not isinstance(module, nn.RNNBase):
        return "it is no nn.RNN, nn.GRU or nn.LSTM"
    if type(module).forward is not parent.forward or "forward" in vars(module):
        return f"it has a forward of its own, other than nn.{parent.__name__}'s"
    missing = sorted(set(module._flat_weights_names) - set(module._parameters))
    if missing:
        return (
            f"{', '.join(missing)} is computed by a parametrisation or a hook; make it a parameter again "
            "(torch.nn.utils.parametrize.remove_parametrizations)"
        )
    others = set(dict(module.named_parameters())) | set(dict(module.named_buffers())) | set(module._modules)
    others -= set(module._flat_weights_names)
    if others:
        return f"it has tensors or modules of its own ({', '.join(sorted(others))})"
    return None


def _gru(a: Tensor, b: Tensor, state: State) -> State:
    size = state[0].shape[1]
    r, z = torch.sigmoid(a[:, :-size] + b[:, :-size]).chunk(2, 1)
    n = torch.tanh(torch.addcmul(a[:, -size:], r, b[:, -size:]))
    return (torch.addcmul(n, z, state[0] - n),)


def _lstm(a: Tensor, b: Tensor, state: State) -> State:
    i, f, g, o = (a + b).chunk(4, 1)
    c = torch.addcmul(torch.sigmoid(f) * state[1], torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(c), c


EQUATIONS: Mapping[str, Callable[[Tensor, Tensor, State], State]] = {
    "RNN_TANH": lambda a, b, state: (torch.tanh(a + b),),
    "RNN_RELU": lambda a, b, state: (torch.relu(a + b),),
    "GRU": _gru,
    "LSTM": _lstm,
}
"""One step `(a, b, state) -> state`: a is the mapped input, b the mapped hidden state."""


def _renamed(name: str) -> str:
    """Return the name here: `weight_ih_l0_reverse` is `cells.l0_reverse.input.weight`."""
    kind, part, cell = name.split("_", 2)
    return f"cells.{cell}.{PARTS[part]}.{kind}"


def _attributes(module: nn.RNNBase) -> list[str]:
    """Return the names of torch's options and of attributes that `nn.RNN` or a subclass adds."""
    ordinary = {*vars(nn.RNNBase("RNN_TANH", 1, 1, device="meta")), *vars(nn.Module)}
    return [*nn.RNNBase.__constants__, *(name for name in vars(module) if name not in ordinary)]


def _check_plain(recurrent: Recurrent) -> None:
    """Raise unless torch's own module can hold the layers inside."""
    for path, layer in recurrent.named_modules():
        if isinstance(layer, (Recurrent, Cell, nn.ModuleDict, nn.ModuleList)) or path.startswith("dropouts."):
            continue
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"expected ordinary Linear layers, got {type(layer).__name__} at '{path}'; torch's "
                f"{recurrent.kind.__name__} cannot hold it: raise what lb.draw or lb.mean return"
            )
        if path.endswith("project") and layer.bias is not None:
            raise ValueError(
                f"expected a projection without bias at '{path}', got one with a bias, for which torch's "
                f"{recurrent.kind.__name__} has no place; leave this layer out of the conversion (where=...)"
            )


def _check_packed(input: PackedSequence, features: int) -> None:
    """Raise for sequences of length zero and contradictory fields."""
    sizes: list[int] = input.batch_sizes.tolist() or [0]
    rows = sizes[0] if input.sorted_indices is None else len(input.sorted_indices)
    advice = "make it with torch.nn.utils.rnn.pack_padded_sequence, and leave empty sequences out of the batch"
    if min(sizes) < 1 or rows > sizes[0]:
        raise ValueError(
            f"expected every row of a packed sequence to have a step, and every step a row, got batch sizes {sizes} "
            f"for {rows} rows: a sequence has length zero; {advice}"
        )
    if sizes != sorted(sizes, reverse=True) or rows != sizes[0] or len(input.data) != sum(sizes):
        raise ValueError(
            f"expected a packed sequence with falling batch sizes, an index for each row and an entry for each step, "
            f"got batch sizes {sizes} for {rows} rows and {len(input.data)} entries; {advice}"
        )
    if input.data.dim() != 2 or input.data.shape[1] != features:
        raise ValueError(
            f"expected packed entries of shape ({sum(sizes)}, {features}), got {tuple(input.data.shape)}; the last "
            "axis holds the features of a step"
        )
