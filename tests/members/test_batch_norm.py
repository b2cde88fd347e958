from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.members import Members
from hf_bayes.members.batch_norm import StackedBatchNorm
from hf_bayes.models.attaching import attach
from tests.members.reference import relative_error, scattered
from tests.members.subject_models import resnet


class Normed(nn.Module):
    """A convolution and two layers of batch normalisation, in one and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.head, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.norm(self.conv(x)).relu().mean((2, 3))))


def trained() -> Normed:
    """Return a model whose statistics are not those of its initialisation."""
    torch.manual_seed(0)
    model = Normed().train()
    for _ in range(3):
        model(1 + 2 * torch.randn(8, 2, 5, 5))
    return model.eval()


def engine_of(model: nn.Module, subspace: str = "all") -> Members:
    engine = Members(model, model, select(model, subspace))
    engine.install()
    return engine


def twins(model: nn.Module, theta: Tensor, *, training: bool) -> list[nn.Module]:
    """Return separate models with the weights of each member."""
    found, layout = [], select(model, "all")
    for row in theta:
        twin = copy.deepcopy(model).train(training)
        twin.load_state_dict(layout.unflatten(row), strict=False)
        found.append(twin)
    return found


def test_members_without_statistics_use_those_of_the_model() -> None:
    model = trained()
    theta, x = scattered(model, select(model, "all")), torch.randn(6, 2, 5, 5)
    expected = torch.stack([twin(x) for twin in twins(model, theta, training=False)])
    engine = engine_of(model)
    with engine.bind(theta):
        found = engine.forward({"x": x}).unflatten(0, (3, -1))
    assert relative_error(found.detach(), expected.detach()) < 1e-5  # float32


@pytest.mark.parametrize("folded", [False, True])
def test_batch_statistics_are_those_of_a_members_own_rows(folded: bool) -> None:
    model = trained()
    theta = scattered(model, select(model, "all")).requires_grad_()
    # the rows of the members have scales of their own, so mixing them would show
    xs = [(1 + k) * torch.randn(6, 2, 5, 5) for k in range(3)] if folded else [torch.randn(6, 2, 5, 5)] * 3
    layout, expected = select(model, "all"), []
    for row, x in zip(theta, xs, strict=True):
        expected.append(torch.func.functional_call(copy.deepcopy(model).train(), layout.unflatten(row), (x,)))
    engine = engine_of(model)
    with engine.bind(theta), engine.by_batch_statistics():
        found = engine.forward({"x": torch.cat(xs) if folded else xs[0]}, folded=folded).unflatten(0, (3, -1))
    assert relative_error(found.detach(), torch.stack(expected).detach()) < 1e-5
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * weights).sum(), theta)[0] for y in (found, torch.stack(expected))]
    assert relative_error(*gradients) < 1e-5


def test_the_rows_of_another_member_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(mixes: bool) -> bool:
        model = trained()
        engine = engine_of(model)
        if mixes:  # the broken twin: torch's own layer, on the rows of all members
            for item in engine.batch_norms:
                kind, item.module.training = type(item.module), True
                monkeypatch.setattr(item.module, "forward", lambda x, kind=kind, own=item.module: kind.forward(own, x))
        theta, x = scattered(model, engine.layout), torch.randn(12, 2, 5, 5)
        with torch.no_grad(), engine.bind(theta), engine.by_batch_statistics():
            before = engine.run(model, {"x": x}, 4, 1)  # ``forward`` refuses the broken twin, which reads no member
            x[8:] *= 3  # the rows of the third member
            after = engine.run(model, {"x": x}, 4, 1)
        return not torch.equal(before[:8], after[:8])

    assert not changes(mixes=False)
    assert changes(mixes=True)


def test_statistics_in_theta_are_used_by_their_member() -> None:
    model = trained()
    engine = engine_of(model)
    complete = engine.complete_layout
    assert complete.names[: len(engine.layout.names)] == engine.layout.names
    theta = torch.cat([scattered(model, engine.layout), torch.rand(3, engine.statistics.dim) + 0.5], 1)
    x = torch.randn(4, 2, 5, 5)
    with torch.no_grad(), engine.bind(theta):
        found = engine.forward({"x": x}).unflatten(0, (3, -1))
    engine.remove()
    for row, logits in zip(theta, found, strict=True):
        twin = copy.deepcopy(model)
        assert not twin.load_state_dict(complete.unflatten(row), strict=False).unexpected_keys
        assert relative_error(logits, twin(x).detach()) < 1e-5


def test_other_buffers_and_some_of_the_statistics_are_refused() -> None:
    model = trained()
    parameters = select(model, "all")
    for name in ("norm.num_batches_tracked", "norm.running_mean"):
        layout = Layout((*parameters.names, name), (*parameters.shapes, tuple(dict(model.named_buffers())[name].shape)))
        with pytest.raises(ValueError, match=f"{name} is no parameter of Normed; members may have .*last.running_mean"):
            Members(model, model, layout)


def test_collected_statistics_are_those_of_update_bn() -> None:
    model = trained()
    theta, x = scattered(model, select(model, "all")), 1 + 2 * torch.randn(6, 2, 5, 5)
    expected = twins(model, theta, training=False)
    for twin in expected:
        update_bn([x], twin)
    engine = engine_of(model)
    for item in engine.batch_norms:
        item.collects = True
    with torch.no_grad(), engine.bind(theta), engine.by_batch_statistics():
        engine.forward({"x": x})
    for item, name in zip(engine.batch_norms, ("norm", "last"), strict=True):
        assert isinstance(item, StackedBatchNorm)
        wanted = [getattr(twin, name) for twin in expected]
        mean, var = item.collected
        assert relative_error(mean, torch.stack([layer.running_mean for layer in wanted])) < 1e-5
        assert relative_error(var, torch.stack([layer.running_var for layer in wanted])) < 1e-5


def test_a_frozen_layer_keeps_its_statistics_in_training() -> None:
    model = trained()
    x = torch.randn(4, 2, 5, 5)
    expected, buffers = model(x), {name: value.clone() for name, value in model.named_buffers()}
    engine = engine_of(model, "head")
    assert engine.statistics.names == ()
    model.train()
    with engine.bind(initial(model, engine.layout).expand(2, -1)), engine.by_batch_statistics():
        found = engine.forward({"x": x})[:4]
    assert relative_error(found.detach(), expected.detach()) < 1e-5
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    engine.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_random_layers_of_an_adapted_model_are_refused() -> None:
    model = resnet(torch.float32)
    adapted = get_peft_model(model, LoraConfig(target_modules=["classifier.1"], modules_to_save=["normalization"]))
    with pytest.raises(ValueError, match=r"running_mean: batch normalisation cannot be random in a model with an adap"):
        attach(adapted)
    plain = resnet(torch.float32)
    plain.can_generate = lambda: True
    with pytest.raises(ValueError, match="cannot be random in the language model ResNetForImageClassification"):
        Members(plain, plain, select(plain, "all"))


@pytest.mark.parametrize("subspace", ["all", "0"])
def test_layers_without_running_statistics_are_refused(subspace: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match=r"1.*without running statistics \(track_running_stats=False\)"):
        Members(model, model, select(model, subspace))
