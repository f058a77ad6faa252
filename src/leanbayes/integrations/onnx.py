"""Export a predictive distribution to one ONNX file: all draws, their mean and the uncertainties.

The network is traced once, as a function of its inputs and of one draw's random variables. The graph is repeated for
each draw. Draws share their common parts: weights, equal tensors, and nodes with the same inputs (layers before the
first stochastic one; equal draws of one member). Rank-1 factors of 16 draws cost kilobytes; methods with a variable per
weight cost S copies of the weights.

Needs torch 2.6 or later, whose exporter starts from `torch.export`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor
from torch.func import functional_call
from torch.torch_version import TorchVersion

from leanbayes import __version__
from leanbayes.core.conversion import own_likelihood, stochastic_layers, unwrap
from leanbayes.core.prediction import decompose, Decomposition
from leanbayes.core.student import NAME as STUDENT
from leanbayes.core.student import Student
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods._base import one_draw, StochasticLayer
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime._files import local, PathLike
from leanbayes.runtime.batches import call, Inputs, leading_rows, Output, repeat_rows, to_device
from leanbayes.runtime.passes import draws, many_draws
from leanbayes.runtime.twins import twin

KEY = "leanbayes"  # key of the file's metadata: JSON on the model, the likelihood and versions
OUTPUTS = Decomposition._fields  # names of the graph's outputs: mean, total, aleatoric, epistemic
ROWS = "rows"  # name of the batch size in the graph
OLDEST_TORCH = "2.6"

LARGEST_FILE = 2**31 - 2**26
"""Most bytes of tensors in one file: protobuf is limited to 2 GiB. More go into a second file, `<name>.data`."""


def export(  # noqa: PLR0913
    model: nn.Module,
    example: Inputs,
    path: PathLike,
    *,
    samples: int = 16,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    output: Output | None = None,
    dynamic_rows: bool = True,
    opset: int | None = None,
) -> Path:
    """Write `lb.predict(model, x, samples=samples, seed=seed)` as one ONNX graph.

    Its outputs are `mean`, `total`, `aleatoric` and `epistemic` of a `Prediction`. Its inputs are `input`; `input_0`,
    `input_1`, ... of a tuple; or the names of a mapping. Other values than tensors are constants from the example. The
    file appears at once; tensors beyond 2 GB are stored in `<name>.data` next to it.

    Args:
        model: a converted model, an ensemble, a student (one pass, without draws), or a plain network.
        example: inputs, as for `predict`; only their shapes matter.
        path: the `.onnx` file; its folder is made if needed.
        samples: S, the number of draws in the graph.
        seed: of the draws.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        output: picks the tensor from the model's return value.
        dynamic_rows: allow any number of rows; False fixes that of the example.
        opset: version of the ONNX operators; default torch's choice.

    Raises:
        ImportError: if onnx and onnxscript are not installed.
        ValueError: in one sentence, if torch cannot export the network.

    Example:
        >>> lb.integrations.onnx.export(bnn, x[:2], "model.onnx", samples=16)
        >>> session = onnxruntime.InferenceSession("model.onnx")
        >>> mean, total, aleatoric, epistemic = session.run(None, {"input": x.numpy()})
    """
    _check(samples)
    place = local(path)
    likelihood = likelihood or own_likelihood(model) or Categorical()
    model = unwrap(model)
    reads: nn.Module = Summary(likelihood)
    if isinstance(model, Student):
        samples, reads = 1, ReadStudent(model)
    network = model.network if isinstance(model, Student) else model
    weight = next((*model.parameters(), *model.buffers()).__iter__(), torch.empty(0))
    tracer = Tracer(to_device(example, weight.device), output, dynamic_rows, opset)
    with torch.no_grad(), _quiet():
        whole = Assembly(tracer.inputs())
        outputs = _outputs(network, tracer, whole, samples, seed)
        summary = tracer.trace_summary(reads, samples)
        finished = whole.model(whole.repeat(summary, outputs), summary)
    stochastic: Any = [m for m in model.modules() if isinstance(m, StochasticLayer) or members_of(m)]
    methods = dict.fromkeys(module.method for module in stochastic)
    described = [{"method": method.name, "fields": method.fields()} for method in methods]
    about = {
        "methods": [{"method": STUDENT, "fields": {}}] if isinstance(model, Student) else described,
        "likelihood": {"name": type(likelihood).__name__, "options": likelihood.options},
        "uncertainty": "entropy in nats" if likelihood.measure == "entropy" else "variance",
        "versions": {"leanbayes": __version__, "torch": str(torch.__version__)},
        "samples": samples,
        "seed": seed,
    }
    finished.metadata_props[KEY] = json.dumps(about)
    return _save(finished, place)


class Function(nn.Module):
    """A model as a function of its inputs and of one draw's random variables.

    Attributes:
        variables: of each draw, in the order of the arguments of `forward`.
    """

    def __init__(self, model: nn.Module, example: Inputs, output: Output | None, seed: int, samples: int) -> None:
        """Build the plain network that draws are folded into, and sample all draws, as `predict` does."""
        super().__init__()
        found = dict(stochastic_layers(model))
        with draws(model, mean=True):
            plain = {id(layer): layer.twin(one_draw(layer.variables(), 0)) for layer in found.values()}
        with many_draws(model, seed, range(samples)):
            sampled = [layer.variables() for layer in found.values()]
        self.example = example
        self.called = Called(twin(model, plain).eval(), output)
        self.layers = nn.ModuleList(found.values())
        self.paths = list(found)
        self.names = [list(variables) for variables in sampled]
        self.variables = [
            [tensor for variables in sampled for tensor in one_draw(variables, row).values()] for row in range(samples)
        ]

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the network's outputs; the tensors are the inputs, then the variables."""
        given = iter(tensors)
        inputs = _filled(self.example, given)
        folded: dict[str, Tensor] = {}
        layers: Any = self.layers
        for path, layer, names in zip(self.paths, layers, self.names, strict=True):
            where = f"network.{path}" if path else "network"
            plain = layer.fold({name: next(given) for name in names})
            folded |= {f"{where}.{name}": tensor for name, tensor in plain.items()}
        # A layer that is used twice is one module with two names: torch would tie them, and restore only one.
        result: Tensor = functional_call(self.called, folded, (inputs,), tie_weights=False)
        return result


class Called(nn.Module):
    """A network that takes all inputs as one object."""

    def __init__(self, network: nn.Module, output: Output | None) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(self, inputs: Inputs) -> Tensor:
        return call(self.network, inputs, self.output)


class Summary(nn.Module):
    """The mean and the uncertainties of the outputs of S draws."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Average over draws; the likelihood reads them as rows of one batch."""
        read = self.likelihood.predictive(torch.cat(tensors))
        means, own = (part.reshape(len(tensors), -1, *part.shape[1:]) for part in read)
        mean, aleatoric = means.mean(0), own.mean(0)
        if self.likelihood.measure == "variance":
            epistemic = (means - mean).square().mean(0)
            return mean, aleatoric + epistemic, aleatoric, epistemic
        return tuple(decompose(mean[None], aleatoric[None], self.likelihood.measure))


class ReadStudent(nn.Module):
    """The mean and the uncertainties of the outputs of a student."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.student.read(tensors[0]))


class Tracer:
    """Traces modules to ONNX models, all for the same inputs and operators."""

    def __init__(self, example: Inputs, output: Output | None, dynamic_rows: bool, opset: int | None) -> None:
        """Store the inputs; a trace needs two rows, because torch takes a single one for a constant."""
        rows = leading_rows(example)
        if not rows:
            raise ValueError("expected an example with rows on the first axis of its first tensor, got none")
        self.varies = [dynamic_rows and t.dim() > 0 and len(t) == rows for _, t in _tensors(example)]
        self.example: Inputs = repeat_rows(example, rows, 2) if dynamic_rows and rows == 1 else example
        self.named = dict(_tensors(self.example))
        self.output, self.dynamic_rows, self.opset = output, dynamic_rows, opset
        self.result = torch.empty(0)

    def inputs(self) -> list[Any]:
        from onnxscript import ir

        values = []
        for (name, tensor), varies in zip(self.named.items(), self.varies, strict=True):
            shape = ir.Shape([ROWS, *tensor.shape[1:]] if varies else tensor.shape)
            values.append(ir.Value(name=name, shape=shape, type=ir.TensorType(ir.tensor(tensor).dtype)))
        return values

    def trace_draw(self, function: Function) -> Any:
        """Return one draw, with its variables as the last inputs."""
        tensors = (*self.named.values(), *function.variables[0])
        self.result = function(*tensors)
        return self._trace(function, tensors, self.varies + [False] * len(function.variables[0]))

    def trace_summary(self, reads: nn.Module, samples: int) -> Any:
        """Return the map from the outputs of all draws to the mean and the uncertainties."""
        outputs = tuple(self.result.clone() for _ in range(samples))
        return self._trace(reads, outputs, [self.dynamic_rows] * samples)

    def _trace(self, module: nn.Module, tensors: tuple[Tensor, ...], varies: Sequence[bool]) -> Any:
        from onnxscript import optimizer

        shapes = {"tensors": tuple({0: torch.export.Dim(ROWS)} if axis else None for axis in varies)}
        try:
            program = torch.export.export(module, tensors, dynamic_shapes=shapes, strict=False)
            onnx = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False, opset_version=self.opset)
        except Exception as error:  # of many kinds, as the exporters choose
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            raise ValueError(
                f"torch cannot export this network ({reason}); try torch.export.export on lb.draw(model), or "
                "fix the number of rows with dynamic_rows=False"
            ) from error
        assert onnx is not None, "without a file name, the program is returned"
        traced = onnx.model
        _drop_idle_squeezes(traced)
        optimizer.optimize_ir(traced)
        return traced


def _drop_idle_squeezes(traced: Any) -> None:
    """Replace squeezes of an axis longer than one, which torch ignores and ONNX refuses."""
    for node in traced.graph:
        if node.op_type == "Squeeze" and _rank(node.inputs) == _rank(node.outputs) is not None:
            node.op_type = "Identity"
            node.resize_inputs(1)


def _rank(values: Any) -> int | None:
    shape = values[0].shape
    return None if shape is None else len(shape)


class Assembly:
    """A graph of repeated traces on different inputs, without duplicate nodes."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = list(inputs)
        self.nodes: list[Any] = []
        self.done: dict[tuple[Any, ...], Any] = {}
        self.weights: dict[Any, Any] = {}
        self.constants: dict[tuple[Any, ...], Any] = {}

    def constant(self, tensor: Tensor) -> Any:
        """Return a tensor as a value of the graph; equal tensors share one value."""
        from onnxscript import ir

        tensor = tensor.detach().cpu().contiguous()
        numbers = hashlib.blake2b(tensor.flatten().view(torch.uint8).numpy().data).digest()
        key = (tensor.dtype, tensor.shape, numbers)
        if key not in self.constants:
            self.constants[key] = _initialiser(f"variable/{len(self.constants)}", ir.tensor(tensor))
        return self.constants[key]

    def repeat(self, traced: Any, inputs: Sequence[Any]) -> list[Any]:
        """Add a traced model on other inputs, without duplicate nodes, and return its outputs."""
        known: dict[Any, Any] = dict(zip(traced.graph.inputs, inputs, strict=True))
        known[None] = None  # an omitted optional input
        for value in traced.graph.initializers.values():
            if value not in self.weights:
                self.weights[value] = _initialiser(f"weight_{len(self.weights)}/{value.name}", value.const_value)
            known[value] = self.weights[value]
        for node in traced.graph:
            key = (node, *(known[value] for value in node.inputs))
            if key not in self.done:
                self.done[key] = self._copy(node, key[1:])
            known.update(zip(node.outputs, self.done[key].outputs, strict=True))
        return [known[value] for value in traced.graph.outputs]

    def model(self, results: Sequence[Any], like: Any) -> Any:
        from onnxscript import ir

        for name, value, traced in zip(OUTPUTS, results, like.graph.outputs, strict=True):
            shape = ir.Shape([size if isinstance(size, int) else ROWS for size in traced.shape])
            named = ir.Value(name=name, type=traced.type, shape=shape)
            self.nodes.append(ir.Node("", "Identity", [value], outputs=[named], name=f"Identity/{name}"))
        used = {value for node in self.nodes for value in node.inputs}
        graph = ir.Graph(
            self.inputs,
            [node.outputs[0] for node in self.nodes[-len(OUTPUTS) :]],
            nodes=self.nodes,
            initializers=[v for v in (*self.weights.values(), *self.constants.values()) if v in used],
            opset_imports={"": like.graph.opset_imports[""]},
            name=KEY,
        )
        return ir.Model(graph, ir_version=like.ir_version, producer_name=KEY, producer_version=__version__)

    def _copy(self, node: Any, inputs: Sequence[Any]) -> Any:
        from onnxscript import ir

        kinds = {attribute.type for attribute in node.attributes.values()}
        if node.domain or kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
            raise ValueError(
                f"expected a network of plain ONNX operators, got {node.domain or 'control flow'} ({node.op_type}); "
                "rewrite that part of the network"
            )
        name = f"{node.op_type}_{len(self.nodes)}"
        outputs = [ir.Value(name=f"{name}/{value.name}" if value.name else "") for value in node.outputs]
        self.nodes.append(ir.Node("", node.op_type, inputs, node.attributes.values(), outputs=outputs, name=name))
        return self.nodes[-1]


def _outputs(model: nn.Module, tracer: Tracer, whole: Assembly, samples: int, seed: int) -> list[Any]:
    """Add all draws to the graph and return their outputs; draw i of K members is draw i // K of member i mod K."""
    if members := members_of(model):
        count = len(members)
        shares = [len(range(k, samples, count)) for k in range(count)]
        each = [_outputs(m, tracer, whole, n, seed) for m, n in zip(members, shares, strict=True)]
        return [each[index % count][index // count] for index in range(samples)]
    if not samples:
        return []
    function = Function(model, tracer.example, tracer.output, seed, samples)
    traced = tracer.trace_draw(function)
    each_draw = ([*whole.inputs, *map(whole.constant, variables)] for variables in function.variables)
    return [whole.repeat(traced, inputs)[0] for inputs in each_draw]


def _tensors(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested inputs by name: `input`, `input_0`, or the keys of a mapping."""
    if isinstance(inputs, Tensor):
        yield name or "input", inputs
    elif isinstance(inputs, Mapping):
        for key, item in inputs.items():
            yield from _tensors(item, f"{name}_{key}" if name else str(key))
    elif isinstance(inputs, (tuple, list)):
        for position, item in enumerate(inputs):
            yield from _tensors(item, f"{name or 'input'}_{position}")


def _filled(inputs: Any, tensors: Iterator[Tensor]) -> Any:
    """Replace the tensors in nested inputs, in the order of `_tensors`."""
    if isinstance(inputs, Tensor):
        return next(tensors)
    if isinstance(inputs, Mapping):
        return {key: _filled(item, tensors) for key, item in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_filled(item, tensors) for item in inputs)
    return inputs


def _initialiser(name: str, tensor: Any) -> Any:
    from onnxscript import ir

    return ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))


def _save(model: Any, path: Path) -> Path:
    """Write the model into a temporary folder next to `path`, then move the files, tensors first."""
    from onnxscript import ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    data = f"{path.name}.data" if size > LARGEST_FILE else None
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        ir.save(model, Path(folder) / path.name, format="protobuf", external_data=data)
        for name in filter(None, (data, path.name)):
            (Path(folder) / name).replace(path.with_name(name))
    return path


def _check(samples: int) -> None:
    if not (isinstance(samples, int) and samples >= 1):
        raise ValueError(f"expected samples to be a whole number of at least 1, got {samples!r}")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"ONNX export needs {' and '.join(missing)}: pip install leanbayes[onnx]")
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        raise ImportError(f"ONNX export needs torch {OLDEST_TORCH} or later, got {torch.__version__}: update it")


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
