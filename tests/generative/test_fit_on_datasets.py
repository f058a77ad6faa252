"""`lb.generative.fit` on a Dataset: the same training as on tensors, and a Dataset that draws is told the epoch."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, TensorDataset

from leanbayes.data import ambiguous_images, OneAnnotator
from leanbayes.generative import fit, ProbabilisticUNet, VAE
from leanbayes.training import Recipe

RECIPE = Recipe(epochs=2, batch_size=4, optimizer="adam", lr=1e-2, accelerator="cpu")


def unet() -> ProbabilisticUNet:
    torch.manual_seed(0)
    return ProbabilisticUNet(2, (1, 16, 16), dimensions=3, ordered=True, widths=(3, 4))


def test_a_dataset_trains_as_its_tensors_do():
    x, y = torch.randn(10, 1, 16, 16), torch.randint(2, (10, 16, 16))
    ours, theirs = unet(), unet()
    fit(ours, TensorDataset(x, y), RECIPE, progress=False)
    fit(theirs, (x, y), RECIPE, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class Images(Dataset):
    """Images alone, not in a tuple."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


def test_a_dataset_of_images_alone():
    x = torch.rand(8, 1, 16, 16)
    models = []
    for inputs in (x, Images(x)):
        torch.manual_seed(0)
        models.append(VAE((1, 16, 16), dimensions=2))
        fit(models[-1], inputs, RECIPE, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_annotators_change_with_the_epoch():
    told: list[int] = []

    class Watched(OneAnnotator):
        def set_epoch(self, epoch):
            told.append(epoch)
            super().set_epoch(epoch)

    images = ambiguous_images(train=8, val=1, test=1, size=16)
    fit(unet(), Watched(images.split("train")), RECIPE, progress=False)
    assert told == [0, 0, 1]  # when it is made, and before both epochs
