"""Uncertainty for your own network in your own training loop: ten lines, on the 8x8 digits of scikit-learn.

A network that knows nothing of leanbayes becomes stochastic, trains in an ordinary loop and sorts the test digits by
its uncertainty. Total uncertainty is aleatoric (the image is ambiguous) plus epistemic (the model does not know). One
posterior draw is exported as an ordinary network, and the model is saved and loaded. Fifteen seconds. `python -m
examples.user_loop` writes user_loop.png, .json and .safetensors to runs/examples.
"""

import json
from pathlib import Path

import torch
from torch import nn, Tensor

import leanbayes as lb

FOLDER = Path("runs/examples")


class DigitNet(nn.Module):
    """A network of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.head = nn.Linear(64 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x).relu())).relu()
        return self.head(torch.max_pool2d(x, 2).flatten(1))


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,297 training and 500 test digits, always the same."""
    from sklearn import datasets

    digits = datasets.load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1297]], y[order[:1297]], x[order[1297:]], y[order[1297:]]


def plot(x: Tensor, titles: dict[int, str], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(titles) // 2, figsize=(10, 4.8), layout="constrained")
    for axis, (row, title) in zip(axes.flat, titles.items(), strict=True):
        axis.imshow(x[row, 0].numpy(), cmap="gray_r")
        axis.set_title(title, fontsize=8)
        axis.axis("off")
    figure.suptitle("most certain (above) and least certain (below) test digits; entropies in nats", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(*, epochs: int = 15, samples: int = 32, folder: Path = FOLDER) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    x, y, x_test, y_test = load_digits()

    net = DigitNet()
    bnn = lb.convert(net, lb.Rank1(components=4, prior_std=0.3))
    print(lb.summary(bnn))
    opt = torch.optim.Adam(lb.parameter_groups(bnn, lr=2e-3, posterior_lr=1e-2))
    for epoch in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            terms = lb.elbo(bnn, x[batch], y[batch], lb.Categorical(), num_data=len(x))
            opt.zero_grad()
            terms.loss.backward()
            opt.step()
        print(f"epoch {epoch + 1}: nll {terms.nll.item():.3f}, kl {terms.kl.item():.0f} nats", flush=True)

    p = lb.predict(bnn, x_test, samples=samples)
    order, titles = p.total.argsort().tolist(), {}
    for row in order[:6] + order[-6:]:
        kinds = f"aleatoric {p.aleatoric[row]:#.2g}\nepistemic {p.epistemic[row]:#.2g}"
        titles[row] = f"a {y_test[row]}, says {p.mean[row].argmax()} ({p.mean[row].max():.0%})\n{kinds}"
        print(f"test digit {row:>3}: " + titles[row].replace("\n", "  "))
    plot(x_test, titles, folder / "user_loop.png")

    plain = lb.draw(bnn, seed=0, index=3).eval()  # a DigitNet again: sample 3 of the prediction above
    lb.save(bnn, folder / "user_loop.safetensors")
    loaded = lb.load(folder / "user_loop.safetensors", net)
    right = p.mean.argmax(1) == y_test
    figures = {
        "accuracy": right.float().mean().item(),
        "nll": -p.log_prob(y_test).mean().item(),
        "epistemic_when_right": p.epistemic[right].mean().item(),
        "epistemic_when_wrong": p.epistemic[~right].mean().item(),
        "draw_is_off_by": (lb.predict(plain, x_test).mean - p.samples[3]).abs().max().item(),
        "loaded_is_off_by": (lb.predict(loaded, x_test, samples=samples).mean - p.mean).abs().max().item(),
    }
    print(f"exported a {type(plain).__name__};", ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    (folder / "user_loop.json").write_text(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
