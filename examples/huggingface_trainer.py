"""Uncertainty for a Hugging Face model under its own Trainer: four lines that add the KL to the model's loss.

A small BERT becomes stochastic, stays a BertForSequenceClassification, and learns whether a sentence is negative or
positive. It is less sure of the sentences it gets wrong. They come from movie reviews if the data folder has them
(`leanbayes data prepare rt-polarity`). Otherwise sequences are made here, with the class of most of their words; some
are mixed on purpose. Under a minute; nothing is downloaded. `python -m
examples.huggingface_trainer` writes huggingface_trainer.json and .safetensors to runs/examples.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from examples.user_loop import FOLDER

LENGTH = 32
"""Tokens of a review sentence that are read: 86 % have no more."""

WORDS = 200
"""Words of the sentences made here; 0 is padding, even ones are negative, odd ones positive."""


def toy_sentences(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences of 11 words, each with a share of positive ones between 0 and 1, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.rand(rows, 11, generator=generator) < torch.rand(rows, 1, generator=generator)
    words = 2 * torch.randint(1, WORDS // 2, (rows, 11), generator=generator) + kind
    return words, (kind.sum(1) > 5).long()


def load_sentences(rows: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
    """Return sentences to train and to test on, as numbers of words, and the size of the vocabulary."""
    try:
        data = lb.data.load("rt-polarity")
    except FileNotFoundError:
        return toy_sentences(rows, 0), toy_sentences(500, 1), WORDS
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:rows]  # they come by class
    train, test = (data.train.x[chosen, :LENGTH], data.train.y[chosen]), (data.test.x[:, :LENGTH], data.test.y)
    return train, test, len(data.vocabulary)


def bert(vocabulary: int, length: int) -> nn.Module:
    """Return a fresh BERT with two layers; `from_pretrained(folder)` would do as well."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForSequenceClassification(
        BertConfig(vocab_size=vocabulary, max_position_embeddings=length, num_labels=2, pad_token_id=0, **sizes)
    )


def elbo_trainer(*args: Any, **keywords: Any) -> Any:
    """Return a Trainer whose loss is nll + KL / N: all that leanbayes adds."""
    from transformers import Trainer

    class ElboTrainer(Trainer):
        loss_is_scaled_for_ga = False  # a mean over the batch: the Trainer divides it where it accumulates gradients

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            nll, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = nll + lb.kl(model) / len(self.train_dataset)
            return (loss, outputs) if return_outputs else loss

    return ElboTrainer(*args, **keywords)


def rows_of(x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Return a data set as the Trainer takes it: a dict a row."""
    return [
        {"input_ids": words, "attention_mask": words != 0, "labels": label} for words, label in zip(x, y, strict=True)
    ]


def train(bnn: nn.Module, x: Tensor, y: Tensor, *, epochs: int) -> None:
    """Train by Hugging Face's Trainer, with the rates of `lb.parameter_groups` and the Trainer's linear schedule."""
    from transformers import TrainingArguments

    opt = torch.optim.AdamW(lb.parameter_groups(bnn, lr=1e-3, posterior_lr=1e-2, weight_decay=0.01))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        elbo_trainer(bnn, arguments, train_dataset=rows_of(x, y), optimizers=(opt, None)).train()


def main(*, epochs: int = 3, rows: int = 3000, samples: int = 16, folder: Path = FOLDER) -> dict[str, float]:
    torch.manual_seed(0)
    (x, y), (x_test, y_test), vocabulary = load_sentences(rows)
    net = bert(vocabulary, x.shape[1])
    bnn = lb.convert(net, lb.Rank1(components=4))
    print(f"{lb.summary(bnn)}\nstill a {type(bnn).__name__}", flush=True)
    train(bnn, x, y, epochs=epochs)

    p = lb.predict(bnn, {"input_ids": x_test, "attention_mask": x_test != 0}, samples=samples)
    right = p.mean.argmax(1) == y_test
    figures = {
        "accuracy": right.float().mean().item(),
        "nll": -p.log_prob(y_test).mean().item(),
        "total_when_right": p.total[right].mean().item(),
        "total_when_wrong": p.total[~right].mean().item(),
        "epistemic_when_right": p.epistemic[right].mean().item(),
        "epistemic_when_wrong": p.epistemic[~right].mean().item(),
        "accuracy_of_the_surer_half": right[p.total.argsort()[: len(right) // 2]].float().mean().item(),
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    lb.save(bnn, folder / "huggingface_trainer.safetensors")
    (folder / "huggingface_trainer.json").write_text(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
