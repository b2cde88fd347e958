from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from hf_bayes.core.layout import per_tensor_mean
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Kernel, Problem
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.registry import METHODS, build
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.models.attaching import attach
from hf_bayes.training.chain_optimizer import ChainOptimizer
from tests import runs
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

CHAINS = 3


def chains(config: Any, *, draw_steps: range = range(3, 6, 2), burn_in: int = 2, seed: int = 0) -> ChainOptimizer:
    model = attach(tiny_bert(), subspace="last_layer", num_members=CHAINS)
    prior = GaussianPrior(torch.zeros(()), torch.ones(()))
    problem = Problem(100.0, prior, 0.01, 5, burn_in, model.layout.named_shapes)
    rngs = [generator(seed, "chain", chain) for chain in range(CHAINS)]
    return ChainOptimizer(
        model,
        build(config, problem),
        rngs,
        lr=0.01,
        draw_steps=draw_steps,
        chains=range(CHAINS),
        burn_in=burn_in,
        measure_noise=config.requirements.gradient_variance == "needed",
    )


def evaluate(theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
    """A standard normal likelihood, the same from each of four batches."""
    value = -0.5 * theta.square().sum(1)
    columns = value[:, None].expand(-1, 4)[:, batches or slice(None)]
    return Evaluation(value, -theta if gradient else None, batch_log_lik=columns)


def update(optimizer: ChainOptimizer, *, micro_batches: int = 1) -> None:
    """What Trainer does between two updates."""
    if isinstance(optimizer.method, Kernel):
        optimizer.move(evaluate)
        return optimizer.step()
    for _ in range(micro_batches):
        optimizer.train()
        value = evaluate(optimizer.model.theta.detach())
        for chain in range(CHAINS):
            members = slice(chain, chain + 1)
            optimizer.accumulate(
                members, -value.log_lik[members] / micro_batches, -value.grad_log_lik[members] / micro_batches
            )
    optimizer.step()


def state(optimizer: ChainOptimizer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in optimizer.state_of_chains._asdict().items()}


def test_a_rule_locates_once_per_update_and_not_per_micro_batch():
    one, four = chains(MeanFieldConfig()), chains(MeanFieldConfig())
    for _ in range(3):
        update(one)
        update(four, micro_batches=4)
    for a, b in zip(one.rngs, four.rngs, strict=True):
        assert torch.equal(a.get_state(), b.get_state())
    for name, value in state(one).items():
        torch.testing.assert_close(value, state(four)[name])


def test_the_model_stands_where_the_gradient_is_wanted_and_shows_the_state_in_evaluation():
    optimizer = chains(MeanFieldConfig())
    for _ in range(2):
        update(optimizer)
        optimizer.train()  # a draw from q, for the next gradient
        drawn = optimizer.model.theta.detach().clone()
        assert not torch.equal(drawn, optimizer.state_of_chains.theta)
        optimizer.eval()
        assert torch.equal(optimizer.model.current, optimizer.state_of_chains.theta)
        optimizer.train()  # again, and not a new draw
        assert torch.equal(optimizer.model.theta, drawn)
        assert torch.equal(optimizer.model.current, drawn)
        for chain in range(CHAINS):
            value = evaluate(drawn)
            optimizer.accumulate(
                slice(chain, chain + 1), value.log_lik[chain : chain + 1], value.grad_log_lik[chain : chain + 1]
            )
        optimizer.step()


@pytest.mark.parametrize("per_chain", [False, True])
def test_an_evaluation_is_the_scaled_sum_of_its_micro_batches(per_chain):
    optimizer = chains(SGHMCConfig())
    generator_ = torch.Generator().manual_seed(0)
    losses = torch.randn(4, CHAINS, generator=generator_)
    grads = torch.randn(4, *optimizer.model.theta.shape, generator=generator_)
    assert optimizer.begins_update
    for loss, grad in zip(losses, grads, strict=True):
        optimizer.accumulate(slice(0, 2), loss[:2], grad[:2])
        optimizer.accumulate(slice(2, 3), loss[2:], grad[2:])
        assert not optimizer.begins_update
    scale = torch.tensor([2.5, 1.0, 4.0]) if per_chain else 2.5
    # as on two processes that saw the same
    optimizer.complete(lambda tensor: tensor.mul_(2), scale)
    found = optimizer._take_evaluation()
    scales = torch.as_tensor(scale).expand(CHAINS)
    torch.testing.assert_close(found.log_lik, -2 * scales * losses.sum(0))
    torch.testing.assert_close(found.grad_log_lik, -2 * scales[:, None] * grads.sum(0))
    assert optimizer.begins_update
    assert found.grad_variance is None


def test_the_variance_of_a_gradient_is_that_of_a_sum_of_independent_micro_batches():
    optimizer = chains(SGHMCConfig(measure_gradient_noise=True))
    sizes = optimizer.model.layout.sizes
    spread = torch.cat([torch.full((size,), 1.0 + tensor) for tensor, size in enumerate(sizes)])
    grads = 5 + spread * torch.randn(8, *optimizer.model.theta.shape, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([2.5, 1.0, 4.0])
    for processes in (1, 2):  # the second as if two processes saw the same
        for grad in grads:
            optimizer.accumulate(slice(0, 2), torch.zeros(2), grad[:2])
            optimizer.accumulate(slice(2, 3), torch.zeros(1), grad[2:])
        optimizer.complete(lambda tensor, times=processes: tensor.mul_(times), scale)
        found = optimizer._take_evaluation().grad_variance
        count, seen = 8 * processes, torch.cat([grads] * processes)
        expected = [scale**2 * count * part.var(0).mean(1) for part in seen.split(sizes, dim=2)]
        torch.testing.assert_close(
            found, torch.stack(expected, 1), rtol=1e-4, atol=0.0
        )  # of 25 + 1, some digits cancel


def test_draws_are_taken_at_their_steps_and_stay_as_they_were():
    optimizer, seen = chains(SGHMCConfig()), []
    for _ in range(5):
        update(optimizer)
        seen.append(optimizer.state_of_chains.theta.clone())
    assert len(optimizer.draws) == 2
    assert torch.equal(optimizer.draws[0], seen[2])
    assert torch.equal(optimizer.draws[1], seen[4])


def test_means_of_diagnostics_leave_burn_in_out():
    optimizer, seen = chains(SGHMCConfig()), []
    for _ in range(5):
        update(optimizer)
        seen.append(optimizer.info["kinetic_temperature"].double())
    torch.testing.assert_close(optimizer.mean_info()["kinetic_temperature"], torch.stack(seen[2:]).mean(0))


def test_the_kinetic_temperature_of_each_tensor_is_a_mean_after_burn_in():
    optimizer, seen = chains(SGHMCConfig()), []
    sizes = optimizer.model.layout.sizes
    for _ in range(5):
        update(optimizer)
        seen.append(per_tensor_mean(state(optimizer)["momentum"].double().square(), sizes))
    totals = optimizer.totals
    torch.testing.assert_close(totals["kinetic_of_tensors"], torch.stack(seen[2:]).sum(0), rtol=1e-5, atol=0.0)
    assert totals["kinetic_law"].tolist() == pytest.approx([3 * 2 / 1.9] * CHAINS)


def test_a_zero_learning_rate_moves_nothing_and_a_negative_one_is_refused():
    optimizer = chains(SGHMCConfig())
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.model.theta.detach().clone()
    update(optimizer)
    assert torch.equal(optimizer.model.theta, before)
    for lr in (-1e-3, float("nan"), float("inf")):
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(ValueError, match="learning rate of step 2 is"):
            update(optimizer)


@pytest.mark.parametrize("warm_start_steps", [0, 2])
@pytest.mark.parametrize("name", METHODS, ids=str)
@pytest.mark.parametrize("cut", [1, 3, 4])
def test_chains_go_on_bitwise_from_their_tensors(name, warm_start_steps, cut):
    own = {
        "snapshot": {"schedule": None},  # five updates leave no room for cycles
        "mc_dropout": {"targets": "weight"},  # of the head: there is no LoRA
    }
    config = METHODS[name](num_chains=CHAINS, warm_start_steps=warm_start_steps, **own.get(name, {}))
    whole = chains(config)
    for step in range(5):
        if step == cut:
            saved = {chain: {k: v.clone() for k, v in row.items()} for chain, row in whole.chain_tensors().items()}
        update(whole)
    resumed = chains(config, seed=7)  # generators come from the file
    resumed.load_chain_tensors(saved, cut)
    for _ in range(cut, 5):
        update(resumed)
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    assert all(torch.equal(a, b) for a, b in zip(resumed.draws, whole.draws, strict=True))
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(resumed.rngs, whole.rngs, strict=True))
    for key, value in whole.mean_info().items():
        assert torch.equal(resumed.mean_info()[key], value)


def test_tensors_of_another_method_are_refused():
    whole = chains(SGHMCConfig())
    update(whole)
    with pytest.raises(ValueError, match=r"chain 0 .* written by another method"):
        chains(MAPConfig()).load_chain_tensors(whole.chain_tensors(), 1)


def test_a_checkpoint_holds_tensors_of_one_chain_each():
    optimizer = chains(SGHMCConfig())
    update(optimizer)
    saved = optimizer.chain_tensors()
    assert sorted(saved) == [0, 1, 2]
    assert all(torch.equal(saved[c]["state.theta"], optimizer.state_of_chains.theta[c]) for c in saved)
    assert optimizer.state_dict()["state"] == {}  # nothing of it goes to a pickle


# -- numbers that are not finite -------------------------------------------------------------------------------------

PARAMETER = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"


class At(TrainerCallback):
    """Do something to the run at the beginning of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.act()


def _spoil_loss(trainer: Any, value: float, chain: int | None, *, micro: int = 0, gradient: str | None = None) -> None:
    """From now on, the likelihood of a chain (or all) is ``value``, or one tensor of its gradient."""
    optimizer = trainer.optimizer_of_chains
    accumulate, layout, calls = optimizer.accumulate, trainer.bayesian.layout, [0]  # calls: micro-batches begun

    def spoiled(members: slice, loss: Tensor, grad: Tensor) -> None:
        calls[0] += members.start == 0
        hit = calls[0] > micro
        for row in range(members.start, members.stop):
            if hit and chain in (None, row):
                if gradient is None:
                    loss[row - members.start] = value
                else:
                    layout.unflatten(grad[row - members.start])[gradient].view(-1)[1] = value
        accumulate(members, loss, grad)

    optimizer.accumulate = spoiled


def _spoil_state(trainer: Any, field: str, chain: int, value: float) -> None:
    optimizer = trainer.optimizer_of_chains
    rule = optimizer.method

    def spoiled(*args: Any) -> Any:
        new, info = rule.update(*args)
        trainer.bayesian.layout.unflatten(getattr(new, field)[chain])[PARAMETER].view(-1)[0] = value
        return new, info

    optimizer.method = rule._replace(update=spoiled)


def _spoil_weight(trainer: Any, name: str, value: float) -> None:
    trainer.bayesian.core.get_parameter(name).data[..., 0] = value


def _spoil_gradient_on_its_way(trainer: Any) -> None:
    """The loss is finite, what flows back from it is not."""

    def hook(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * torch.inf)

    trainer.bayesian.core.model.layers[1].register_forward_hook(hook)


NAN, INF = float("nan"), float("inf")
FAULTS = {
    "loss of all chains": (3, lambda t: _spoil_loss(t, NAN, None), "log-likelihood at step 3 (chain 0)"),
    "infinite loss": (2, lambda t: _spoil_loss(t, INF, None), "log-likelihood at step 2 (chain 0)"),
    "loss of one chain": (4, lambda t: _spoil_loss(t, NAN, 2), "log-likelihood at step 4 (chain 2)"),
    "minus infinity in the last chain": (1, lambda t: _spoil_loss(t, -INF, 2), "log-likelihood at step 1 (chain 2)"),
    "one number of one gradient": (
        3,
        lambda t: _spoil_loss(t, NAN, 1, gradient=PARAMETER),
        f"gradient of the log-likelihood at step 3 (chain 1, {PARAMETER})",
    ),
    "infinite gradient": (
        5,
        lambda t: _spoil_loss(t, -INF, 0, gradient=PARAMETER),
        f"gradient of the log-likelihood at step 5 (chain 0, {PARAMETER})",
    ),
    "second micro-batch": (3, lambda t: _spoil_loss(t, NAN, 1, micro=1), "log-likelihood at step 3 (chain 1)"),
    "a parameter of one chain": (
        3,
        lambda t: _spoil_state(t, "theta", 2, NAN),
        f"theta after the update at step 3 (chain 2, {PARAMETER})",
    ),
    "a momentum of one chain": (
        4,
        lambda t: _spoil_state(t, "momentum", 1, INF),
        f"momentum after the update at step 4 (chain 1, {PARAMETER})",
    ),
    "a frozen weight": (
        3,
        lambda t: _spoil_weight(t, "model.layers.0.mlp.up_proj.weight", NAN),
        "gradient of the log-likelihood at step 3 (chain 0, base_model",
    ),
}
MORE_FAULTS = {
    **{
        f"{value} in {name}": (
            2,
            lambda t, name=name, value=value: _spoil_weight(t, name, value),
            "gradient of the log-likelihood at step 2 (chain 0, base_model",
        )
        for name, value in {
            "model.embed_tokens.weight": INF,
            "model.layers.1.input_layernorm.weight": NAN,
            "model.norm.weight": INF,
            "lm_head.weight": NAN,
            "model.layers.0.mlp.down_proj.weight": 3e38,  # a product of finite numbers overflows
        }.items()
    },
    "a gradient that overflows on its way": (
        4,
        _spoil_gradient_on_its_way,
        "gradient of the log-likelihood at step 4 (chain 0, base_model",
    ),
    "the gradient of a second micro-batch": (
        2,
        lambda t: _spoil_loss(t, INF, 2, micro=1, gradient=PARAMETER),
        f"gradient of the log-likelihood at step 2 (chain 2, {PARAMETER})",
    ),
    "a parameter that overflows": (
        1,
        lambda t: _spoil_state(t, "theta", 0, -INF),
        f"theta after the update at step 1 (chain 0, {PARAMETER})",
    ),
    "a momentum that is no number": (
        5,
        lambda t: _spoil_state(t, "momentum", 2, NAN),
        f"momentum after the update at step 5 (chain 2, {PARAMETER})",
    ),
    "the loss of the last step": (6, lambda t: _spoil_loss(t, INF, 1), "log-likelihood at step 6 (chain 1)"),
}


GUARDED = SGHMCConfig(num_chains=CHAINS, draws_per_chain=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run comes to when nothing goes wrong."""
    trainer = runs.trainer(tmp_path_factory.mktemp("whole"), GUARDED, gradient_accumulation_steps=2)
    trainer.train()
    return trainer.posterior.approximation


@pytest.mark.reliability("F6")
@pytest.mark.parametrize("fault", [*FAULTS, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE_FAULTS)], ids=str)
def test_what_is_not_finite_stops_the_run_at_its_step_and_is_never_saved(tmp_path, undisturbed, fault):
    step, act, words = (FAULTS | MORE_FAULTS)[fault]
    settings = {"save_strategy": "steps", "gradient_accumulation_steps": 2}
    trainer = runs.trainer(tmp_path, GUARDED, callbacks=[At(step, lambda: act(trainer))], save_steps=1, **settings)
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    assert f"non-finite {words}" in str(caught.value)
    assert trainer.state.global_step == step - 1
    assert all(entry.get("loss", 1.0) != 0.0 for entry in trainer.state.log_history)

    saved = list(Path(tmp_path).glob("checkpoint-*/chains/*.safetensors"))
    assert len(saved) == (step - 1) * CHAINS
    for file in saved:
        assert all(value.isfinite().all() for value in load_file(file).values())
    assert not (Path(tmp_path) / "manifest.json").exists()
    with pytest.raises(ValueError, match="no posterior yet"):
        trainer.save_model()

    if step > 1:  # the last good checkpoint goes on as if nothing had happened
        resumed = runs.trainer(tmp_path, GUARDED, save_steps=100, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert runs.equal(resumed.posterior.approximation, undisturbed)


@pytest.mark.reliability("F6")
@pytest.mark.parametrize("name", ["sgld", "map", "ensemble", "mean_field"])
def test_every_rule_is_guarded(tmp_path, name):
    config = METHODS[name](num_chains=CHAINS)
    trainer = runs.trainer(
        tmp_path, config, callbacks=[At(3, lambda: _spoil_loss(trainer, NAN, 1, gradient=PARAMETER))]
    )
    with pytest.raises(FloatingPointError, match=r"at step 3 \(chain 1, base_model"):
        trainer.train()


@pytest.mark.reliability("F6")
def test_a_chain_that_blows_up_by_itself_is_stopped(tmp_path):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), learning_rate=1e25, max_steps=60)
    with pytest.raises(FloatingPointError, match=r"at step \d+ \(chain \d, "):
        trainer.train()


@pytest.mark.reliability("F6")
def test_a_start_that_is_not_finite_is_stopped_at_step_one(tmp_path):
    model = with_lora(tiny_llama())
    dict(model.named_parameters())[PARAMETER].data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="at step 1 "):
        runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=model).train()


@pytest.mark.reliability("F6", twin=True)
def test_without_the_guard_the_chains_go_on_as_nan_and_only_the_end_refuses_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ChainOptimizer, "_require_finite", lambda *args: None)
    fault = FAULTS["one number of one gradient"][1]
    trainer = runs.trainer(tmp_path, GUARDED, callbacks=[At(3, lambda: fault(trainer))])
    with pytest.raises(ValueError, match=r"is not finite in members \[2, 3\]: they are not saved"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert not (Path(tmp_path) / "manifest.json").exists()


@pytest.mark.reliability("F6")
def test_numbers_spoilt_in_memory_after_their_step_are_not_saved(tmp_path):
    """Beyond the guard of the update: a state is looked at again when a checkpoint is written."""

    class Spoil(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                trainer.optimizer_of_chains.state_of_chains.theta[1, 0] = NAN

    trainer = runs.trainer(tmp_path, GUARDED, callbacks=[Spoil()], save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match=r"chain_001\.safetensors: state\.theta holds 1 values"):
        trainer.train()
    resumed = runs.trainer(tmp_path, GUARDED)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.posterior.sample(None).isfinite().all()


@pytest.mark.reliability("F6")
@pytest.mark.parametrize("name", ["hmc", "metropolis"])
def test_kernels_refuse_to_start_where_the_likelihood_is_not_finite(tmp_path, name):
    model = with_lora(tiny_llama())
    model.base_model.model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="chain 0 starts where the energy"):
        runs.trainer(tmp_path, METHODS[name](num_chains=2), model=model).train()


def test_the_sum_of_large_finite_numbers_is_no_alarm():
    optimizer = chains(MAPConfig())
    huge = torch.full_like(optimizer.model.theta.detach(), 1e38)
    assert not huge.sum().isfinite()
    optimizer._require_finite({"gradient": huge})


def test_the_logged_loss_of_a_kernel_is_that_of_its_chains(tmp_path):
    """Proposals this wide are all refused: the chains stay, and so does their loss."""
    config = METHODS["metropolis"](num_chains=2, proposal_std=1e3, target_acceptance=None)
    trainer = runs.trainer(tmp_path, config, max_steps=4)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["acceptance/chain_0"] for entry in entries] == [0.0] * 4
    assert len({entry["loss/chain_0"] for entry in entries}) == 1
