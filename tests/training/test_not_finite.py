from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_bayes.chains.run import Run
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.objectives.passes import MemberPass
from tests import runs
from tests.tiny_models import tiny_llama, with_lora

CHAINS = 3

PARAMETER = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"


class At(TrainerCallback):
    """Do something to the run at the beginning of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.act()


def _spoil_loss(trainer: Any, value: float, chain: int | None, *, micro: int = 0, gradient: str | None = None) -> None:
    """Make the likelihood of a chain (or of all) ``value`` from now on, or one tensor of its gradient."""
    passes, layout, begun = trainer.active.objective.passes, trainer.bayesian.layout, [0]  # micro-batches
    of_batch = passes.of_batch

    def spoiled(*args: Any, **kwargs: Any) -> Iterator[MemberPass]:
        begun[0] += 1
        for members, loss, grad, anchor_grad in of_batch(*args, **kwargs):
            for row in range(members.start, members.stop):
                if begun[0] > micro and chain in (None, row):
                    if gradient is None:
                        loss[row - members.start] = value
                    else:
                        layout.unflatten(grad[row - members.start])[gradient].view(-1)[1] = value
            yield MemberPass(members, loss, grad, anchor_grad)

    object.__setattr__(passes, "of_batch", spoiled)  # the passes are frozen


def _spoil_state(trainer: Any, field: str, chain: int, value: float) -> None:
    rule = trainer.run.method

    def spoiled(*args: Any) -> Any:
        new, info = rule.update(*args)
        trainer.bayesian.layout.unflatten(getattr(new, field)[chain])[PARAMETER].view(-1)[0] = value
        return new, info

    trainer.run.method = rule._replace(update=spoiled)


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
    "loss of all chains": (3, lambda t: _spoil_loss(t, NAN, None), "log-likelihood at step 3 (chains 0, 1, 2)"),
    "infinite loss": (2, lambda t: _spoil_loss(t, INF, None), "log-likelihood at step 2 (chains 0, 1, 2)"),
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
        "gradient of the log-likelihood at step 3 (chains 0, 1, 2, base_model",
    ),
}
MORE_FAULTS = {
    **{
        f"{value} in {name}": (
            2,
            lambda t, name=name, value=value: _spoil_weight(t, name, value),
            "gradient of the log-likelihood at step 2 (chains 0, 1, 2, base_model",
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
        "gradient of the log-likelihood at step 4 (chains 0, 1, 2, base_model",
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
    """Return the result of the run when nothing goes wrong."""
    trainer = runs.trainer(tmp_path_factory.mktemp("whole"), GUARDED, gradient_accumulation_steps=2)
    trainer.train()
    return trainer.posterior.approximation


@pytest.mark.reliability("F6")
@pytest.mark.parametrize("fault", [*FAULTS, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE_FAULTS)], ids=str)
def test_a_non_finite_value_stops_the_run_and_is_never_saved(tmp_path, undisturbed, fault):
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
    with pytest.raises(FloatingPointError, match=r"at step \d+ \(chains? [\d, ]+base_model"):
        trainer.train()


@pytest.mark.reliability("F6")
def test_a_start_that_is_not_finite_is_stopped_at_step_one(tmp_path):
    model = with_lora(tiny_llama())
    dict(model.named_parameters())[PARAMETER].data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="at step 1 "):
        runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=model).train()


@pytest.mark.reliability("F6", twin=True)
def test_without_the_guard_only_saving_refuses_nan(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_require_finite", lambda *args: None)
    fault = FAULTS["one number of one gradient"][1]
    trainer = runs.trainer(tmp_path, GUARDED, callbacks=[At(3, lambda: fault(trainer))])
    with pytest.raises(ValueError, match=r"is not finite in members \[2, 3\]: they are not saved"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert not (Path(tmp_path) / "manifest.json").exists()


@pytest.mark.reliability("F6")
def test_numbers_spoilt_in_memory_after_their_step_are_not_saved(tmp_path):
    """A state is checked again when a checkpoint is written, after the guard of the update."""

    class Spoil(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                trainer.run.state.theta[1, 0] = NAN

    trainer = runs.trainer(tmp_path, GUARDED, callbacks=[Spoil()], save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match=r"chain_001\.safetensors: state\.theta holds 1 values"):
        trainer.train()
    resumed = runs.trainer(tmp_path, GUARDED)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.posterior.sample(None).isfinite().all()


@pytest.mark.reliability("F6")
@pytest.mark.parametrize("name", ["hmc", "metropolis"])
def test_kernels_refuse_to_start_at_a_non_finite_likelihood(tmp_path, name):
    model = with_lora(tiny_llama())
    model.base_model.model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(
        FloatingPointError, match=r"non-finite log-likelihood at step 1 \(chains 0, 1\): chains must start"
    ):
        runs.trainer(tmp_path, METHODS[name](num_chains=2), model=model).train()


def test_the_logged_loss_of_a_kernel_is_that_of_its_chains(tmp_path):
    """Proposals this wide are all refused: the chains stay, and so does their loss."""
    config = METHODS["metropolis"](num_chains=2, proposal_std=1e3, target_acceptance=None)
    trainer = runs.trainer(tmp_path, config, max_steps=4)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["acceptance/chain_0"] for entry in entries] == [0.0] * 4
    assert len({entry["loss/chain_0"] for entry in entries}) == 1
