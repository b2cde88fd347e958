"""Trainers of other libraries after the mixin: what they are handed, and which of them are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer, default_data_collator

from hf_bayes import BayesianTrainer, BayesianTrainerMixin, MAPConfig, SGHMCConfig
from hf_bayes.training import trainer_host
from hf_bayes.training.checks.host_trainers import likelihood_for
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences
from hf_bayes.uncertainty.custom.poisson import Poisson
from tests import runs
from tests.tiny_models import tiny_llama, with_lora


class OrderedOtherwise(Trainer):
    """A host whose first arguments come in another order, as DPOTrainer's do."""

    def __init__(self, model: Any, reference: Any = None, args: Any = None, **kwargs: Any) -> None:
        assert reference is None
        super().__init__(model, args, **kwargs)


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never asked")


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never asked")


class NamedAsIfKnown(OwnLoss): ...


NamedAsIfKnown.__name__ = "SFTTrainer"  # of another package than TRL


def built(host: type, folder: Path, model: Any = None, **changes: Any) -> Any:
    kind = type("Bayesian", (BayesianTrainerMixin, host), {})
    rows = Dataset.from_list(runs.token_rows())
    args = runs.arguments(folder, **changes)
    return kind(
        model or with_lora(tiny_llama()), SGHMCConfig(), args, train_dataset=rows, data_collator=default_data_collator
    )


def test_a_host_is_handed_model_and_arguments_by_name(tmp_path: Path) -> None:
    trainer = built(OrderedOtherwise, tmp_path)
    assert trainer.model is trainer.bayesian
    assert trainer.args.output_dir == str(tmp_path)


@pytest.mark.parametrize(("host", "method"), [(OwnLoss, "compute_loss"), (OwnStep, "training_step")])
def test_a_host_with_a_loss_of_its_own_is_refused_by_name(tmp_path: Path, host: type, method: str) -> None:
    with pytest.raises(ValueError, match=rf"^{host.__name__} \(.*\) defines a loss of its own \({method}\).*Use"):
        built(host, tmp_path)


def test_a_known_name_from_another_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"OwnLoss .* defines a loss of its own"):
        built(NamedAsIfKnown, tmp_path)


def test_an_override_before_the_mixin_is_the_callers_own(tmp_path: Path) -> None:
    class Timed(BayesianTrainer):
        steps = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().training_step(*args, **kwargs)

    trainer = runs.trainer(tmp_path, MAPConfig(), kind=Timed, max_steps=2, map_updates=0)
    trainer.train()
    assert trainer.steps == 2


def test_a_loss_before_the_mixin_is_refused_and_not_ignored(tmp_path: Path) -> None:
    class OtherLoss(BayesianTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ValueError, match=r"OtherLoss .* overrides compute_loss.*Weighted\(\).*likelihoods\.md"):
        runs.trainer(tmp_path, MAPConfig(), kind=OtherLoss)


HOOKS = {
    "get_train_dataloader": r"give the rows as train_dataset=, and what makes a batch as data_collator=",
    "_get_train_sampler": r"each chain takes the rows in permutations of its own.*hf_bayes\.Weighted\(\)",
    "create_optimizer": r"the method is the optimizer.*set learning_rate",
    "create_optimizer_and_scheduler": r"the method is the optimizer.*set learning_rate",
    "get_optimizer_cls_and_kwargs": r"the method is the optimizer.*set learning_rate",
    "create_scheduler": r"set lr_scheduler_type and lr_scheduler_kwargs",
}
"""Methods of Trainer with which a user changes what training does -> what to do instead."""


@pytest.mark.parametrize("name", HOOKS)
def test_own_batches_and_optimizers_are_refused(tmp_path: Path, name: str) -> None:
    def calls_no_other(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    message = rf"^Own \(.*\) overrides {name}, which is refused: .*{HOOKS[name]}"
    with pytest.raises(ValueError, match=message):  # before the mixin: called by Trainer in place of the mixin's
        runs.trainer(tmp_path, MAPConfig(), kind=type("Own", (BayesianTrainer,), {name: calls_no_other}))
    with pytest.raises(ValueError, match=message):  # after the mixin: never called
        built(type("Own", (Trainer,), {name: calls_no_other}), tmp_path)


def test_the_cache_of_the_device_is_emptied_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = []
    monkeypatch.setattr(trainer_host, "clear_device_cache", lambda: emptied.append(trainer.state.global_step))
    trainer = runs.trainer(tmp_path, MAPConfig(), max_steps=5, map_updates=0, torch_empty_cache_steps=2)
    trainer.train()
    assert emptied == [0, 2, 4]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation_offloading", True, "activation_offloading=True is refused, expected False"),
        ("loss_type", "dft", "loss_type='dft' is refused, expected 'nll'"),
        ("router_aux_loss_coef", 0.1, "router_aux_loss_coef=0.1 is refused, expected None or 0"),
        ("chat_template_path", "Qwen/Qwen3", r"expected a file .jinja or .j2.*clone_chat_template"),
    ],
)
def test_a_setting_of_a_host_for_another_loss_is_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    args = runs.arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        BayesianTrainer(with_lora(tiny_llama()), SGHMCConfig(), args)


def test_a_host_changes_no_field_of_the_models_config(tmp_path: Path) -> None:
    class Balancing(Trainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.model.config.rms_norm_eps = self.model.config.output_router_logits = 0.5
            self.model.config.pad_token_id = 7

    config = built(Balancing, tmp_path).bayesian.core.config
    assert config.rms_norm_eps == tiny_llama().config.rms_norm_eps
    assert not hasattr(config, "output_router_logits")
    assert config.pad_token_id == 7


def test_a_host_that_raises_leaves_the_models_config_as_it_was(tmp_path: Path) -> None:
    class Failing(Trainer):
        def __init__(self, **kwargs: Any) -> None:
            config = kwargs["model"].config
            config.rms_norm_eps = config.output_router_logits = 0.5
            config.pad_token_id = 7
            raise ValueError("no such argument")

    model = with_lora(tiny_llama())
    before = model.config.to_dict()
    with pytest.raises(ValueError, match="no such argument"):
        built(Failing, tmp_path, model)
    assert model.config.to_dict() == before


def test_columns_that_the_host_keeps_for_its_collator_are_kept(tmp_path: Path) -> None:
    class Packing(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["input_ids", "seq_lengths"]

    trainer = built(Packing, tmp_path)
    assert {"seq_lengths", "input_ids", "attention_mask", "labels"} <= set(trainer._signature_columns)


def test_a_trainer_before_the_mixin_is_refused_by_name() -> None:
    class TimedTrainer(Trainer): ...

    class Cooperates(TimedTrainer, BayesianTrainer): ...  # a user's own class may come before the mixin

    for bases in ((Trainer, BayesianTrainerMixin), (TimedTrainer, BayesianTrainerMixin)):
        with pytest.raises(ValueError, match=rf"write class Own\(BayesianTrainerMixin, {bases[0].__name__}\)$"):
            type("Own", bases, {})
    sft = type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer.sft_trainer"})
    with pytest.raises(ValueError, match=r"write class Own\(BayesianTrainerMixin, SFTTrainer\)$"):
        type("Own", (sft, BayesianTrainer), {})


def reward_host() -> type:
    """Return a class that looks like TRL's RewardTrainer."""
    return type("RewardTrainer", (OwnLoss,), {"__module__": "trl.trainer.reward_trainer", "compute_loss": None})


def test_rewards_have_the_likelihood_of_preferences() -> None:
    args = SimpleNamespace(center_rewards_coefficient=None)
    assert likelihood_for(reward_host(), None, args) == BradleyTerry()
    assert likelihood_for(Trainer, None, args) is None
    assert likelihood_for(Trainer, Poisson(), args) == Poisson()
    with pytest.raises(ValueError, match="whose rows are preferences: leave it out"):
        likelihood_for(reward_host(), Poisson(), args)
    with pytest.raises(ValueError, match=r"center_rewards_coefficient=0\.1 is refused"):
        likelihood_for(reward_host(), None, SimpleNamespace(center_rewards_coefficient=0.1))


def test_dpo_has_the_likelihood_of_its_arguments() -> None:
    host = type("DPOTrainer", (OwnLoss,), {"__module__": "trl.trainer.dpo_trainer", "compute_loss": None})
    args = SimpleNamespace(beta=0.3, loss_type=["sigmoid"])
    assert likelihood_for(host, None, args) == DirectPreferences(beta=0.3)
    named = SimpleNamespace(config=SimpleNamespace(name_or_path="other"))
    assert likelihood_for(host, None, args, {"ref_model": named}) == DirectPreferences(beta=0.3, reference="other")
    with pytest.raises(ValueError, match=r"whose likelihood follows from its arguments \(beta\): leave it out"):
        likelihood_for(host, DirectPreferences(), args)
    with pytest.raises(ValueError, match=r"loss_type=\['hinge'\] is refused with DPO"):
        likelihood_for(host, None, SimpleNamespace(beta=0.3, loss_type=["hinge"]))
