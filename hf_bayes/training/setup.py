"""A trainer's settings that do not change after it is made: the attached model, the method, the mesh and the start."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from peft import PeftConfig
from torch import Tensor

from hf_bayes.chains.starting_points import initial_members
from hf_bayes.core.config import MethodConfig
from hf_bayes.members.member_sums import DistributedMembers, LocalMembers
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.recommended import recommended
from hf_bayes.models.attaching import attach, needs_noise, refuse_frozen_adapter
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.inherited_prior import Inherited, inherit
from hf_bayes.models.loading.base_model import warn_of_resized_base
from hf_bayes.models.loading.checkpoint_weights import warn_of_frozen_head
from hf_bayes.models.prediction_state import PredictionState
from hf_bayes.models.preferences import BayesianModelForPreferences
from hf_bayes.models.refusals import refuse_other_likelihood
from hf_bayes.models.to_posterior import refuse_unsavable
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.posteriors.storage import check_writable
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.checks.arguments import refuse_arguments
from hf_bayes.training.checks.host_trainers import config_kept
from hf_bayes.training.checks.memory import require_memory
from hf_bayes.training.checks.rows import refuse_other_priors, refuse_other_weights, refuse_overwritten_prior
from hf_bayes.training.label_noise import require_rows_for_noise
from hf_bayes.training.prepared_model import prepared, unit_of
from hf_bayes.training.trainer_host import eval_sets, expected_updates, heldout_name
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry, Preferences
from hf_bayes.uncertainty.likelihoods import Likelihood


class Setup(NamedTuple):
    """The settings of a trainer.

    Attributes:
        model: the attached model.
        method: the method that the user gave, or the recommended one.
        subspace: the name or pattern of the random parameters, see ``hf_bayes.core.layout.select``.
        mesh: the processes, arranged by chains and data.
        inherited: the posterior that is the prior; None under the method's own prior.
        start: [d] the weights around which the chains of the first run start. A later run starts where the last ended.
        likelihood: the likelihood of the labels, before anything is fitted.
        learns_noise: True if the noise of a regression was not given, and held-out rows determine it.
    """

    model: BayesianModel
    method: MethodConfig
    subspace: str
    mesh: ChainMesh
    inherited: Inherited | None
    start: Tensor
    likelihood: Likelihood
    learns_noise: bool = False

    @property
    def member_group(self) -> LocalMembers:
        """The processes that hold the members of a prediction while chains run."""
        return DistributedMembers(self.mesh.chain_group) if self.mesh.chain_size > 1 else LocalMembers()


@contextmanager
def set_up(
    model: Any,
    method: MethodConfig | None,
    args: BayesianTrainingArguments,
    *,
    subspace: str,
    prior: Any,
    peft_config: PeftConfig | None,
    kwargs: dict[str, Any],
    likelihood: LikelihoodConfig | None = None,
) -> Iterator[Setup]:
    """Check the arguments of a trainer, and yield its settings. If the block raises, the model is given back as it was.

    Args:
        method: the method; None takes the recommended one (``recommended_method``).
        kwargs: the other arguments for the host trainer's ``__init__``. A model given by name adds its tokenizer.
        likelihood: the likelihood of the labels; None takes the one that belongs to the head's configuration.
    Raises:
        ValueError: for arguments, a model, a prior or a launch with which the method would not sample the posterior
            of this model.
    """
    rewards = isinstance(likelihood, BradleyTerry)
    if method is None:
        unit, data = unit_of(model, args, rewards=rewards), (kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        method, args.learning_rate = recommended_method(unit, args, *data, inherits=prior is not None)
    refuse_arguments(args, method, model, kwargs)
    check_writable(str(args.output_dir), overwrite=True)
    mesh = ChainMesh(method.num_chains, args.device, together=args.private_rows)
    with prepared(model, args, peft_config, kwargs, rewards=rewards) as ready, ExitStack() as stack:
        was_attached, noise = isinstance(ready, BayesianModel), args.noise_std
        learns_noise = noise is None and likelihood is None and not was_attached and needs_noise(ready)
        if was_attached:
            refuse_other_likelihood(likelihood, ready)
        else:
            if learns_noise:
                require_rows_for_noise(args, kwargs.get("eval_dataset"))
                noise = 1.0  # until the labels are known
            ready = attach(ready, subspace=subspace, noise_std=noise, likelihood=likelihood)
        stack.enter_context(given_back_on_error(ready, was_attached=was_attached))
        warn_of_resized_base(ready.model, ready.core)
        warn_of_frozen_head(ready.core, ready.layout)
        _refuse_trunk_memory(ready, args)
        ready.calibrated = False  # the temperature of a posterior that was loaded is not that of its chains
        bayesian = ready.linearise(None)  # a chain leaves the Gaussian that was loaded
        refuse_frozen_adapter(bayesian)
        # the files of the tokenizer are collected when the training begins
        refuse_unsavable(
            bayesian, method, subspace=subspace, tokenizer=kwargs.get("processing_class"), sidecars=Sidecars()
        )
        refuse_other_weights(bayesian, mesh)
        # every process has drawn a fresh adapter or head for itself: all take the first one's
        start = mesh.from_first(bayesian.theta.detach()[0].clone())
        inherited = None if prior is None else inherit(prior, bayesian, method, data_unit=args.data_unit)
        refuse_other_priors(None if inherited is None else inherited.posterior.fingerprint, mesh)
        refuse_overwritten_prior(inherited, str(args.output_dir))
        if inherited is not None:
            start = inherited.gaussian.mean.to(start)
        if isinstance(bayesian, BayesianModelForPreferences):
            bayesian.reference = start.clone()
        require_memory(start.numel(), len(mesh.chains), method, args.device, start.element_size())
        bayesian.place(initial_members(bayesian.layout, start, method, seed=args.seed, chains=mesh.chains))
        bayesian.members_per_pass = args.members_per_pass
        with config_kept(bayesian.core.config):
            yield Setup(bayesian, method, subspace, mesh, inherited, start, bayesian.likelihood, learns_noise)


def recommended_method(
    unit: str, args: Any, train_dataset: Any, eval_dataset: Any, *, inherits: bool
) -> tuple[MethodConfig, float | None]:
    """Return the method of a run for which none was given, and the learning rate of this run; log which method.

    Without a method, a learning rate in ``args`` is the rate of AdamW, as in plain fine-tuning. A sampler takes it for
    its warm start, and the run then has no other rate.

    Args:
        unit: the unit of a likelihood term (``Task.unit``).
        args: the training arguments of the user, not checked yet.
        train_dataset, eval_dataset: the data sets of the user, not checked yet.
        inherits: True if the prior is another posterior.
    Returns:
        The method, and the learning rate (None: the method finds its own).
    """
    name = heldout_name(eval_dataset)
    rows = None if name is None else eval_sets(eval_dataset)[name]
    count = len(rows) if isinstance(rows, Sized) else None
    found, words = recommended(
        count,
        num_updates=expected_updates(args, train_dataset),
        unit=unit,
        num_processes=getattr(args, "world_size", 1),
        inherits=inherits,
        packs=getattr(args, "packing", False),
    )
    rate = args.learning_rate
    if rate is not None and found.requirements.learning_rate == "whitening":
        found = replace(found, warm_start_learning_rate=rate)
        words, rate = f"{words}; learning_rate={rate:g} is that of its warm start by AdamW", None
    if getattr(args, "process_index", 0) == 0:
        logging.getLogger("hf_bayes.training.trainer").warning(words)
    return found, rate


def _refuse_trunk_memory(model: BayesianModel, args: BayesianTrainingArguments) -> None:
    """Refuse a memory of the trunk's outputs for rows of two texts: it holds one output for a row."""
    if args.trunk_memory_gib and isinstance(model.likelihood, Preferences):
        raise ValueError(
            f"trunk_memory_gib={args.trunk_memory_gib} is refused with preferences: the memory holds one text for a "
            "row, and their rows have two. Leave it out"
        )


@contextmanager
def given_back_on_error(model: BayesianModel, *, was_attached: bool = True) -> Iterator[None]:
    """If the block raises, give a model back as it was.

    Args:
        was_attached: True if the model had members before: it gets them back, with its way of prediction, its modes
            and its activation checkpointing. False: the model inside is detached.
    """
    before, modes = PredictionState(model), [(module, module.training) for module in model.modules()]
    switch_back = model.members.checkpointing.record()
    try:
        yield
    except BaseException:
        if was_attached:
            before.restore()
            switch_back()
            for module, mode in modes:
                module.training = mode
        else:
            model.detach()
        raise
