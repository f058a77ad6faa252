"""Features of classifiers against their own layers; Inception with a stand-in for torchvision."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from leanbayes import metrics
from leanbayes.models import LeNet5


class Branched(nn.Module):
    """A classifier whose linear layers are not registered in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.unused = nn.Conv2d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x))


def images(count: int, *shape: int) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


def test_features_enter_the_last_linear_layer():
    torch.manual_seed(0)
    model, x = LeNet5(), images(10, 1, 28, 28)
    network = metrics.classifier_features(model, batch_size=4)
    assert network.name == "LeNet5, input of head.2"
    seen = network(x)
    with torch.no_grad():
        torch.testing.assert_close(seen.features, model.head[:2](model.features(x)))
        torch.testing.assert_close(seen.probabilities, model(x).softmax(1))
    assert not seen.features.requires_grad


def test_another_layer_can_be_chosen_and_named():
    torch.manual_seed(0)
    model, x = Branched().eval(), images(6, 1, 4, 4)
    network = metrics.classifier_features(model, "out", name="Branched, trained on noise")
    assert network.name == "Branched, trained on noise"
    torch.testing.assert_close(network(x).features, model.hidden(x).detach())
    first = metrics.classifier_features(model, "hidden")(x).features
    torch.testing.assert_close(first, x.flatten(1))  # axes of pixels are flattened


def test_the_model_runs_in_eval_mode_and_is_left_as_it_was():
    torch.manual_seed(0)
    model, x = Branched().train(), images(6, 1, 4, 4)
    model.hidden[3].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    network = metrics.classifier_features(model, "out", batch_size=5)
    first, second = network(x), network(x)  # the last batch is a single row, which batch norm cannot train on
    assert torch.equal(first.features, second.features)
    assert model.hidden[2].training
    assert not model.hidden[3].training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model.out._forward_pre_hooks


def test_images_are_prepared_batch_by_batch():
    torch.manual_seed(0)
    model, raw = Branched().eval(), (255 * images(7, 1, 4, 4)).byte()
    sizes = []

    def prepare(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return part / 255 - 0.5

    seen = metrics.classifier_features(model, "out", prepare=prepare, batch_size=3)(raw)
    assert sizes == [3, 3, 1]
    torch.testing.assert_close(seen.probabilities, model(raw / 255 - 0.5).softmax(1).detach())


def test_a_single_layer_is_a_classifier_too():
    seen = metrics.classifier_features(nn.Linear(4, 3))
    assert seen.name == "Linear, input of the network"
    assert torch.equal(seen(images(2, 4)).features, images(2, 4))


def test_networks_without_features_are_refused():
    with pytest.raises(ValueError, match=r"a linear layer in Sequential.* got layer=None; it has 0"):
        metrics.classifier_features(nn.Sequential(nn.Flatten()))
    with pytest.raises(ValueError, match=r"got layer='head'; it has out, hidden, hidden.0"):
        metrics.classifier_features(Branched(), "head")
    x = images(6, 1, 4, 4)
    with pytest.raises(ValueError, match="got \\(6, 3\\) from Branched, whose Conv2d ran 0 times"):
        metrics.classifier_features(Branched(), "unused")(x)
    with pytest.raises(ValueError, match=r"logits \(B, C\).* got \(6, 1, 4, 2\) from Linear"):
        metrics.classifier_features(nn.Linear(4, 2))(x)
    network = metrics.classifier_features(Branched(), "out")
    with pytest.raises(ValueError, match=r"at least one image, \(N, ...\), got shape \(0, 1, 4, 4\)"):
        network(x[:0])
    with pytest.raises(ValueError, match="batch_size to be a whole number"):
        metrics.classifier_features(Branched(), batch_size=0)(x)
    with pytest.raises(ValueError, match=r"of 6 images from odd, got \(1, 4, 4\) and \(6, 2\)"):
        metrics.Features("odd", lambda x: (x[0], torch.zeros(6, 2)))(x)


# ------------------------------------------------------------------------------- torchvision


class StandIn(nn.Module):
    """Has the last layer of Inception, and means of channels as its features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1:] == (3, 299, 299)
        return self.fc(x.mean((2, 3)))


@pytest.fixture
def torchvision(monkeypatch, tmp_path):
    """Put a module in the place of torchvision, and the folder of its weights into a temporary one."""
    weights = SimpleNamespace(url="https://example.org/models/inception_v3-00000000.pth")
    models = ModuleType("torchvision.models")
    models.Inception_V3_Weights = SimpleNamespace(IMAGENET1K_V1=weights)
    models.inception_v3 = lambda weights: StandIn()
    package = ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints" / "inception_v3-00000000.pth"


def test_without_torchvision_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with pytest.raises(RuntimeError, match=r"could not import it .* or use classifier_features"):
        metrics.inception_features()


def test_a_torchvision_for_another_torch_is_no_torchvision(monkeypatch, tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"could not import it \(operator nms does not exist\)"):
        metrics.inception_features()


def test_weights_are_not_downloaded(torchvision):
    with pytest.raises(
        RuntimeError, match=r"inception_v3-00000000.pth, found no file; put it there, or use classifier"
    ):
        metrics.inception_features()


def test_inception_sees_colours_as_imagenet_has_them(torchvision):
    torchvision.touch()
    network = metrics.inception_features(batch_size=2)
    assert network.name == "torchvision Inception v3 (ImageNet), input of fc"
    means, stds = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for x in (torch.full((3, 3, 8, 8), 0.6), torch.full((3, 1, 8, 8), 153, dtype=torch.uint8)):
        seen = network(x)
        torch.testing.assert_close(seen.features, ((0.6 - means) / stds).expand(3, 3), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen.probabilities.sum(1), torch.ones(3))
    for wrong in (torch.full((3, 3, 8, 8), -0.5), torch.rand(3, 2, 8, 8), torch.rand(3, 8, 8)):
        with pytest.raises(
            ValueError, match=r"images \(N, 3, H, W\) or \(N, 1, H, W\), uint8 or floats between 0 and 1"
        ):
            network(wrong)
