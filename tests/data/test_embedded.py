"""The embedded images of the demo follow their written rule."""

from __future__ import annotations

import pytest
import torch

from leanbayes import data
from tests.data.test_real import need
from tools.demo_data import first_of


def test_the_embedded_images_have_eight_classes_and_two_that_are_left_out():
    found = data.load("fashion-demo")
    assert (len(found.train), len(found.test), len(found.further["left-out"])) == (2000, 1000, 300)
    assert torch.bincount(found.train.y).tolist() == [250] * 8
    assert torch.bincount(found.test.y).tolist() == [125] * 8
    assert found.classes[-1] == "sneaker"
    assert found.input_shape == (1, 28, 28)


def test_left_out_images_are_out_of_distribution_inputs_of_this_set():
    found = data.load("fashion-demo")
    assert data.ood("left-out", found).shape == (300, 1, 28, 28)
    with pytest.raises(ValueError, match="unknown data set 'left-out'"):
        data.ood("left-out", data.load("digits"))


def test_it_has_one_split():
    with pytest.raises(ValueError, match="fashion-demo has one split"):
        data.load("fashion-demo", split=1)


def test_the_images_are_the_first_of_fashion_mnist(data_root):
    need(data_root, "fashion_mnist.npz")
    whole, demo = data.load("fashion-mnist", data_root), data.load("fashion-demo")
    rows = first_of(whole.train.y, range(8), 250)
    assert torch.equal(whole.train.x[rows], demo.train.x)
    assert torch.equal(whole.train.y[rows], demo.train.y)
    assert torch.equal(whole.test.x[first_of(whole.test.y, (8, 9), 150)], demo.further["left-out"].x)
