"""A user's likelihood through BayesianTrainer: training, saving, loading, and what is refused before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, default_data_collator
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes.fit.distil import distil
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.uncertainty.custom.base import CustomLikelihood, LikelihoodConfig, Moments
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs


class LSTMConfig(PretrainedConfig):
    """The numbers of inputs and hidden units of an LSTM."""

    model_type = "lstm_regression"

    def __init__(self, num_inputs: int = 4, hidden: int = 8, **options: Any) -> None:
        self.num_inputs, self.hidden = num_inputs, hidden
        super().__init__(**options)


class LSTMForSequenceClassification(PreTrainedModel):
    """An LSTM on numbers [B, T, n], with an MLP on its last state: a plain torch model in transformers' clothes."""

    config_class = LSTMConfig
    main_input_name = "input_values"

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(config.num_inputs, config.hidden, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(config.hidden, config.hidden), nn.Tanh(), nn.Linear(config.hidden, config.num_labels)
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial weights of torch."""

    def forward(self, input_values: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return outputs [B, C]."""
        return SequenceClassifierOutput(logits=self.head(self.lstm(input_values)[0][:, -1]))


def lstm(num_outputs: int) -> LSTMForSequenceClassification:
    torch.manual_seed(0)
    model = LSTMForSequenceClassification(LSTMConfig(num_labels=num_outputs))
    model.lstm.requires_grad_(False)
    return model


def rows(count: int = 24, *, size: int = 1, kind: str = "numbers", **columns: Any) -> Dataset:
    rng = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, 4, generator=rng)
    labels = inputs[:, -1, :size] + 0.3 * torch.randn(count, size, generator=rng)
    labels = labels[:, 0] if size == 1 else labels
    if kind == "counts":
        labels = labels.exp().round()
    if kind == "classes":
        labels = torch.bucketize(labels, torch.tensor([-1.0, 0.0, 1.0]))
    return Dataset.from_dict({"input_values": inputs.tolist(), "labels": labels.tolist()} | columns)


@dataclass(frozen=True)
class Squared(CustomLikelihood):
    """Normal noise of standard deviation 1, with nothing but the two functions that are needed."""

    name: ClassVar[str] = "squared"

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -0.5 * (labels - outputs[..., 0]).square()

    def predict(self, outputs: Tensor) -> Moments:
        return Moments(outputs, torch.ones_like(outputs))


def trainer(
    folder: Path,
    likelihood: LikelihoodConfig | None,
    num_outputs: int,
    data: Dataset,
    method: Any = None,
    **options: Any,
) -> BayesianTrainer:
    return BayesianTrainer(
        lstm(num_outputs),
        method or SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=1.0),
        runs.arguments(folder, **({"per_device_train_batch_size": 8} | options)),
        train_dataset=data,
        eval_dataset=data,
        data_collator=default_data_collator,
        likelihood=likelihood,
    )


CASES: dict[str, tuple[LikelihoodConfig, int, dict[str, Any]]] = {
    "mixture": (MixtureDensity(num_components=2, num_numbers=2), 10, {"size": 2}),
    "heteroscedastic": (Heteroscedastic(), 2, {}),
    "ordinal": (Ordinal(num_classes=4), 3, {"kind": "classes"}),
    "poisson": (Poisson(), 1, {"kind": "counts"}),
    "weighted": (Weighted(Heteroscedastic()), 2, {"weight": [0.5, 1.5] * 12}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_likelihood_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    likelihood, num_outputs, kind = CASES[name]
    data = rows(**kind)
    run = trainer(tmp_path, likelihood, num_outputs, data)
    run.train()
    assert run.rows.num_data == 24
    nll = run.evaluate()["eval_nll"]
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForSequenceClassification.from_pretrained(
        tmp_path / "posterior", base_model=lstm(num_outputs)
    )
    inputs = {"input_values": torch.tensor(data["input_values"])}
    assert loaded.likelihood == run.bayesian.likelihood
    assert torch.equal(loaded(**inputs).logits, run.bayesian(**inputs).logits)
    assert run.posterior.config.head["likelihood"] == likelihood.to_dict()
    assert run.posterior.config.metrics["nll"] == nll


@pytest.mark.parametrize("num_samples", [None, 1])
def test_laplace_predicts_by_drawn_outputs(tmp_path: Path, num_samples: int | None) -> None:
    method = LaplaceConfig(prior_std=1.0, num_samples=num_samples)
    run = trainer(tmp_path, Heteroscedastic(), 2, rows(), method)
    run.train()
    assert run.posterior.config.prediction == "linearised"
    assert run.evaluate()["eval_epistemic_std"] > 0


def test_weights_are_as_good_as_copies(tmp_path: Path) -> None:
    data = rows(8)
    counts = [3, 1, 0, 2, 1, 1, 3, 1]
    copies = data.select([row for row, count in enumerate(counts) for _ in range(count)])
    weighted = data.add_column("weight", [float(count) for count in counts])
    found = []
    for folder, likelihood, given in (("w", Weighted(Heteroscedastic()), weighted), ("c", Heteroscedastic(), copies)):
        run = trainer(tmp_path / folder, likelihood, 2, given, MAPConfig(prior_std=1.0), num_train_epochs=1)
        active = runs.started(run)
        batches = list(run.rows.by_number(range(len(given))))  # type: ignore[union-attr]
        parts = [
            active.objective.model.log_lik(run.bayesian.theta, batch, folded=False).loss.sum() for batch in batches
        ]
        found.append(sum(parts))
    # float32 sums in another order
    assert torch.allclose(*found, rtol=1e-5)  # type: ignore[arg-type]


def test_a_collapsed_component_stops_the_run_and_is_named(tmp_path: Path) -> None:
    data = rows().map(lambda row: {"labels": 0.0})  # all labels are equal: a component narrows around them
    run = trainer(tmp_path, MixtureDensity(2, min_std=0.05), 6, data, MAPConfig(prior_std=30.0), max_steps=400,
                  learning_rate=0.05)  # fmt: skip
    with pytest.raises(FloatingPointError, match=r"step \d+.*MixtureDensity.min_std"):
        run.train()


def test_two_functions_are_enough_for_a_whitened_sampler(tmp_path: Path) -> None:
    run = trainer(tmp_path, Squared(), 1, rows(), learning_rate=None, max_steps=60)
    run.train()
    assert run.posterior.approximation.num_stored == 4


# -- refused before the first step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean(CustomLikelihood):
    """A likelihood whose terms depend on the whole batch."""

    name: ClassVar[str] = "mean"

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        terms = -0.5 * (labels - outputs[..., 0]).square()
        return terms.mean(-1, keepdim=True).expand_as(terms)

    def predict(self, outputs: Tensor) -> Moments:
        return Moments(outputs, torch.ones_like(outputs))


def test_terms_that_do_not_add_up_to_n_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, Mean(), 1, rows())
    with pytest.raises(ValueError, match="do not add up to the N of the data"):
        run.train()


def test_a_likelihood_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unknown(CustomLikelihood):
        name: ClassVar[str] = "unknown_noise"

        def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return -0.5 * (labels - outputs[..., 0]).square()

        def predict(self, outputs: Tensor) -> Moments:
            return Moments(outputs, torch.ones_like(outputs))

    run = trainer(tmp_path, Unknown(), 1, rows())
    run.train()
    run.save_model(str(tmp_path / "posterior"))
    load = BayesianModelForSequenceClassification.from_pretrained
    with pytest.raises(ValueError, match="'unknown_noise' is not registered"):
        load(tmp_path / "posterior", base_model=lstm(1))
    assert load(tmp_path / "posterior", base_model=lstm(1), likelihood=Unknown()).likelihood.name == "unknown_noise"


def test_laplace_names_what_a_likelihood_lacks(tmp_path: Path) -> None:
    run = trainer(tmp_path, MixtureDensity(2), 6, rows(), LaplaceConfig(prior_std=1.0, num_samples=None))
    with pytest.raises(ValueError, match=r"needs the likelihood's fisher.*num_samples=1 draws labels"):
        run.train()


@pytest.mark.parametrize(
    ("likelihood", "data", "words"),
    [
        (MixtureDensity(3), rows(), "needs 9 outputs, and the head has 6: set num_labels=9"),
        (Poisson(num_counts=6), rows(kind="counts"), r"poisson likelihood expects \[8, 6\]"),
        (Weighted(), rows(kind="classes"), "column 'weight'"),
        (Weighted(), rows(kind="classes", weight=[-1.0] * 24), "finite weight >= 0"),
        ("heteroscedastic", rows(), "likelihood must be a CustomLikelihood"),
    ],
)
def test_a_likelihood_that_does_not_fit_is_refused(tmp_path: Path, likelihood: Any, data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, likelihood, 6, data).train()


def test_noise_std_belongs_to_the_normal_likelihood(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"noise_std=0\.5 is the standard deviation"):
        trainer(tmp_path, Heteroscedastic(), 2, rows(), noise_std=0.5)


def test_a_student_knows_heads_only(tmp_path: Path) -> None:
    run = trainer(tmp_path, Ordinal(num_classes=4), 3, rows(kind="classes"))
    run.train()
    with pytest.raises(ValueError, match="a student learns the classes of a head, and the likelihood here is ordinal"):
        distil(run.posterior, list(rows(220, kind="classes")), base_model=lstm(3))


def test_another_setting_of_a_likelihood_does_not_resume(tmp_path: Path) -> None:
    trainer(tmp_path, Heteroscedastic(), 2, rows(), save_strategy="steps", save_steps=3).train()
    other = trainer(tmp_path, Heteroscedastic(min_std=0.1), 2, rows(), save_strategy="steps", save_steps=3)
    with pytest.raises(ValueError, match="likelihood"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    same = trainer(tmp_path, Heteroscedastic(), 2, rows(), save_strategy="steps", save_steps=3)
    same.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
