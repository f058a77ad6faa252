"""Standard noise of a forward pass: declared by layers (`NoiseSpec`), drawn for a whole model (`NoisePool`).

Noise has no parameters in it. Fresh noise comes from torch's global generator when a pass begins. Named noise is a
function of (seed, index, layer path): the same on every device, in every chunk and in every order of rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from leanbayes.distributions.random import Kind, normals, Rows, standard, standard_rows
from leanbayes.runtime.distributed import rank_and_world

Noise = tuple[Tensor, ...]
"""The noise of one layer: one tensor for each of its specs, draws or rows on the first axis."""


class NoiseSpec(NamedTuple):
    """One tensor of standard noise that a layer needs.

    Attributes:
        kind: "normal", "uniform" in [0, 1), or "seed" (integers for `distributions.random.uniforms`).
        shape: its shape without the first axis.
        per_row: one per row of the batch, or one per pass.
        counted: compute named noise on the layer's device by a counter, for as many numbers as weights.
        choices: uniform numbers that choose between this many equal parts of [0, 1); 0 if they do something else.
    """

    kind: Kind
    shape: tuple[int, ...]
    per_row: bool = True
    counted: bool = False
    choices: int = 0


class Noisy(Protocol):
    """The part of a stochastic layer that its noise depends on."""

    path: str

    @property
    def device(self) -> torch.device: ...

    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]: ...


class _Slot(NamedTuple):
    """Where the noise of one spec of a layer is in a pooled tensor: columns, and their shape."""

    path: str
    size: int
    shape: tuple[int, ...]


class NoisePool:
    """All fresh noise of a pass with a known size: one tensor per kind, sliced for layers. Equal paths share noise.

    | kind             | shape  | read by                                                       |
    |------------------|--------|---------------------------------------------------------------|
    | normal per row   | (R, N) | rank-1 factors, implicit nodes, signs of Flipout              |
    | uniform per row  | (R, N) | Cauchy factors, masks of MC dropout                           |
    | seed per row     | (R, N) | dropout layers of the network                                 |
    | uniform per pass | (1, N) | patches, DropConnect, ordering units                          |
    | normal per pass  | (1, N) | sampled weight tables (embeddings, sequences, Flipout)        |
    """

    def __init__(self, layers: Iterable[Noisy]) -> None:
        self.layout: dict[tuple[Kind, bool, torch.device], list[_Slot]] = {}
        placed: set[str] = set()
        for layer in layers:
            specs = () if layer.path in placed else layer.noise_specs(shared=False)
            placed |= {layer.path} if specs else set()
            for spec in specs:
                slots = self.layout.setdefault((spec.kind, spec.per_row, layer.device), [])
                slots.append(_Slot(layer.path, math.prod(spec.shape), spec.shape))

    def draw(self, rows: int) -> dict[str, Noise]:
        """Draw the noise of every layer, by path; this process keeps its rows of the noise of the global batch."""
        rank, world = rank_and_world()
        found: dict[str, list[Tensor]] = {}
        for (kind, per_row, device), slots in self.layout.items():
            pooled = standard(kind, (rows * world if per_row else 1, sum(slot.size for slot in slots)), device)
            pooled = _own_rows(pooled, rank, world) if per_row else pooled
            for slot, part in zip(slots, pooled.split_with_sizes([slot.size for slot in slots], 1), strict=True):
                shaped = part if len(slot.shape) == 1 else part.view(part.shape[0], *slot.shape)
                found.setdefault(slot.path, []).append(shaped)
        return {path: tuple(parts) for path, parts in found.items()}


def fresh_noise(layer: Noisy, rows: int, generator: torch.Generator | None = None) -> Noise:
    """Draw a layer's noise for this process's rows of the global batch, by default from torch's global generator.

    Every process draws the noise of all rows and keeps its own: equal seeds on all ranks do not mean equal noise.
    """
    rank, world = rank_and_world()
    return tuple(
        _own_rows(_draw(spec, rows * world, layer.device, generator), rank, world) if spec.per_row else
        _draw(spec, 1, layer.device, generator)
        for spec in pass_specs(layer)
    )  # fmt: skip


def row_noise(layer: Noisy, rows: int, *name: int | str) -> Noise:
    """Return named noise per row: a function of the name and the layer's path."""
    generator = generator_of(*name, layer.path)
    return tuple(_draw(spec, rows, layer.device, generator) for spec in pass_specs(layer))


Design = Literal["independent", "paired"]
"""How the draws of one seed depend on each other; each of them alone is a draw from the posterior."""

INDEPENDENT: Design = "independent"
"""The default design; result files leave it out of their settings."""

BELOW_ONE = 1 - 2**-24
"""The largest number of float32 below one."""


def designed_noise(layer: Noisy, names: Sequence[tuple[int, int, int]], design: Design) -> Noise:
    """Return the noise of functions that are named by seed, index and ordinal, one row each.

    Paired: function 2j + 1 has the noise of function 2j, mirrored: -n for normal, 1 - u for uniform numbers. A choice
    between K parts is stratified instead: functions jK to jK + K - 1 have u + i/K modulo 1, so each part once. Integer
    seeds have no mirror image and stay independent.
    """
    if design == "independent":
        return function_noise(layer, names)
    specs = layer.noise_specs(shared=True)
    sizes = [1 if spec.kind == "seed" else spec.choices or 2 for spec in specs]
    drawn = {size: _of_first(layer, names, size) for size in set(sizes)}
    indices = torch.tensor([index for _, index, _ in names], device=layer.device)
    return tuple(
        _moved(drawn[size][position], indices % size, spec)
        for position, (spec, size) in enumerate(zip(specs, sizes, strict=True))
    )


def _of_first(layer: Noisy, names: Sequence[tuple[int, int, int]], size: int) -> Noise:
    """Return, for each function, the noise of the first one of its block of `size` functions."""
    sources = [(seed, index - index % size, ordinal) for seed, index, ordinal in names]
    row = {source: position for position, source in enumerate(dict.fromkeys(sources))}
    rows = torch.tensor([row[source] for source in sources], device=layer.device)
    return tuple(noise[rows] for noise in function_noise(layer, list(row)))


def _moved(noise: Tensor, places: Tensor, spec: NoiseSpec) -> Tensor:
    """Return the noise of functions by their places in a block: the first unchanged, others mirrored or rotated."""
    places = places.view(-1, *[1] * (noise.dim() - 1))
    if spec.kind == "seed":
        return noise
    if spec.choices:
        return ((noise + places / spec.choices) % 1).clamp(max=BELOW_ONE)
    mirror = -noise if spec.kind == "normal" else (1 - noise).clamp(max=BELOW_ONE)
    return torch.where(places == 1, mirror, noise)


def function_noise(layer: Noisy, names: Sequence[tuple[int | str, ...]]) -> Noise:
    """Return the noise of named functions, one row each."""
    wanted = [Rows(spec.kind, spec.shape, spec.counted) for spec in layer.noise_specs(shared=True)]
    seeds = [_seed_of(*name, layer.path) for name in names] if wanted else []
    return tuple(standard_rows(wanted, seeds, layer.device))


def activation_noise(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal noise for the entries of x: this process's rows of the noise of the global batch."""
    if generator is not None and generator.device != x.device:
        return normals(tuple(x.shape), generator, x.device)
    rank, world = rank_and_world()
    shape = tuple(x.shape) if world == 1 else (len(x), world, *x.shape[1:])
    drawn = standard("normal", shape, x.device, generator)
    return drawn if world == 1 else drawn[:, rank].contiguous()


def check_design(design: str, *, shared: bool = True) -> None:
    """Raise unless the design exists, and fits the noise: only one function for all rows can be mirrored."""
    if design not in get_args(Design):
        raise ValueError(f"expected design to be one of {', '.join(get_args(Design))}, got {design!r}")
    if design != "independent" and not shared:
        raise ValueError(f"noise per row has no design: expected design='independent', got {design!r}")


def pass_specs(layer: Noisy) -> tuple[NoiseSpec, ...]:
    """Return the noise that a layer needs in a fresh pass to sample its variables."""
    return layer.noise_specs(shared=False) or layer.noise_specs(shared=True)


def generator_of(*name: int | str, device: torch.device | None = None) -> torch.Generator:
    """Return the generator of a draw's and a layer's name; a hash keeps similar names independent."""
    return torch.Generator(device or "cpu").manual_seed(_seed_of(*name))


def _seed_of(*name: int | str) -> int:
    digest = hashlib.blake2b("/".join(map(str, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_captured() -> bool:
    """Return whether the pass is traced or captured: numbers that Python draws would be the same in every replay."""
    if torch.compiler.is_compiling():
        return True
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _draw(spec: NoiseSpec, rows: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    shape = (rows if spec.per_row else 1, *spec.shape)
    return standard(spec.kind, shape, device, generator, counted=spec.counted).to(device)


def _own_rows(noise: Tensor, rank: int, world: int) -> Tensor:
    return noise if world == 1 else noise[rank::world].contiguous()
