"""The example of Hugging Face's Trainer: its loss is that of `lb.elbo`, and it shows what its docstring claims."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import leanbayes as lb
from examples import huggingface_trainer as example

transformers = pytest.importorskip("transformers", reason="needs transformers, of the dev extra")
pytest.importorskip("accelerate", reason="needs accelerate, of the dev extra")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Let nothing be fetched, and take the sentences made in the example."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path / "none"))


@pytest.fixture
def bnn():
    torch.manual_seed(0)
    return lb.convert(example.bert(example.WORDS, 11), lb.Rank1(components=2))


def trainer(bnn, folder, x, y, **options):
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=folder, max_steps=1, **quiet, **options)
    steps = torch.optim.SGD(lb.parameter_groups(bnn, lr=0.1)), None
    return example.elbo_trainer(bnn, arguments, train_dataset=example.rows_of(x, y), optimizers=steps)


def inputs_of(x):
    return {"input_ids": x, "attention_mask": x != 0}


def test_the_loss_is_that_of_elbo(bnn, tmp_path):
    x, y = example.toy_sentences(8, 0)
    own = trainer(bnn, tmp_path, x, y)
    torch.manual_seed(1)
    loss, outputs = own.compute_loss(bnn, {**inputs_of(x), "labels": y}, return_outputs=True)
    torch.manual_seed(1)
    terms = lb.elbo(bnn, inputs_of(x), y, num_data=8)
    torch.testing.assert_close(loss, terms.loss)
    torch.testing.assert_close(outputs.logits, terms.outputs)
    assert terms.kl > 0


def test_accumulated_gradients_count_the_divergence_once(bnn, tmp_path, monkeypatch):
    """Where the data say nothing, a step of SGD moves everything by -0.1 times the gradient of KL / N."""
    x, y = example.toy_sentences(8, 0)
    gradients = torch.autograd.grad(lb.kl(bnn) / 8, list(bnn.parameters()), materialize_grads=True)
    expected = [p.detach() - 0.1 * g for p, g in zip(bnn.parameters(), gradients, strict=True)]
    monkeypatch.setattr(transformers.Trainer, "compute_loss", lambda *args, return_outputs: (torch.zeros(()), None))
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer(bnn, tmp_path, x, y, max_grad_norm=0.0, **halves).train()
    torch.testing.assert_close([p.detach() for p in bnn.parameters()], expected)
    assert any(g.abs().max() > 1e-3 for g in gradients)


def test_the_example_runs_and_writes_its_files(tmp_path, capsys):
    figures = example.main(epochs=1, rows=96, samples=2, folder=tmp_path)
    assert 0 <= figures["accuracy"] <= 1
    assert json.loads((tmp_path / "huggingface_trainer.json").read_text()) == pytest.approx(figures, nan_ok=True)
    assert "classifier.posterior" in " ".join(load_file(tmp_path / "huggingface_trainer.safetensors"))
    assert "still a BertForSequenceClassification" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_shows_its_claims(tmp_path):
    figures = example.main(epochs=2, rows=2000, samples=8, folder=tmp_path)
    assert figures["accuracy"] > 0.8
    assert figures["total_when_wrong"] > figures["total_when_right"]
    assert figures["epistemic_when_wrong"] > figures["epistemic_when_right"]
    assert figures["accuracy_of_the_surer_half"] > figures["accuracy"]
