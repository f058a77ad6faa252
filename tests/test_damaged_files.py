"""Damaged, edited and hostile checkpoints: one ValueError with file and field, and nothing of what they claim."""

from __future__ import annotations

import json
import resource
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.runtime._files import checksum, read_tensors


def edit(path, key, **changes):
    """Change fields of the JSON in a file's metadata; the tensors and their checksums stay."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata[key] = changes["text"] if "text" in changes else json.dumps(json.loads(metadata[key]) | changes)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@contextmanager
def little_memory(mebibytes=512):
    """Let this process have no more memory than now plus a number of MiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + mebibytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "m.safetensors"
    lb.save(lb.convert(nn.Linear(8, 3), lb.Rank1(), likelihood=lb.Categorical()), path)
    return path


def test_the_posterior_of_a_deep_ensemble_is_not_saved_alone(tmp_path):
    net, path = nn.Linear(8, 3), tmp_path / "e.safetensors"
    fresh = lb.convert(lb.convert(net, lb.Rank1()), lb.DeepEnsemble(components=2))
    for ensemble in (lb.convert(net, lb.DeepEnsemble(components=2)), fresh, lb.Ensemble([net, nn.Linear(8, 3)])):
        with pytest.raises(
            ValueError, match=r"an ensemble of whole networks has no posterior next to its weights.* save all of it"
        ):
            lb.save(ensemble, path, only="posterior")
        assert not path.exists()


def test_a_file_with_the_posterior_of_a_deep_ensemble_alone_is_refused(tmp_path):
    net, path = nn.Linear(8, 3), tmp_path / "e.safetensors"
    lb.save(lb.convert(net, lb.DeepEnsemble(components=2)), path)
    edit(path, "leanbayes", only="posterior")
    with pytest.raises(
        ValueError, match=r"e\.safetensors' holds the posterior of an ensemble of whole networks without the weights"
    ):
        lb.load(path, net)


def test_members_around_the_same_weights_may_be_saved_without_them(tmp_path):
    net, path = nn.Linear(8, 3), tmp_path / "e.safetensors"
    ensemble = lb.convert(lb.convert(net, lb.Rank1()), lb.DeepEnsemble(components=2, init="copy"))
    with torch.no_grad():
        for parameter in ensemble.members[1].posterior.parameters():
            parameter.add_(0.1)
    lb.save(ensemble, path, only="posterior")
    x = torch.randn(4, 8)
    assert torch.equal(lb.predict(lb.load(path, net), x).mean, lb.predict(ensemble, x).mean)


@pytest.mark.parametrize("net", [None, nn.Linear, "linear"])
def test_something_else_than_a_network_is_refused(saved, net):
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module of the architecture .*m\.safetensors', got"):
        lb.load(saved, net)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chain": None}, "expected chain to be list.*, got None"),
        ({"chain": 5}, "expected chain to be list.*, got 5"),
        ({"chain": [5]}, r"expected chain to be list.*, got \[5\]"),
        ({"chain": "abc"}, "expected chain to be list.*, got 'abc'"),
        ({"chain": [{"method": "rank1"}]}, "the field chain.0.fields is missing"),
        ({"chain": [{"method": "rank1", "fields": {}, "paths": [5]}]}, "expected chain.0.paths to be"),
        ({"likelihood": "Gaussian"}, "expected likelihood to be"),
        ({"likelihood": 5}, "expected likelihood to be"),
        ({"likelihood": ["Gaussian"]}, "expected likelihood to be"),
        ({"likelihood": {"options": {}}}, "the field likelihood.name is missing"),
        ({"likelihood": {"name": "Gaussian", "options": [1]}}, "expected likelihood.options to be"),
        ({"likelihood": {"name": "Gaussian", "options": {"color": 1}}}, "options that Gaussian does not take"),
        ({"likelihood": {"name": "Gaussian", "options": {"std": "x"}}}, "expected likelihood.options.std to be float"),
        ({"likelihood": {"name": "Gaussian", "options": {"std": 10**400}}}, "expected likelihood.options.std to be"),
        ({"tied": 5}, "expected tied to be dict.*, got 5"),
        ({"tied": [1]}, "expected tied to be dict"),
        ({"tied": None}, "expected tied to be dict"),
        ({"tied": {"a": 1}}, "expected tied to be dict"),
        ({"paths": "0"}, "expected paths to be list"),
        ({"fields": 5}, "expected fields to be dict"),
        ({"fields": {"components": "four"}}, "expected fields.components to be int, got 'four'"),
        ({"fields": {"components": True}}, "expected fields.components to be int, got True"),
        ({"fields": {"prior": ["normal"]}}, "expected fields.prior to be"),
        ({"method": 5}, "expected method to be str, got 5"),
        ({"root": None}, "expected root to be str, got None"),
        ({"only": "some"}, "expected only to be Literal"),
        ({"format": True}, "expected format to be int, got True"),
        ({"text": "[" * 100_000}, "its JSON is nested too deeply"),
        ({"text": "[1, 2]"}, r"expected the header to be an object, got \[1, 2\]"),
        ({"text": ""}, "is damaged"),
        ({"text": "9" * 5000}, "is damaged"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_field_of_the_header_is_named(saved, change, message):
    edit(saved, "leanbayes", **change)
    with pytest.raises(ValueError, match=rf"m\.safetensors' .*{message}"):
        lb.load(saved, nn.Linear(8, 3))


@pytest.mark.parametrize(
    "method", [lb.Rank1(), lb.ModelPatch(patch=("*",)), lb.DeepEnsemble(components=2)], ids=lambda m: m.name
)
def test_sizes_that_the_tensors_do_not_have_are_refused_before_memory_is_taken(tmp_path, method):
    path = tmp_path / "m.safetensors"
    lb.save(lb.convert(nn.Linear(8, 3), method), path)
    edit(path, "leanbayes", fields=method.fields() | {"components": 10**9})
    with (
        little_memory(),
        pytest.raises(ValueError, match=r"m\.safetensors' is damaged: fields\.components is 1000000000"),
    ):
        lb.load(path, nn.Linear(8, 3))


@pytest.mark.parametrize("change", [{"fields": {"init_std": 1e308}}, {"root": "trunk", "paths": ["trunk"]}])
def test_what_torch_says_of_a_header_names_the_file(saved, change):
    edit(saved, "leanbayes", **change)
    with pytest.raises(ValueError, match=r"m\.safetensors'"):
        lb.load(saved, nn.Linear(8, 3))


def test_a_part_that_the_network_does_not_have_is_named(tmp_path):
    path = tmp_path / "m.safetensors"
    lb.save(lb.convert(nn.Linear(8, 3), lb.DeepEnsemble(components=2)), path)
    edit(path, "leanbayes", root="trunk")
    with pytest.raises(ValueError, match="has a layer 'trunk' that this network does not have"):
        lb.load(path, nn.Linear(8, 3))


def test_a_chain_of_ensembles_does_not_multiply_without_tensors(tmp_path):
    path = tmp_path / "m.safetensors"
    method = lb.DeepEnsemble(components=2)
    ensembles = lb.convert(lb.convert(nn.Linear(8, 3), method), method)
    lb.save(ensembles, path)
    x = torch.randn(4, 8)
    assert torch.equal(lb.predict(lb.load(path, nn.Linear(8, 3)), x).mean, lb.predict(ensembles, x).mean)
    step = {"method": method.name, "fields": method.fields(), "paths": [], "root": ""}
    edit(path, "leanbayes", chain=[step] * 40)
    with pytest.raises(ValueError, match=r"fields\.components is 2, but the file has tensors of 0 members"):
        lb.load(path, nn.Linear(8, 3))


# ---------------------------------------------------------------- checksums


TENSORS = [
    torch.arange(0, dtype=torch.float32),
    torch.tensor(3.0),
    torch.arange(13, dtype=torch.uint8),
    torch.arange(1029, dtype=torch.float64),
    torch.arange(3_001, dtype=torch.bfloat16),
    torch.arange(140_000, dtype=torch.int64),
]


def plain_checksum(data):
    """Compute what the docstring of leanbayes.files says, word by word."""
    step, block, chunk = 0x1E3779B97F4A7C15, 1024, 128 * 1024
    factor = lambda n: ((n * step % 2**64) ^ (n * step % 2**64 >> 29)) * step % 2**64 | 1  # noqa: E731
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return (
        sum(
            (n // chunk * step | 1) * factor(block + n % chunk // block) * factor(n % block) * word
            for n, word in enumerate(words)
        )
        % 2**64
    )


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{tuple(t.shape)}")
def test_a_checksum_is_the_weighted_sum_of_words(tensor):
    data = tensor.flatten().view(torch.uint8).numpy().tobytes()
    assert checksum(tensor) == f"{plain_checksum(data):016x}"


def test_a_checksum_does_not_depend_on_where_the_bytes_lie():
    bytes_ = torch.randint(256, (3 * 2**20 + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    odd = torch.cat([bytes_.new_zeros(3), bytes_])[3:]
    assert odd.data_ptr() % 8
    assert checksum(odd) == checksum(bytes_)
    assert checksum(torch.eye(3, 4).T) == checksum(torch.eye(3, 4).T.contiguous())


def test_exchanged_words_change_the_checksum():
    values = torch.arange(400_000, dtype=torch.int64)
    whole = checksum(values)
    for other in (1, 8, 1023, 1024, 131_072, 262_144):  # in the same block, chunk, elsewhere
        values[[0, other]] = values[[other, 0]]
        assert checksum(values) != whole
        values[[0, other]] = values[[other, 0]]


def test_every_flipped_bit_of_a_tensor_is_an_error(saved):
    content = saved.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    _, tensors = read_tensors(saved)
    for bit in range(8 * start, 8 * len(content), 37):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        saved.write_bytes(bytes(broken))
        with pytest.raises(
            ValueError, match=r"m\.safetensors' is damaged: the numbers of '.*' are not those .*again"
        ) as told:
            lb.load(saved, nn.Linear(8, 3))
        assert any(f"'{name}'" in str(told.value) for name in tensors)


def test_a_file_without_checksums_is_read(saved):
    from safetensors.torch import save_file

    metadata, tensors = read_tensors(saved)
    save_file(tensors, saved, metadata)
    lb.load(saved, nn.Linear(8, 3))


@pytest.mark.parametrize("text", ["{}", "[]", "5", "{", "[" * 100_000, '{"a": 1}'])
def test_damaged_checksums_are_an_error(saved, text):
    edit(saved, "leanbayes.checksums", text=text)
    with pytest.raises(ValueError, match=r"m\.safetensors' is damaged"):
        lb.load(saved, nn.Linear(8, 3))
