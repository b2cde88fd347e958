"""The mixin before TRL's DPOTrainer. TRL is no dependency: ``make test-slow`` installs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from hf_bayes import (
    BayesianModelForCausalLM,
    BayesianTrainerMixin,
    BayesianTrainingArguments,
    EnsembleConfig,
    LaplaceConfig,
    SGHMCConfig,
)
from hf_bayes.models.preferences import BayesianModelForPreferences
from hf_bayes.training.dpo_reference import StandIn
from tests.tiny_models import tiny_llama
from tests.training.preference_rows import IMPLICIT, MESSAGES, PLAIN, tokenizer

pytestmark = pytest.mark.slow

IMPLICIT_MESSAGES = [
    {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}  # type: ignore[operator]
    for row in MESSAGES
]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
STD = 2.0


def settings(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_steps": 5, "per_device_train_batch_size": 8, "learning_rate": 0.1, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_length": 64, "beta": 0.1, "seed": 7,
    }  # fmt: skip
    return fields | changes


def bayesian(
    folder: Path, model: Any, method: Any = None, rows: Any = PLAIN, kwargs: Any = None, **changes: Any
) -> Any:
    from trl import DPOConfig, DPOTrainer

    class Args(BayesianTrainingArguments, DPOConfig): ...

    class BayesianDPO(BayesianTrainerMixin, DPOTrainer): ...

    method = method or SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=0.5)
    return BayesianDPO(
        model, method, args=Args(output_dir=str(folder), **settings(**changes)),
        train_dataset=Dataset.from_list(rows), **{"processing_class": tokenizer()} | (kwargs or {}),
    )  # fmt: skip


def saved(folder: Path, seed: int = 0) -> str:
    """Save a base, which TRL loads as its reference."""
    tiny_llama(seed).save_pretrained(folder / f"base{seed}")
    return str(folder / f"base{seed}")


def adapted(base: str) -> Any:
    """Return a base with an adapter whose second factors are not zero."""
    torch.manual_seed(1)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(**LORA))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3)
    return model


def of_trl(folder: Path, model: Any, kwargs: Any = None, **changes: Any) -> tuple[list[float], Any]:
    """Return the losses of DPOTrainer with plain SGD and the prior as weight decay, and its model."""
    from trl import DPOConfig, DPOTrainer

    decay = 1 / (len(PLAIN) * STD**2)
    host = DPOTrainer(
        model,
        args=DPOConfig(
            output_dir=str(folder), max_grad_norm=0.0, lr_scheduler_type="constant", bf16=False,
            gradient_checkpointing=False, **settings(**changes),
        ),
        train_dataset=Dataset.from_list(PLAIN), processing_class=tokenizer(), **kwargs or {},
    )  # fmt: skip
    # transformers leaves biases and norms out of weight decay, and the prior holds for every parameter
    trained = [value for value in host.model.parameters() if value.requires_grad]
    host.optimizer = torch.optim.SGD(trained, lr=host.args.learning_rate, weight_decay=decay)
    host.train()
    return [entry["loss"] for entry in host.state.log_history if "loss" in entry], host.model


def of_ours(folder: Path, model: Any, kwargs: Any = None, **changes: Any) -> tuple[list[float], Any]:
    """Return the losses of one member at T = 0, and the trainer."""
    method = SGHMCConfig(
        num_chains=1, prior_std=STD, temperature=0.0, momentum=0.0, warm_start_steps=0, init_jitter=0.0
    )
    ours = bayesian(folder, model, method, kwargs=kwargs, **changes)
    # chains draw the first factor of a fresh adapter anew, and TRL has the adapter's own
    ours.bayesian.place(ours.setup.start[None])
    ours.train()
    return [entry["loss"] for entry in ours.state.log_history if "loss" in entry], ours


class StepsOfTRL(NamedTuple):
    """A run of ``of_trl`` on a whole model: the folder of its base, its losses, and its parameters."""

    base: str
    losses: list[float]
    parameters: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def steps_of_trl(tmp_path_factory: pytest.TempPathFactory) -> StepsOfTRL:
    """Return the run that four tests compare with."""
    folder = tmp_path_factory.mktemp("trl")
    base = saved(folder)
    losses, host = of_trl(folder / "trl", LlamaForCausalLM.from_pretrained(base), learning_rate=0.05)
    return StepsOfTRL(base, losses, {name: value.detach().clone() for name, value in host.named_parameters()})


WRONG_REWARDS = {
    "sign": lambda sums, reference, beta: beta * (sums.unflatten(1, (-1, 2)) + reference),
    "beta": lambda sums, reference, beta: beta**2 * (sums.unflatten(1, (-1, 2)) - reference),
    "order": lambda sums, reference, beta: beta * (sums.unflatten(1, (-1, 2)) - reference.flip(-1)),
}
"""Broken twins: the reference is added, beta counts twice, and the reference is that of the other answer."""


@pytest.mark.parametrize("wrong", WRONG_REWARDS)
def test_wrong_rewards_do_not_take_the_steps_of_trl(
    tmp_path: Path, steps_of_trl: StepsOfTRL, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM.from_pretrained(steps_of_trl.base)
    rewards = WRONG_REWARDS[wrong]
    monkeypatch.setattr(
        BayesianModelForPreferences,
        "rewards",
        lambda self, sums, reference: rewards(sums, reference, self.preferences.beta),
    )
    found, _ = of_ours(tmp_path / "ours", model, {"subspace": "all"}, learning_rate=0.05)
    # a thousand times the tolerance of the test below
    assert max(abs(mine - theirs) for mine, theirs in zip(found, steps_of_trl.losses, strict=True)) > 1e-3


def test_a_member_at_temperature_zero_takes_the_steps_of_trl(tmp_path: Path, steps_of_trl: StepsOfTRL) -> None:
    model = LlamaForCausalLM.from_pretrained(steps_of_trl.base)
    found, ours = of_ours(tmp_path / "ours", model, {"subspace": "all"}, learning_rate=0.05)
    # all rows are in every batch, so that only float32 sums in another order differ
    assert found == pytest.approx(steps_of_trl.losses, abs=1e-6)
    assert max(found) - min(found) > 1e-2
    # rounding of five steps
    for name, value in steps_of_trl.parameters.items():
        column = ours.bayesian.layout.unflatten(ours.bayesian.current.detach())[name]
        assert torch.allclose(column[0], value, atol=1e-5)


def test_a_fresh_adapter_has_the_base_as_its_reference(tmp_path: Path) -> None:
    lora = {"peft_config": LoraConfig(**LORA)}
    base = saved(tmp_path)
    expected, _ = of_trl(tmp_path / "trl", LlamaForCausalLM.from_pretrained(base), lora, learning_rate=0.2)
    found, ours = of_ours(tmp_path / "ours", LlamaForCausalLM.from_pretrained(base), lora, learning_rate=0.2)
    assert all(".lora_" in name for name in ours.bayesian.layout.names)
    assert found[0] == pytest.approx(0.693147, abs=1e-6)  # log 2: the model is its own reference
    # float32 sums in another order
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(found) - min(found) > 1e-3


def test_an_adapter_that_was_trained_is_its_own_reference(tmp_path: Path) -> None:
    base = saved(tmp_path)
    expected, _ = of_trl(tmp_path / "trl", adapted(base))
    found, ours = of_ours(tmp_path / "ours", adapted(base))
    # float32 sums in another order
    assert found == pytest.approx(expected, abs=1e-6)
    # the broken twin: with the adapter off, as if it were fresh, the reference is another one and so is the loss
    ours.bayesian.reference = torch.zeros_like(ours.bayesian.reference)
    ours.bayesian.show(ours.setup.start[None])
    batch = ours.rows.first()
    assert abs(ours.bayesian.evaluate_batch(batch)[0]["nll"].mean().item() - found[0]) > 1e-3


@pytest.mark.parametrize("precomputed", [False, True])
def test_another_reference_model_is_that_of_trl(tmp_path: Path, precomputed: bool) -> None:
    base, other = saved(tmp_path), saved(tmp_path, seed=5)
    changes = {"precompute_ref_log_probs": precomputed}

    def arguments() -> dict[str, Any]:
        return {"ref_model": LlamaForCausalLM.from_pretrained(other), "peft_config": LoraConfig(**LORA)}

    expected, _ = of_trl(tmp_path / "trl", LlamaForCausalLM.from_pretrained(base), arguments(), **changes)
    found, ours = of_ours(tmp_path / "ours", LlamaForCausalLM.from_pretrained(base), arguments(), **changes)
    # float32 sums in another order
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(found[0] - 0.693147) > 1e-3  # the model is not its own reference
    assert ours.bayesian.preferences.reference == other


def test_precomputed_references_are_those_of_the_start(tmp_path: Path) -> None:
    base = saved(tmp_path)
    expected, _ = of_ours(tmp_path / "batches", adapted(base))
    found, ours = of_ours(tmp_path / "columns", adapted(base), precompute_ref_log_probs=True)
    assert {"ref_chosen_logps", "ref_rejected_logps"} <= set(ours.train_dataset.column_names)
    # the columns are rounded to float32
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "rows", [PLAIN, IMPLICIT, MESSAGES, IMPLICIT_MESSAGES], ids=["prompt", "implicit", "chat", "implicit chat"]
)
def test_every_format_of_pairs_ends_in_a_posterior(tmp_path: Path, rows: Any) -> None:
    kwargs = {"peft_config": LoraConfig(**LORA), "eval_dataset": Dataset.from_list(rows)}
    model = LlamaForCausalLM.from_pretrained(saved(tmp_path))
    run = bayesian(tmp_path / "run", model, None, rows, kwargs, per_device_train_batch_size=2, learning_rate=1e-2,
                   max_steps=8)  # fmt: skip
    run.train()
    assert run.rows.num_data == 8  # pairs, and neither answers nor tokens
    found = run.evaluate()
    assert {"eval_nll", "eval_accuracy", "eval_epistemic"} <= found.keys()
    assert "eval_perplexity" not in found
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
    assert type(loaded) is BayesianModelForCausalLM
    stored = loaded.posterior.config  # type: ignore[union-attr]
    assert stored.head["preferences"] == {"name": "direct_preferences", "beta": 0.1, "reference": "start"}
    assert not stored.calibration
    ids = torch.arange(3, 12)[None]
    told = loaded.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert (told.epistemic >= 0).all()
    assert torch.equal(loaded(ids).logits, run.bayesian(ids).logits)


@pytest.mark.parametrize("method", [SGHMCConfig(), LaplaceConfig(structure="kronecker")])
@pytest.mark.parametrize("precomputed", [False, True])
def test_a_run_with_nothing_set_ends_in_a_posterior(tmp_path: Path, method: Any, precomputed: bool) -> None:
    kwargs = {"peft_config": LoraConfig(**LORA), "eval_dataset": Dataset.from_list(PLAIN)}
    model = LlamaForCausalLM.from_pretrained(saved(tmp_path))
    run = bayesian(tmp_path / "run", model, method, PLAIN, kwargs, learning_rate=None, max_steps=20,
                   precompute_ref_log_probs=precomputed)  # fmt: skip
    run.train()
    assert run.evaluate()["eval_epistemic"] > 0
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
    assert bool((loaded(torch.arange(3, 12)[None]).epistemic > 0).all())


def test_a_base_given_by_name_is_loaded_once(tmp_path: Path) -> None:
    base = saved(tmp_path)
    tokenizer().save_pretrained(base)
    kwargs = {"processing_class": None, "peft_config": LoraConfig(**LORA)}
    run = bayesian(tmp_path / "run", base, EnsembleConfig(num_chains=2), kwargs=kwargs, learning_rate=1e-2)
    assert isinstance(run.ref_model, StandIn)
    assert not list(run.ref_model.parameters())
    assert "forward" not in vars(run.bayesian)
    run.train()
    assert run.bayesian.num_members == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "ipo"}, r"loss_type=\['ipo'\] is refused with DPO, expected \['sigmoid'\]"),
        ({"loss_type": ["sigmoid", "sft"]}, r"loss_type=\['sigmoid', 'sft'\] is refused"),
        ({"loss_weights": [0.5]}, r"loss_weights=\[0.5\] is refused"),
        ({"f_divergence_type": "js_divergence"}, "f_divergence_type='js_divergence' is refused"),
        ({"ld_alpha": 0.5}, "ld_alpha=0.5 is refused"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 is refused"),
        ({"use_weighting": True}, "use_weighting=True is refused"),
        ({"sync_ref_model": True}, "sync_ref_model=True is refused"),
        ({"beta": 0.0}, "beta must be > 0, got 0.0"),
        ({"trunk_memory_gib": 1.0}, "trunk_memory_gib=1.0 is refused with preferences"),
        ({"calibrate": True}, "calibrate=True fits a temperature.*the rows are preferences"),
    ],
)
def test_what_would_change_the_likelihood_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bayesian(tmp_path, tiny_llama(), kwargs={"peft_config": LoraConfig(**LORA)}, **changes)
