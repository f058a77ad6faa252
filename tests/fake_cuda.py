"""A stand-in for `torch.cuda` where there is none: streams, a generator, and graphs that compute when captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stream:
    """A stream; all of them run at once."""

    def __init__(self, device: object = None) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Generator:
    """A generator that is in a capture until the capture ends without an error."""

    def __init__(self, *, captured: bool = False) -> None:
        self.captured = captured

    def clone_state(self) -> Generator:
        return Generator(captured=self.captured)

    def graphsafe_set_state(self, state: Generator) -> None:
        self.captured = state.captured


class Graph:
    """A graph; one that is `invalid` cannot be ended."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.replays, self.dropped, self.open = cuda, 0, False, False

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self.cuda.current is not self.cuda.default, "CUDA captures no work on its default stream"
        self.open = self.cuda.default_generators[0].captured = True

    def capture_end(self) -> None:
        if not self.open or self.cuda.invalid:
            self.open = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.open = self.cuda.default_generators[0].captured = False

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        self.dropped = True


class FakeCuda:
    """The functions that a capture calls."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.default_generators = [Generator()]
        self.graphs: list[Graph] = []
        self.invalid = False

    Stream = staticmethod(Stream)

    def CUDAGraph(self) -> Graph:
        self.graphs.append(Graph(self))
        return self.graphs[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    def synchronize(self, device: object = None) -> None:
        assert not any(graph.open for graph in self.graphs), "a capture cannot wait"

    def empty_cache(self) -> None:
        assert not any(graph.open for graph in self.graphs), "a capture cannot free memory"

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return any(graph.open for graph in self.graphs)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the stand-in for torch.cuda has no {name}")
