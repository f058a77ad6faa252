"""Save and load: a round trip, refusals, and that nothing is lost or imported."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import leanbayes as lb
from leanbayes.core.checkpoint import header_of
from leanbayes.core.conversion import own_likelihood
from leanbayes.runtime._files import read_tensors, write_tensors

from .networks import Nested, small_net

X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    bnn = lb.convert(
        small_net(), lb.Rank1(components=3, prior="cauchy"), likelihood=lb.Categorical(label_smoothing=0.1)
    )
    path = tmp_path / "deep" / "m.safetensors"
    lb.save(bnn, path, extra={"note": "first"})
    return bnn, path


def test_load_gives_the_same_predictions_on_an_untrained_network(saved):
    bnn, path = saved
    loaded = lb.load(path, small_net())
    assert torch.equal(lb.predict(loaded, X).samples, lb.predict(bnn, X).samples)
    assert loaded[0].method == bnn[0].method
    assert own_likelihood(loaded).label_smoothing == 0.1


def test_the_header_can_be_read_by_people(saved):
    _, path = saved
    header = header_of(path)
    assert header["method"] == "rank1"
    assert header["fields"]["prior"] == "cauchy"
    assert header["paths"] == ["0", "3", "7"]
    assert header["format"] == 1
    assert header["versions"]["torch"] == torch.__version__
    assert header["likelihood"]["name"] == "Categorical"


def test_chains_learned_likelihoods_and_tied_layers_come_back(tmp_path):
    def make():
        shared = nn.Linear(4, 4)
        return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2))

    bnn = lb.convert(make(), lb.Rank1(), where="0")
    bnn = lb.convert(bnn, lb.ImplicitNodes(), likelihood=lb.Gaussian(0.3, learn=True))
    lb.save(bnn, tmp_path / "m.safetensors")
    loaded = lb.load(tmp_path / "m.safetensors", make())
    assert loaded[0] is loaded[2]
    x = torch.randn(3, 4)
    assert torch.equal(lb.predict(loaded, x).mean, lb.predict(bnn, x).mean)
    assert torch.equal(own_likelihood(loaded).log_std, own_likelihood(bnn).log_std)


def test_weights_tied_to_an_embedding_are_saved(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens).mean(1))

    bnn = lb.convert(Tied(), lb.Rank1())
    assert bnn.head.base.weight is bnn.embed.weight
    lb.save(bnn, tmp_path / "m.safetensors")
    loaded = lb.load(tmp_path / "m.safetensors", Tied())
    tokens = torch.randint(7, (3, 5))
    assert torch.equal(lb.predict(loaded, tokens).mean, lb.predict(bnn, tokens).mean)
    plain = lb.draw(bnn)
    assert plain.head.weight is not plain.embed.weight
    assert torch.equal(plain.embed.weight, bnn.embed.weight)


def test_only_the_posterior_is_small_and_goes_with_the_original_weights(tmp_path):
    net = small_net()
    bnn = lb.convert(net, lb.Rank1())
    with torch.no_grad():
        for _, layer in lb.stochastic_layers(bnn):
            for parameter in layer.posterior.parameters():
                parameter.add_(0.1)
    path = tmp_path / "posterior.safetensors"
    lb.save(bnn, path, only="posterior")
    assert all(".posterior." in name for name in load_file(path))
    assert torch.equal(lb.predict(lb.load(path, net), X).mean, lb.predict(bnn, X).mean)


def test_a_root_layer_can_be_saved(tmp_path):
    net = nn.Linear(3, 2)
    bnn = lb.convert(net, lb.ImplicitNodes())
    lb.save(bnn, tmp_path / "m.safetensors", only="posterior")
    x = torch.randn(4, 3)
    assert torch.equal(lb.draw(lb.load(tmp_path / "m.safetensors", net))(x), lb.draw(bnn)(x))


def rewrite(path, change):
    """Change the header of a checkpoint."""
    header = header_of(path)
    change(header)
    save_file(load_file(path), path, {"leanbayes": json.dumps(header)})


def test_a_damaged_file_is_refused(saved):
    _, path = saved
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], b"", b"not a checkpoint at all", content[:200] + b"\0" * 50):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
            lb.load(path, small_net())


def test_a_foreign_checkpoint_is_refused(tmp_path):
    path = tmp_path / "plain.safetensors"
    save_file(small_net().state_dict(), path)
    with pytest.raises(ValueError, match=r"was not written by leanbayes.save .* then convert it"):
        lb.load(path, small_net())


def test_a_file_that_names_code_imports_nothing(saved):
    _, path = saved
    rewrite(path, lambda header: header.update(method="os:system"))
    with pytest.raises(ValueError, match="made by the method 'os:system', which is not part of leanbayes"):
        lb.load(path, small_net())
    rewrite(path, lambda header: header.update(method="rank1", likelihood={"name": "os.system", "options": {}}))
    with pytest.raises(ValueError, match=r"names the likelihood 'os.system', which is not part"):
        lb.load(path, small_net())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["fields"].update(nonsense=1), "has fields that Rank1 does not take"),
        (lambda h: h["fields"].update(prior_std=-1), "expected prior_std to be a positive number, got -1"),
        (lambda h: h.update(format=99), "has format 99, this leanbayes reads up to 1: update it"),
        (lambda h: h.update(paths=None), r"the header of .* is damaged"),
        (lambda h: h.update(format="x"), r"the header of .* is damaged"),
    ],
)
def test_a_wrong_header_is_refused_with_a_sentence(saved, change, message):
    _, path = saved
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        lb.load(path, small_net())


def test_another_network_is_refused_with_the_layer_that_differs(saved):
    _, path = saved
    with pytest.raises(ValueError, match="has a layer '0' that this network does not have"):
        lb.load(path, Nested())
    wider = small_net()
    wider[7] = nn.Linear(6, 9)
    with pytest.raises(ValueError, match=r"does not fit this network: '7.base.weight' is of shape \(4, 6\)"):
        lb.load(path, wider)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        lb.load(tmp_path / "none.safetensors", small_net())


def test_a_name_on_a_hub_is_not_fetched():
    with pytest.raises(FileNotFoundError, match="at 'someone/network'; expected a local file or folder"):
        lb.load("someone/network", small_net())


def test_a_folder_has_the_whole_model(saved):
    bnn, path = saved
    path.rename(path.parent / "model.safetensors")
    loaded = lb.load(path.parent, small_net())
    assert torch.equal(lb.predict(loaded, X).samples, lb.predict(bnn, X).samples)
    assert header_of(str(path.parent))["method"] == "rank1"


def test_a_folder_may_have_a_posterior_beside_a_public_checkpoint(tmp_path):
    torch.manual_seed(1)
    net = small_net()
    bnn = lb.convert(net, lb.Rank1(components=3))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    lb.save(bnn, tmp_path / "posterior.safetensors", only="posterior")
    fresh = small_net()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    loaded = lb.load(tmp_path, fresh)
    assert torch.equal(lb.predict(loaded, X).samples, lb.predict(bnn, X).samples)


def test_a_folder_without_either_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"posterior.safetensors or model.safetensors in the folder .* neither"):
        lb.load(tmp_path, small_net())


def test_a_plain_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="expected a converted model, got a plain one"):
        lb.save(small_net(), tmp_path / "m.safetensors")


def test_an_interrupted_write_leaves_the_old_file(saved, monkeypatch):
    bnn, path = saved
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("leanbayes.runtime._files.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        lb.save(bnn, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]


class Whole(nn.Module):
    """A network of several parts; some were converted before they were put together."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def body(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def assert_loaded_alike(model, plain, path):
    x = torch.randn(9, 8)
    lb.save(model, path)
    loaded = lb.load(path, plain)
    assert torch.equal(lb.predict(model, x, samples=8).samples, lb.predict(loaded, x, samples=8).samples)
    assert list(loaded.state_dict()) == list(model.state_dict())
    return loaded


@pytest.mark.parametrize("method", [lb.Rank1(), lb.MeanField(), lb.NestedDropout(first=True)], ids=lambda m: m.name)
def test_a_converted_part_of_a_network_draws_alike_after_loading(method, tmp_path):
    model = Whole(first=nn.Linear(8, 8), body=lb.convert(body(), method), head=nn.Linear(8, 3))
    plain = Whole(first=nn.Linear(8, 8), body=body(), head=nn.Linear(8, 3))
    loaded = assert_loaded_alike(model, plain, tmp_path / "m.safetensors")
    assert [layer.path for _, layer in lb.stochastic_layers(loaded)] == ["0", "2"]
    assert not any(True for _ in lb.stochastic_layers(plain))


def test_two_converted_parts_with_the_same_paths_draw_alike_after_loading(tmp_path):
    parts = {"one": lb.convert(body(), lb.Rank1()), "two": lb.convert(body(5), lb.Rank1(components=3))}
    model = Whole(**parts, three=lb.convert(nn.Linear(8, 3), lb.Rank1()))
    plain = Whole(one=body(), two=body(5), three=nn.Linear(8, 3))
    assert_loaded_alike(model, plain, tmp_path / "m.safetensors")


def test_a_whole_converted_around_a_converted_part_draws_alike_after_loading(tmp_path):
    model = lb.convert(Whole(first=nn.Linear(8, 8), body=lb.convert(body(), lb.Rank1())), lb.Rank1())
    loaded = assert_loaded_alike(model, Whole(first=nn.Linear(8, 8), body=body()), tmp_path / "m.safetensors")
    assert len({id(layer.state) for _, layer in lb.stochastic_layers(loaded)}) == 1


def test_a_part_that_shares_a_weight_with_the_rest_still_does_after_loading(tmp_path):
    def tied(convert):
        part = body()
        whole = Whole(body=convert(part), head=nn.Linear(8, 8))
        whole.head.weight = whole.body[2].weight
        return whole

    model = tied(lambda part: lb.convert(part, lb.Rank1()))
    loaded = assert_loaded_alike(model, tied(lambda part: part), tmp_path / "m.safetensors")
    assert loaded.head.weight is loaded.body[2].weight


def test_a_file_that_does_not_name_the_converted_part_still_loads(tmp_path):
    path = tmp_path / "m.safetensors"
    model = Whole(body=lb.convert(body(), lb.Rank1()), head=nn.Linear(8, 3))
    lb.save(model, path)
    metadata, tensors = read_tensors(path)
    header = json.loads(metadata["leanbayes"])
    del header["root"]
    write_tensors(tensors, path, {"leanbayes": json.dumps(header)})
    loaded = lb.load(path, Whole(body=body(), head=nn.Linear(8, 3)))
    assert torch.equal(loaded.body[0].posterior.input.loc, model.body[0].posterior.input.loc)
    header["root"] = "trunk"
    write_tensors(tensors, path, {"leanbayes": json.dumps(header)})
    with pytest.raises(ValueError, match=r"layer 'body.0' that this network does not have"):
        lb.load(path, Whole(body=body(), head=nn.Linear(8, 3)))


@pytest.mark.parametrize("method", [lb.Rank1(), lb.DeepEnsemble(components=2)], ids=lambda m: m.name)
def test_a_network_that_is_converted_already_is_refused_as_such(method, tmp_path):
    bnn = lb.convert(body(), method)
    lb.save(bnn, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"expected a plain network.*got one that is converted already"):
        lb.load(tmp_path / "m.safetensors", bnn)


@pytest.mark.parametrize("only", ["all", "posterior"])
def test_a_likelihood_of_a_later_layer_is_read_there(tmp_path, only):
    """The first layer is converted after the one that keeps the likelihood."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    first = lb.convert(net, lb.Rank1(), where="2", likelihood=lb.Gaussian(std=0.3, learn=True))
    model, x = lb.convert(first, lb.Rank1(components=3), where="0"), torch.randn(7, 6)
    lb.save(model, tmp_path / "model.safetensors", only=only)
    again = lb.load(tmp_path / "model.safetensors", net)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(lb.predict(again, x).total, lb.predict(model, x).total)
    assert [again[k].likelihood is None for k in (0, 2)] == [True, False]


def test_a_student_of_parametrised_layers_is_read(tmp_path):
    """The mean network, where a student starts, has plain weights in converted layers alone."""
    norm = nn.utils.parametrizations.weight_norm

    def network():
        return nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3))

    net, x = network(), torch.randn(40, 6)
    model = lb.convert(net, lb.Rank1(), where=["0", "4"])
    recipe = lb.Recipe(epochs=1, optimizer="adam", lr=1e-3)
    student = lb.distill(model, (x, torch.zeros(40).long()), recipe=recipe, progress=False)
    assert "network.2.parametrizations.weight.original0" in student.state_dict()
    lb.save(student, tmp_path / "student.safetensors")
    given = network()
    again = lb.load(tmp_path / "student.safetensors", given)
    assert torch.equal(lb.predict(again, x).epistemic, lb.predict(student, x).epistemic)
    assert given.state_dict().keys() == net.state_dict().keys()
