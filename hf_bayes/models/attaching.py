"""Give a live transformers model a member axis."""

from __future__ import annotations

from peft import PeftModel
from torch import Tensor, nn

from hf_bayes.core.layout import initial, select
from hf_bayes.members.stacked import refuse_attached
from hf_bayes.models.audio_classification import BayesianModelForAudioClassification
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import (
    BayesianClassifier,
    BayesianModelForSequenceClassification,
    problem_of,
    refuse_noise_std,
)
from hf_bayes.models.image_classification import BayesianModelForImageClassification
from hf_bayes.models.image_text import BayesianModelForImageTextToText
from hf_bayes.models.loading.base_model import core_of, refuse_foreign
from hf_bayes.models.loading.recognition import task_of
from hf_bayes.models.preferences import BayesianModelForPreferences
from hf_bayes.models.refusals import refuse_likelihood
from hf_bayes.models.token_classification import BayesianModelForTokenClassification
from hf_bayes.posteriors.posterior import require_members
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences

MODELS: dict[str, type[BayesianModel]] = {
    kind.task: kind
    for kind in (
        BayesianModelForCausalLM,
        BayesianModelForSequenceClassification,
        BayesianModelForTokenClassification,
        BayesianModelForImageClassification,
        BayesianModelForAudioClassification,
        BayesianModelForImageTextToText,
    )
}
"""Name of a task -> the class of its Bayesian models."""


def attach(
    model: nn.Module,
    theta: Tensor | None = None,
    *,
    subspace: str = "trainable",
    num_members: int = 1,
    trunk: bool = True,
    noise_std: float | None = None,
    likelihood: LikelihoodConfig | None = None,
) -> BayesianModel:
    """Give a transformers or peft model a member axis, in place. Undo with ``.detach()`` or use as a context manager.

    Args:
        model: a model of one of the tasks in ``posteriors.tasks``; only its forwards and hooks are changed.
        theta: [M, d] members; None means ``num_members`` copies of the model's own values.
        subspace: which parameters are random (see ``layout.select``). A model without a frozen parameter needs "all",
            even if ``theta`` is given.
        num_members: M, if theta is not given.
        trunk: True to run the layers before the first random one once for all members.
        noise_std: standard deviation of a regression's noise; other heads refuse it.
        likelihood: the likelihood of the labels, such as ``Heteroscedastic()``; None takes the one that transformers
            reads from the head's configuration.
    Returns:
        The Bayesian model of the task. Its ``theta`` is the parameter [M, d]; its forward returns the log-probabilities
        of the mixture and uncertainties in nats.
    Raises:
        ValueError: for a model of another task, a theta of another shape, or a module that cannot be stacked, naming
            it. The model is then unchanged.
    """
    refuse_attached(model)
    core = core_of(model)
    refuse_foreign(model, core)
    kind = MODELS[task_of(core).name]
    layout = select(model, subspace)
    if theta is None:
        require_members(num_members)
        theta = initial(model, layout).expand(num_members, -1).clone()
    if isinstance(likelihood, DirectPreferences) and kind is BayesianModelForCausalLM:
        refuse_noise_std(noise_std, "a language model")
        return BayesianModelForPreferences(model, layout, theta, config=likelihood, trunk=trunk)
    if issubclass(kind, BayesianClassifier):
        return kind(model, layout, theta, trunk=trunk, noise_std=noise_std, likelihood=likelihood)
    refuse_noise_std(noise_std, "a language model")
    refuse_likelihood(likelihood, "a language model")
    return kind(model, layout, theta, trunk=trunk)


def needs_noise(model: nn.Module) -> bool:
    """Return True if a plain model has the head of a regression, whose likelihood needs ``noise_std``.

    Raises:
        ValueError: as ``attach``, for a model that it cannot take.
    """
    refuse_attached(model)
    core = core_of(model)
    refuse_foreign(model, core)
    return task_of(core).unit == "example" and problem_of(core.config) == "regression"


def refuse_frozen_adapter(model: BayesianModel) -> None:
    """Raise if a frozen tensor of the adapter would be lost, since only random tensors are saved."""
    if not isinstance(model.model, PeftModel):
        return
    name = model.model.active_adapter
    own = [n for n, _ in model.model.named_parameters() if ".lora_" in n or ".modules_to_save." in n]
    frozen = [n for n in own if f".{name}." in f"{n}." and n not in model.layout.names]
    if frozen:
        raise ValueError(
            f"{len(frozen)} tensors of the adapter are not random, first {frozen[0]}: their values would not be saved "
            "with the posterior. Sample the whole adapter (subspace='trainable'), or merge it first (merge_and_unload)"
        )
