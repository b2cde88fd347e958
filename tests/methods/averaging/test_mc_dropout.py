from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes import MCDropoutConfig, attach
from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Rule
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.mc_dropout import Masks
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.map_comparison import map_of_run
from tests.faults import posteriors
from tests.methods.conformance import problem
from tests.runs import token_rows, trainer
from tests.tiny_models import batch, tiny_llama, with_lora

P = 0.3
SHAPES = {"q.lora_A.default.weight": (2, 5), "q.lora_B.default.weight": (4, 2), "conv.lora_A.default.weight": (2, 3, 2)}


def masks_of(model: Any, p: float = P) -> Masks:
    return MCDropoutConfig(dropout=p).masks(model.layout.named_shapes)


# ------------------------------------------------------------------------------------------------- law of the masks


def assert_law(scales: Tensor, p: float) -> None:
    """Check that entries are 0 or 1 / (1 - p), with mean 1 and independent between inputs (4.5 standard errors)."""
    assert set(scales.unique().tolist()) == {0.0, scales.max().item()}
    assert scales.max().item() == pytest.approx(1 / (1 - p))
    std, count = math.sqrt(p / (1 - p)), len(scales)
    assert (scales.mean(0) - 1).abs().max() < 4.5 * std / math.sqrt(count)
    correlation = torch.corrcoef(scales.T) - torch.eye(scales.shape[1])
    assert correlation.abs().max() < 4.5 / math.sqrt(count)


def test_masks_drop_lora_inputs_independently_and_keep_the_mean() -> None:
    masks = MCDropoutConfig(dropout=P).masks(SHAPES)
    assert masks.num_inputs == 5 + 3
    scale = masks.scale(masks.draw(generator("masks"), 4000), torch.zeros(1))
    a, b, conv = scale.split([10, 8, 12], 1)
    assert torch.equal(b, torch.ones_like(b))
    a, conv = a.view(-1, 2, 5), conv.view(-1, 2, 3, 2)
    assert torch.equal(a[:, 0], a[:, 1])  # an input is dropped for all outputs
    assert torch.equal(conv, conv[:, :1, :, :1].expand_as(conv))
    inputs = torch.cat([a[:, 0], conv[:, 0, :, 0]], 1)
    assert_law(inputs, P)
    with pytest.raises(AssertionError):  # the broken twin: a mask that is not rescaled
        assert_law(inputs * (1 - P), P)


def test_members_have_own_masks_with_the_trained_row_as_mean() -> None:
    config = MCDropoutConfig(dropout=P, num_masks=3000)
    theta = torch.randn(2, 30, generator=generator("theta"))
    members = config.members(theta, config.masks(SHAPES), [7, 8])
    assert members.shape == (2, 3000, 30)
    error = (members.mean(1) - theta).abs() / theta.abs()
    assert error.max() < 4.5 * math.sqrt(P / (1 - P) / 3000)  # standard errors of a rescaled Bernoulli
    assert not torch.equal(members[0] == 0, members[1] == 0)


# -------------------------------------------------------------------------------------------------------- gradient


class FixedMask(nn.Module):
    """A fixed mask in place of peft's dropout."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def gradients(*, rescaled: bool = True) -> tuple[Tensor, Tensor]:
    """Return two gradients [d] of the loss: s * grad at s * theta, and autograd's with the mask as peft's dropout."""
    inputs = batch()
    inputs["labels"] = inputs["input_ids"]
    with attach(with_lora(tiny_llama(dtype=torch.float64))) as model:
        masks, theta = masks_of(model), model.theta.detach().clone()
        kept = masks.draw(generator("masks"), 1)
        scale = masks.scale(kept, theta)
        located = (scale * theta).requires_grad_()
        model(**inputs, theta=located).loss.sum().backward()
        ours, layout = (scale * located.grad)[0], model.layout
    peft_model = with_lora(tiny_llama(dtype=torch.float64), lora_dropout=P).train()
    begin = 0
    for module in peft_model.modules():
        if hasattr(module, "lora_dropout"):
            width = module.lora_A["default"].in_features
            of_inputs = kept[0, begin : begin + width].double() / (1 - P if rescaled else 1)
            module.lora_dropout["default"], begin = FixedMask(of_inputs), begin + width
    output = peft_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    log_probs = output.logits[:, :-1].log_softmax(-1)
    (-log_probs.gather(2, inputs["labels"][:, 1:, None]).sum()).backward()
    theirs = layout.flatten({n: p.grad for n, p in peft_model.named_parameters() if p.grad is not None})
    return ours, theirs


def test_the_gradient_equals_peft_with_the_same_mask() -> None:
    ours, theirs = gradients()
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)  # float64, another order of sums
    ours, theirs = gradients(rescaled=False)
    assert not torch.allclose(ours, theirs, rtol=1e-2)


def test_an_update_is_adamw_on_the_energy_of_the_masked_weights() -> None:
    prior = GaussianPrior(torch.tensor(0.1), torch.tensor(0.5))
    spec = problem(prior=prior, shapes=SHAPES)
    rule = assemble(MCDropoutConfig(dropout=P), spec)
    assert isinstance(rule, Rule)
    theta, rngs = torch.randn(2, 30, generator=generator("theta")), [generator("chain", k) for k in range(2)]
    located, state = rule.locate(rule.init(theta, rngs), rngs)
    leaf = theta.clone().requires_grad_()
    scale = located / theta
    objective = (2 * (scale * leaf).sin() - prior.log_prob(scale * leaf)[:, None] / 30).sum()
    evaluation = Evaluation(torch.zeros(2), -2 * located.cos())
    (expected,) = torch.autograd.grad(objective, leaf)
    new, _ = rule.update(state, evaluation, 0.01, rngs)
    assert torch.allclose(new.first_moment, 0.1 * expected / spec.num_data, rtol=1e-4, atol=1e-6)  # float32
    assert not torch.equal(rule.locate(new, rngs)[1].kept, state.kept)  # a fresh mask per update


def test_without_dropout_it_is_map() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        return 10 * ((theta - 0.5).square() + theta.cos()).sum(1)

    options: dict[str, Any] = {"num_steps": 30, "learning_rate": 0.05, "num_data": 10, "burn_in": 0}
    start = torch.randn(2, 6, generator=generator("start"))
    found = sample(energy, start, MCDropoutConfig(dropout=0.0, num_masks=2), **options)
    assert torch.equal(found.draws, sample(energy, start, MAPConfig(), **options).draws)
    assert torch.equal(found.approximation.sample(4)[::2], found.draws[:, -1])


# ------------------------------------------------------------------------------------------------------ whole models


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.models
def test_a_run_ends_in_masked_rows_that_save_load_and_predict(tmp_path: Path) -> None:
    config = MCDropoutConfig(dropout=P, num_chains=2, num_masks=3)
    run = trainer(tmp_path, config, eval_dataset=token_rows(4, seed=1))
    run.train()
    run.save_model()
    draws, layout = run.posterior.approximation, run.posterior.layout
    assert draws.chain.tolist() == [0, 0, 0, 1, 1, 1]
    trained = run.run.state.theta.repeat_interleave(3, 0)
    for name, tensor in layout.unflatten(draws.theta).items():
        whole = layout.unflatten(trained)[name]
        dropped = (tensor == 0).all(-2, keepdim=True).expand_as(tensor)
        assert torch.allclose(tensor[~dropped], whole[~dropped] / (1 - P if "lora_A" in name else 1))
        assert bool(dropped.any()) == ("lora_A" in name)
    metrics = run.posterior.config.metrics
    assert math.isfinite(metrics["map_nll"])
    point = map_of_run(run.posterior, run.active)
    assert not torch.equal(point[0], draws.theta[0])  # a member with inputs dropped is no MAP estimate
    assert posteriors.equal(Posterior.from_pretrained(tmp_path), run.posterior)
