"""Where channels are: recognised by the shape, asked for where both readings are possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import leanbayes as lb
from leanbayes import data
from leanbayes.cli import main as cli
from leanbayes.compare.job import DataSpec, Job
from leanbayes.compare.load_run import Preparation
from leanbayes.data.files.npz import channel_axis_like


def save(path, shape, rows=40):
    x = np.random.default_rng(0).integers(0, 256, (rows, *shape), dtype=np.uint8)
    y = np.arange(rows) % 2
    np.savez(path, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    return x


@pytest.mark.parametrize(
    ("shape", "expected", "read"),
    [
        ((16, 16, 4), (4, 16, 16), "last"),
        ((16, 12, 2), (2, 16, 12), "last"),
        ((16, 12, 11), (11, 16, 12), "last"),
        ((4, 16, 16), (4, 16, 16), "first"),
        ((2, 16, 12), (2, 16, 12), "first"),
        ((28, 28, 1), (1, 28, 28), "last"),
        ((3, 8, 8), (3, 8, 8), "first"),
    ],
)
def test_channels_are_recognised(tmp_path, shape, expected, read):
    x = save(tmp_path / "mine.npz", shape)
    mine = data.load(tmp_path / "mine.npz")
    assert (mine.input_shape, mine.channels) == (expected, read)
    turned = x if read == "first" else np.moveaxis(x, -1, 1)
    assert np.array_equal(mine.train.x.numpy(), turned)


@pytest.mark.parametrize("shape", [(3, 3, 3), (1, 1, 3), (16, 16, 16), (8, 8, 200), (2, 40, 3), (1, 40, 1)])
def test_shapes_with_two_readings_are_asked_about(tmp_path, shape):
    x = save(tmp_path / "mine.npz", shape)
    first, middle, last = shape
    sentence = (
        rf"mine: x_train has shape \(40, {first}, {middle}, {last}\), images of {first} channels and {middle} x {last} "
        rf"pixels, or of {last} channels and {first} x {middle} pixels\. Say which: channels='first' .*--channels first"
    )
    with pytest.raises(ValueError, match=sentence):
        data.load(tmp_path / "mine.npz")
    assert data.load(tmp_path / "mine.npz", channels="first").input_shape == shape
    mine = data.load(tmp_path / "mine.npz", channels="last")
    assert mine.input_shape == (last, first, middle)
    assert np.array_equal(mine.train.x.numpy(), np.moveaxis(x, -1, 1))


def test_channels_are_for_arrays_that_have_them(tmp_path):
    save(tmp_path / "mine.npz", (16, 16))
    with pytest.raises(ValueError, match=r"mine: channels='last' is for images .*got x_train of shape \(40, 16, 16\)"):
        data.load(tmp_path / "mine.npz", channels="last")
    with pytest.raises(ValueError, match=r"expected channels 'first' or 'last' .*got 'middle'"):
        data.load(tmp_path / "mine.npz", channels="middle")
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{i},{i / 3}\n" for i in range(9)))
    with pytest.raises(ValueError, match=r"channels are for \.npz files, got channels='last' with .*t\.csv"):
        data.load(tmp_path / "t.csv", channels="last")
    with pytest.raises(ValueError, match="target, task and channels are for your own data"):
        data.load("digits", channels="last")


def test_new_rows_are_read_as_the_training_data():
    assert channel_axis_like((4, 5, 6), (4, 5, 6), None) == "first"
    assert channel_axis_like((5, 6, 4), (4, 5, 6), None) == "last"
    assert channel_axis_like((3, 3, 3), (3, 3, 3), "last") == "last"
    assert channel_axis_like((3, 3, 3), (3, 3, 3), None) == "first"
    assert channel_axis_like((4, 4, 9), (4, 5, 6), "last") is None
    x = torch.arange(54).reshape(2, 3, 3, 3).to(torch.uint8)
    for channels, turned in (("last", x.permute(0, 3, 1, 2)), ("first", x)):
        prepared = Preparation("mine", (3, 3, 3), torch.zeros(3), torch.ones(3), channels)(x)
        assert torch.equal(prepared, turned.float() / 255)
    with pytest.raises(ValueError, match=r"expected rows of shape \(3, 3, 3\), as mine has, got \(3, 3, 5\)"):
        Preparation("mine", (3, 3, 3), torch.zeros(3), torch.ones(3))(torch.zeros(2, 3, 3, 5))


def test_out_of_distribution_images_have_their_channels_found(tmp_path):
    save(tmp_path / "mine.npz", (3, 3, 3))
    mine = data.load(tmp_path / "mine.npz", channels="last")
    assert data.ood(str(tmp_path / "mine.npz"), mine).shape == (4, 3, 3, 3)
    save(tmp_path / "cubes.npz", (16, 16, 16))
    with pytest.raises(
        ValueError, match=r"cubes\.npz: x_test has shape .* Save them as \(rows, channels, height, width\)"
    ):
        data.ood(str(tmp_path / "cubes.npz"), mine)


def test_the_command_asks_and_says_how_it_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "cubes.npz", (8, 8, 8))
    command = [
        "compare",
        "--data",
        "cubes.npz",
        "--methods",
        "plain",
        "--seeds",
        "0",
        "--recipe.epochs",
        "1",
        "--no-shift",
        "--net",
        "mlp",
    ]
    command += ["--out", "r"]
    assert cli.main(command) == 2
    assert "--channels last" in capsys.readouterr().err
    assert cli.main([*command, "--channels", "last", "--ood", "none"]) == 0
    said = capsys.readouterr()
    assert "images 8x8x8 (channels last in the file)" in said.err.splitlines()[0]
    run = "r/cubes/mlp/plain/seed0"
    assert cli.main(["predict", run, "--out", "p"]) == 0  # the run knows


def test_the_flag_is_part_of_a_job_only_where_it_is_given():
    def job(**given):
        source = DataSpec(name="mine.npz", **given)
        return Job(source=source, net="mlp", method=None, recipe=lb.Recipe(epochs=1))

    assert "channels" not in job().settings()["data"]
    assert job(channels="last").settings()["data"]["channels"] == "last"
    assert job().id != job(channels="last").id != job(channels="first").id
    assert "channels" not in repr(DataSpec(name="mine.npz"))  # folders of suites are named by a digest of it
