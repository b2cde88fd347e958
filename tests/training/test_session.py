"""The steps before the first update of a run: checks of a trainer's data, of a checkpoint, and the order of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from hf_bayes.members.compat.transformers import checkpointing_modules, is_checkpointing
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives import starting
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments
from tests import runs
from tests.members.subject_models import bloom
from tests.tiny_models import CHECKPOINTING, tiny_bert, tiny_llama, tiny_tokenizer, with_lora
from tests.training.checkpointed import run

SGHMC = SGHMCConfig(num_chains=2, draws_per_chain=2)
HELDOUT = LaplaceConfig(fit_prior="heldout")
WRONG_LABEL = [{**row, "label": 3} for row in runs.label_rows(2)]


@dataclass(frozen=True)
class OneSum(CustomLikelihood):
    """A likelihood with one value for all rows, where one for each row is expected."""

    name: ClassVar[str] = "one_sum"

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -(labels - outputs[..., 0]).square().sum()

    def predict(self, outputs: Tensor) -> Moments:
        return Moments(outputs, torch.ones_like(outputs))


def grown_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<a>"])
    return tokenizer


def classifier(folder: Path, method: Any = HELDOUT, **changes: Any) -> BayesianTrainer:
    """Return a trainer of a classifier of three classes; it has no held-out rows."""
    given = {"train": runs.label_rows(4), "subspace": "last_layer", **changes}
    return runs.trainer(folder, method, model=tiny_bert(num_labels=3, hidden_size=4), **given)


def regressor(folder: Path, method: Any = SGHMC, **changes: Any) -> BayesianTrainer:
    """Return a trainer with a likelihood that fails on the first rows."""
    rows = [{**row, "label": float(row["label"])} for row in runs.label_rows(4)]
    given = {"train": rows, "subspace": "last_layer", "likelihood": OneSum(), **changes}
    return runs.trainer(folder, method, model=tiny_bert(num_labels=1), **given)


def without_rows(folder: Path) -> BayesianTrainer:
    """Return a trainer that can evaluate, and has nothing to train on."""
    return BayesianTrainer(with_lora(tiny_llama()), SGHMC, runs.arguments(folder))


def flattened(folder: Path, method: Any = SGHMC, **changes: Any) -> BayesianTrainer:
    """Return a trainer of a model that mixes the packed documents of a row."""
    given = {"train": runs.token_rows((5, 7, 4, 9)), "subspace": "last_block", "minibatch": "shared", **changes}
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return runs.trainer(folder, method, model=bloom(torch.float32), collator=collator,
                        remove_unused_columns=False, **given)  # fmt: skip


def put_a_foreign_file(directory: Path) -> None:
    """Put a file into the output directory that a save would have to overwrite."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_text("of somebody else")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with an entry for each micro-batch of an update."""
    found: list[int] = []
    step = BayesianTrainer.training_step
    monkeypatch.setattr(BayesianTrainer, "training_step", lambda *a, **k: found.append(1) or step(*a, **k))
    return found


# -- a trainer's data: checks when it is made --------------------------------------------------------------------------

DATA = [
    ({"processing_class": grown_tokenizer()}, "token ids up to 320"),
    ({"train": [{"input_ids": [5, 6, 7]}] * 4}, "the data collator gives no labels"),
    ({"eval_dataset": None}, "fits by the rows of eval_dataset, got None"),
    ({"calibrate": True}, "calibrate=True fits a temperature .* there is no eval_dataset"),
]
"""Mistakes in the order of their checks; a method that fits by held-out rows has the third one without any."""


@pytest.mark.parametrize("first", range(len(DATA) - 1))
def test_of_several_mistakes_in_the_data_the_first_is_said(tmp_path: Path, first: int) -> None:
    later = {name: value for changes, _ in DATA[first:] for name, value in changes.items()}
    with pytest.raises(ValueError, match=DATA[first][1]):
        classifier(tmp_path, **later)


def test_a_temperature_without_held_out_rows_is_refused_at_once(tmp_path: Path) -> None:
    changes, message = DATA[-1]
    with pytest.raises(ValueError, match=message):
        classifier(tmp_path, SGHMC, **changes)


@pytest.mark.parametrize("method", [SGHMC, HELDOUT])
def test_held_out_labels_are_checked(tmp_path: Path, method: Any) -> None:
    with pytest.raises(ValueError, match=r"row 0 of eval_dataset has a label outside 0\.\.2"):
        classifier(tmp_path, method, eval_dataset=WRONG_LABEL, calibrate=False)


def test_a_trainer_without_training_rows_checks_its_tokenizer(tmp_path: Path) -> None:
    assert without_rows(tmp_path).rows is None
    with pytest.raises(ValueError, match="token ids up to 320"):
        BayesianTrainer(with_lora(tiny_llama()), SGHMC, runs.arguments(tmp_path), processing_class=grown_tokenizer())


# -- checks at the start of a run --------------------------------------------------------------------------------------


def test_a_trainer_without_training_rows_cannot_train(tmp_path: Path) -> None:
    trainer = without_rows(tmp_path)
    put_a_foreign_file(tmp_path)  # a later refusal
    with pytest.raises(ValueError, match="training needs a train_dataset, got None"):
        trainer.train()


def test_a_detached_model_is_refused_before_anything_else(tmp_path: Path) -> None:
    trainer = without_rows(tmp_path)
    trainer.bayesian.detach()
    with pytest.raises(ValueError, match="was detached"):
        trainer.train()


def test_files_of_another_are_refused_before_the_first_rows(tmp_path: Path, begun: list[int]) -> None:
    trainer = regressor(tmp_path / "out")
    put_a_foreign_file(tmp_path / "out")  # after the trainer has checked its directory
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        trainer.train()
    assert not begun
    assert (tmp_path / "out" / "model.safetensors").read_text() == "of somebody else"


def test_a_likelihood_that_fails_is_refused_before_a_checkpoint(tmp_path: Path, begun: list[int]) -> None:
    with pytest.raises(ValueError, match=r"one_sum\.log_prob must return one number for each likelihood term"):
        regressor(tmp_path).train(resume_from_checkpoint=True)
    assert not begun


@pytest.mark.parametrize("part", ["run", "monitor", "adamw_learning_rate", "posterior"])
def test_a_part_of_a_run_that_has_not_begun_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        getattr(runs.trainer(tmp_path, SGHMC), part)


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(FileNotFoundError, match="checkpoint-77"):
        run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-77"))


@pytest.mark.parametrize(("resume", "updates"), [(None, 6), (False, 6), ("checkpoint-2", 4), ("checkpoint-6", 0)])
def test_a_resumed_run_makes_the_updates_that_are_missing(
    directory: Path, begun: list[int], resume: Any, updates: int
) -> None:
    again = run(directory)
    again.train(resume_from_checkpoint=str(directory / resume) if resume else resume)
    assert len(begun) == updates
    assert again.state.global_step == 6


def test_true_takes_the_newest_checkpoint_that_is_complete(directory: Path, begun: list[int]) -> None:
    next((directory / "checkpoint-6").rglob("chain_*.safetensors")).unlink()
    run(directory).train(resume_from_checkpoint=True)
    assert len(begun) == 2  # from update 4


def test_a_given_checkpoint_that_is_damaged_is_not_replaced(directory: Path, begun: list[int]) -> None:
    next((directory / "checkpoint-6").rglob("chain_*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"checkpoint-6.*chain_00\d\.safetensors is missing"):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-6"))
    assert not begun


# -- the announcement --------------------------------------------------------------------------------------------------


def test_a_run_is_announced_only_after_its_checkpoint_is_checked(directory, caplog):
    caplog.set_level("INFO", logger="hf_bayes")
    other = run(directory, seed=1)
    with pytest.raises(ValueError, match="belongs to another run"):
        other.train(resume_from_checkpoint=True)
    assert "likelihood terms" not in caplog.text
    run(directory).train(resume_from_checkpoint=True)
    assert "likelihood terms" in caplog.text


def test_mixed_documents_are_refused_before_the_first_update(
    tmp_path: Path, begun: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hf_bayes")
    trainer = flattened(tmp_path)
    with pytest.raises(ValueError, match="lets packed documents see each other"):
        trainer.train()
    assert not begun
    assert trainer.active is None
    assert "likelihood terms" not in caplog.text  # a run that is refused is not announced


# -- the schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("cosine", {"nonsense": 1}, r"lr_scheduler_kwargs=.*nonsense.* do not fit"),
        ("polynomial", {"lr_end": -0.01}, "gives a learning rate of -.* at step 5: it must stay within 0 and"),
    ],
)
def test_a_refused_schedule_keeps_the_posterior_before_it(
    tmp_path: Path, begun: list[int], kind: str, settings: dict[str, Any], message: str
) -> None:
    trainer = runs.trainer(tmp_path, SGHMC)
    trainer.train()
    posterior, active, num_begun = trainer.posterior, trainer.active, len(begun)
    trainer.args.lr_scheduler_type, trainer.args.lr_scheduler_kwargs = kind, settings
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.posterior is posterior
    assert trainer.active is active
    assert len(begun) == num_begun


# -- the trial of learning rates ---------------------------------------------------------------------------------------


WRONG_SCHEDULE = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"nonsense": 1}}
BELOW_ZERO = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": -0.01}}


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (runs.trainer, WRONG_SCHEDULE, r"lr_scheduler_kwargs=.*nonsense.* do not fit"),
        (runs.trainer, BELOW_ZERO, r"gives -.* times the peak learning rate at step 200: it must stay within 0 and"),
        (flattened, {}, "lets packed documents see each other"),
    ],
)
def test_a_run_is_refused_before_its_trial_of_rates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Any,
    changes: dict[str, Any],
    message: str,
) -> None:
    def tried(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a trial of learning rates")

    monkeypatch.setattr(starting, "range_test", tried)
    caplog.set_level("INFO", logger="hf_bayes")
    trainer = make(tmp_path, MAPConfig(), learning_rate=None, max_steps=200, **changes)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert "likelihood terms" not in caplog.text


def test_a_schedule_that_exceeds_a_found_rate_is_refused(
    tmp_path: Path, begun: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hf_bayes")
    settings = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.9}}
    trainer = runs.trainer(tmp_path, MAPConfig(), learning_rate=None, **settings)
    with pytest.raises(ValueError, match="times the peak learning rate at step"):
        trainer.train()
    assert not begun
    assert "likelihood terms" not in caplog.text


def test_a_refused_run_leaves_checkpointing_and_the_run_before(directory: Path, tmp_path: Path) -> None:
    trainer = run(tmp_path / "other", seed=1)
    trainer.train()
    setattr(trainer.args, CHECKPOINTING, True)
    modules = checkpointing_modules(trainer.bayesian.core)
    with pytest.raises(ValueError, match="belongs to another run"):
        trainer.train(resume_from_checkpoint=str(directory / "checkpoint-6"))
    assert modules
    assert not any(map(is_checkpointing, modules))
    assert trainer.active.number == trainer.rows.run_number == 0
    trainer.train()
    assert all(map(is_checkpointing, modules))
    assert trainer.active.number == 1


@pytest.mark.parametrize("asked", [True, False])
def test_the_trial_of_rates_checkpoints_activations_too(tmp_path: Path, asked: bool) -> None:
    trainer = runs.trainer(tmp_path, MAPConfig(), learning_rate=None, max_steps=40, **{CHECKPOINTING: asked})
    block = trainer.bayesian.core.get_decoder().layers[-1]
    found: list[bool] = []  # of every forward pass with gradients
    block.register_forward_pre_hook(
        lambda module, _: found.append(is_checkpointing(module)) if torch.is_grad_enabled() else None
    )
    trainer.train()
    assert trainer.adamw_learning_rate is not None
    assert set(found) == {asked}


LATER = 9.0


@dataclass(frozen=True)
class Failing(OneSum):
    """A likelihood that fails at a label which the first rows do not have."""

    name: ClassVar[str] = "failing"

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if bool((labels == LATER).any()):
            raise ZeroDivisionError("in a likelihood")
        return -(labels - outputs[..., 0]).square()


def state_of(model: BayesianModel) -> dict[str, Any]:
    """Return what a run may change in a model: its values, flags, modes, hooks, and how it predicts."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "values": {name: value.tolist() for name, value in model.state_dict().items()},
        "flags": [(value.requires_grad, value.grad) for value in model.parameters()],
        "modules": [
            (module.training, "forward" in vars(module), *(list(getattr(module, name).values()) for name in hooks))
            for module in model.modules()
        ],
        "predicts": (model.likelihood, model.predictor, model.members_per_pass, model.calibrated),
        "shown": dict(vars(model.current_members)),
        "statistics": model.members.context.batch_statistics,
        "members": (model.members.context.num_members, model.members.context.tensors),
    }


def test_an_error_in_the_trial_of_rates_gives_the_model_back(tmp_path: Path, begun: list[int]) -> None:
    rows = [{**row, "label": 0.0 if number < 2 else LATER} for number, row in enumerate(runs.label_rows(20))]
    given = {"train": rows, "likelihood": Failing(), "learning_rate": None, "max_steps": 200}
    trainer = regressor(tmp_path, MAPConfig(), **given)
    before = state_of(trainer.bayesian)
    with pytest.raises(ZeroDivisionError, match="in a likelihood") as caught:
        trainer.train()
    assert any(entry.name == "range_test" for entry in caught.traceback)
    assert state_of(trainer.bayesian) == before
    assert not begun
