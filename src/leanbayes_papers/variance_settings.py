"""How the networks of the variance suites are trained, by budget.

The paper: Adam at 1e-3, linearly to zero, batches of 200 for 200 epochs on MNIST and of 100 for 550 epochs on CIFAR.
The KL has its full weight from the start: its gradient by log alpha, a sum over weights, is large while alpha is small
and falls as 1 / alpha. So log alpha is above 2 within a few hundred steps, and then rises slowly. The number of steps
decides whether the phase transition comes; in full both rates are the paper's, shorter trainings take larger ones.
"""

from __future__ import annotations

from torch import nn

from leanbayes.layers import first, last
from leanbayes.training import Recipe
from leanbayes_papers.suite import Setting
from leanbayes_papers.variance_nets import Network

PAPER = "Neklyudov, Molchanov, Ashukha, Vetrov, 2019: Variance Networks"
ALL_OF_LENET = (first(nn.Conv2d, 2), first(nn.Linear, 3))
FIRST_DENSE = (first(nn.Linear),)
VGG_LAYERS = (last(nn.Conv2d, 3), first(nn.Linear))
QUICK_ROWS, QUICK_IMAGES = 1000, 200


def digits_name(setting: Setting) -> str:
    """Return the data of LeNet-5: in quick, the digits of scikit-learn stand for MNIST."""
    return setting.pick(quick="digits", short="mnist", full="mnist")


def lenet(setting: Setting, name: str, *, dropout: bool = False, **options: object) -> Network:
    """Return a LeNet-5 with norms; in quick, two linear layers with a norm. Options are fields of `Network`."""
    net = setting.pick(quick="mlp-2-500", short="lenet5-bn", full="lenet5-bn")
    behind = setting.pick(quick="+dropout0.1", short="-dropout", full="-dropout") if dropout else ""
    recipe = setting.pick(
        quick=_adam(epochs=100, batch_size=50, lr=2e-2, posterior_lr=0.1),
        short=_adam(epochs=60, batch_size=200, lr=5e-3, posterior_lr=2e-2),
        full=_adam(epochs=200, batch_size=200, posterior_lr=1e-3),
    )
    source = setting.source(digits_name(setting), quick_rows=QUICK_ROWS)
    return Network(name=name, source=source, net=net + behind, recipe=setting.recipe(recipe), **options)  # type: ignore[arg-type]


def vgg(setting: Setting, data: str, name: str, *, dropout: bool = True, **options: object) -> Network:
    """Return a VGG-like network, in quick a narrow one on few images; options are fields of `Network`."""
    net = setting.pick(quick="vgg-like-w0.125", short="vgg-like", full="vgg-like") + ("-dropout" if dropout else "")
    recipe = setting.pick(
        quick=_adam(epochs=2, batch_size=20, posterior_lr=0.5),
        short=_adam(epochs=30, batch_size=250, lr=2e-3, posterior_lr=2e-2, augment="crop_flip"),
        full=_adam(epochs=550, batch_size=100, posterior_lr=1e-3, augment="crop_flip"),
    )
    source = setting.source(data, quick_rows=QUICK_IMAGES)
    return Network(name=name, source=source, net=net, recipe=setting.recipe(recipe), **options)  # type: ignore[arg-type]


def _adam(*, epochs: int, batch_size: int, posterior_lr: float, lr: float = 1e-3, augment: str = "none") -> Recipe:
    return Recipe(
        epochs=epochs,
        batch_size=batch_size,
        optimizer="adam",
        lr=lr,
        posterior_lr=posterior_lr,
        weight_decay=0.0,
        schedule="straight",
        augment=augment,  # type: ignore[arg-type]
    )
