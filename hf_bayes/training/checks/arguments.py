"""Refuse arguments of a trainer that would silently change the target distribution, before anything runs."""

from __future__ import annotations

import os
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, SchedulerType, TrainingArguments
from transformers.trainer_utils import HubStrategy

from hf_bayes.core.config import MethodConfig, check_config, check_schedules
from hf_bayes.methods.registry import names_with
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.refusals import compiling_blocks
from hf_bayes.posteriors.hub import is_place
from hf_bayes.training.arguments import PRECISIONS, BayesianTrainingArguments
from hf_bayes.training.checks.host_trainers import OTHER_LOSS, has_config, host_config, refuse_loss_settings
from hf_bayes.training.checks.rows import require_names_of_sets, require_training_rows

_OF_AN_OPTIMIZER = ("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")

REFUSED = frozenset(_OF_AN_OPTIMIZER) | {
    "weight_decay", "max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha", "bf16_full_eval", "fp16",
    "fp16_full_eval", "torch_compile", "torch_compile_backend", "torch_compile_mode", "deepspeed", "fsdp",
    "fsdp_config", "parallelism_config", "auto_find_batch_size", "ignore_data_skip", "save_only_model",
    "load_best_model_at_end", "train_sampling_strategy", "hub_strategy", "use_liger_kernel", "liger_kernel_config",
}  # fmt: skip
"""The arguments of a trainer that must stay at their defaults. Lists of arguments leave them out."""

_OWN_OPTIMIZER = "the method is the optimizer. Leave it out, and set the fields of the method's config"
_REFUSED_OBJECTS = {
    "optimizers": _OWN_OPTIMIZER,
    "optimizer_cls_and_kwargs": _OWN_OPTIMIZER,
    "compute_loss_func": f"the chains use the log-likelihood of the labels. Leave it out. {OTHER_LOSS}",
} | {
    name: f"it is a training argument. Set args=BayesianTrainingArguments({name}=...)"
    for name in sorted(BayesianTrainingArguments.__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__)
}
"""Further arguments of a trainer -> why they are refused, and what to do."""


def refuse_types(trainer: type, model: Any, args: Any, kwargs: dict[str, Any]) -> BayesianTrainingArguments:
    """Refuse a model and arguments of other types, before anything is read from them.

    The random weights belong to one model from the start, so a function that makes a model is refused, too.

    Args:
        trainer: the class that is being made.
        kwargs: the other arguments for the host trainer's ``__init__``.
    Returns:
        ``args``, which are of the right type.
    Raises:
        ValueError: naming the type that is expected.
    """
    if kwargs.get("model_init") is not None:
        raise ValueError(
            "model_init is refused: the chains are attached to one model when the trainer is made. Give model=, the "
            "result of this function; to compare methods and settings, call hf_bayes.tune"
        )
    if model is None:
        raise ValueError("model is missing, expected a transformers or peft model: give it as model=")
    _refuse_other_arguments(type(args), host_config(trainer))
    named = is_place(model) and hasattr(args, "model_init_kwargs")  # TRL's trainers load it
    if not named and not isinstance(model, (PreTrainedModel, PeftModel, BayesianModel)):
        got = f"the name {os.fspath(model)!r}: load it (from_pretrained)" if is_place(model) else type(model).__name__
        raise ValueError(f"model must be a transformers or peft model, got {got}")
    checked: BayesianTrainingArguments = args
    return checked


def _refuse_other_arguments(kind: type, config: str | None) -> None:
    """Raise if arguments are not ours, lack the fields of a host's config, or take their defaults from it.

    Args:
        kind: the class of the arguments.
        config: the name of the host's config; None if the host has none.
    """
    if kind is type(None) and config is None:
        raise ValueError(
            "args is missing, expected BayesianTrainingArguments: give it by name, as args=. The second argument by "
            "position is the method"
        )
    if not issubclass(kind, BayesianTrainingArguments) or not has_config(kind, config):
        foreign = issubclass(kind, TrainingArguments) and kind.__module__.partition(".")[0] != "transformers"
        config = config or (kind.__name__ if foreign else None)
        if config is None:
            raise ValueError(
                f"args must be BayesianTrainingArguments, got {kind.__name__}: put BayesianTrainingArguments in its "
                "place. It takes the same arguments, and has other defaults"
            )
        raise ValueError(
            f"args must be both BayesianTrainingArguments and {config}, got {kind.__name__}: define class "
            f"Args(BayesianTrainingArguments, {config}): ..., and give args=Args(...). It takes the arguments of "
            f"{config}, and has other defaults"
        )
    for other in kind.__mro__[: kind.__mro__.index(BayesianTrainingArguments)]:
        if issubclass(other, TrainingArguments) and not issubclass(other, BayesianTrainingArguments):
            raise ValueError(
                f"{other.__name__} comes before BayesianTrainingArguments in the bases of {kind.__name__}, so the "
                "learning rate, the schedule and the clipping of its defaults would count as given. Swap them: "
                f"class {kind.__name__}(BayesianTrainingArguments, {other.__name__}): ..."
            )


def refuse_arguments(args: BayesianTrainingArguments, method: MethodConfig, model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse settings that would silently change the target distribution, or that this trainer does not support.

    Raises:
        ValueError: naming the argument and the value to set instead.
    """
    check_config(method)
    refuse_loss_settings(args)
    _refuse_devices(args, model)
    _refuse_optimizer_settings(args, method)
    _refuse_other_losses(args)
    _refuse_broken_runs(args)
    if args.private_rows and not method.requirements.allows_private_rows:
        able = names_with(lambda needs: needs.allows_private_rows)
        raise ValueError(
            f"{method.name} does not take private_rows: its gradients are of rows that all processes share. Use a "
            f"method that does ({able}), or give every process all rows"
        )
    if kwargs.get("train_dataset") is not None:
        require_training_rows(kwargs["train_dataset"], args, method)
    require_names_of_sets(kwargs.get("eval_dataset"))
    for name, advice in _REFUSED_OBJECTS.items():
        if kwargs.get(name) not in (None, (None, None)):
            raise ValueError(f"{name} is refused: {advice}")


def _refuse_devices(args: Any, model: Any) -> None:
    """Refuse devices without float64, and settings that wrap, shard or compile the model as a whole."""
    if args.device.type == "mps":
        raise ValueError(
            "an Apple GPU (mps) has no float64, in which chains sum log-likelihoods: set use_cpu=True, or train on CUDA"
        )
    if args.n_gpu > 1:
        raise ValueError(
            "nn.DataParallel is refused: it would average chains. Use accelerate launch, or CUDA_VISIBLE_DEVICES=0"
        )
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "DeepSpeed and FSDP shard the parameters that are sampled and are not supported: leave them off"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile=True is refused: a model with a member axis cannot be compiled as a whole. Leave it out, or "
            f"compile its blocks in place before training: {_compiling(model)}"
        )
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel=True is refused: its kernels replace layers of the model, and have no member axis. Leave "
            "it out"
        )


def _compiling(model: Any) -> str:
    if isinstance(model, BayesianModel):
        return compiling_blocks(model.core, "model.core")
    if isinstance(model, PeftModel):
        return compiling_blocks(model.get_base_model(), "model.get_base_model()")
    if isinstance(model, PreTrainedModel):
        return compiling_blocks(model, "model")
    return "load the model, and call compile() of each block"


def _refuse_optimizer_settings(args: Any, method: MethodConfig) -> None:
    """Refuse settings of an optimizer that change the steps of the chains."""
    if args.max_grad_norm:
        raise ValueError(
            f"{method.name} needs max_grad_norm=0 (got {args.max_grad_norm}): clipped gradients change the stationary "
            "distribution. Set max_grad_norm=0"
        )
    if args.weight_decay:
        raise ValueError(
            f"{method.name} needs weight_decay=0 (got {args.weight_decay}): the prior is part of the method and would "
            "be counted twice. Set prior_std in the method's config (weight decay w on the mean loss is "
            "prior_std = 1/sqrt(N w))"
        )
    kind = SchedulerType(args.lr_scheduler_type)
    check_schedules(method, None if kind is SchedulerType.CONSTANT else f"lr_scheduler_type={kind.value!r}")
    if kind is SchedulerType.CONSTANT:
        _refuse_settings_of_a_schedule(args, method)
    ignored = [name for name in _OF_AN_OPTIMIZER if getattr(args, name) != _default(args, name)]
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)} of the arguments would be ignored: {method.name} is the optimizer. Leave them out, "
            "and set the fields of the method's config"
        )
    if kind is SchedulerType.REDUCE_ON_PLATEAU:
        raise ValueError(
            "lr_scheduler_type='reduce_lr_on_plateau' is refused: the steps of the chains would follow held-out rows, "
            "which a posterior must not have seen. Take a schedule of the step number, such as 'cosine'"
        )


def _refuse_settings_of_a_schedule(args: Any, method: MethodConfig) -> None:
    """Refuse settings of a schedule beside a constant rate, or beside the method's own schedule: both ignore them."""
    constant = method.schedule is None
    own = f"{method.name} has a schedule of its own. Leave it out"
    if args.warmup_steps:
        reason = "lr_scheduler_type='constant' has none. Set 'constant_with_warmup' or 'linear', or leave it out"
        raise ValueError(f"warmup_steps={args.warmup_steps:g} would be ignored: {reason if constant else own}")
    if args.lr_scheduler_kwargs:
        reason = "lr_scheduler_type='constant' takes none. Set the lr_scheduler_type that they belong to"
        reason = reason if constant else own
        raise ValueError(f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} would be ignored: {reason}")


def _refuse_other_losses(args: Any) -> None:
    """Refuse settings with which the loss is not a log-likelihood, or the weights are rounded."""
    if args.bf16_full_eval or args.fp16_full_eval:
        raise ValueError(
            "bf16_full_eval and fp16_full_eval are refused: an evaluation outside of training would round the model's "
            "weights for good, and a later run would sample the posterior of another model. Set bf16=True, which "
            "evaluates in bf16 and leaves them as they are"
        )
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor must be 0: a smoothed loss is no log-likelihood")
    if args.neftune_noise_alpha:
        raise ValueError(
            "neftune_noise_alpha must be unset: noise on embeddings changes the likelihood that is sampled"
        )


def _refuse_broken_runs(args: Any) -> None:
    """Refuse settings with which a resumed run would differ, or the result would not be all draws."""
    if args.ignore_data_skip:
        raise ValueError(
            "ignore_data_skip is refused: a resumed run would begin its epoch again, and be another run. Leave it out"
        )
    if args.save_only_model:
        raise ValueError(
            "save_only_model is refused: a checkpoint without the chains' states cannot be resumed. Leave it out, or "
            "set save_strategy='no': the posterior is saved at the end in any case"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end is refused: a posterior is all of its draws, not the best checkpoint of a run. "
            "Leave it out. If the held-out NLL rises again, take fewer updates, or let hf_bayes.tune compare runs by it"
        )
    if args.train_sampling_strategy != "random":
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} is refused, expected 'random': each chain takes "
            "the rows in permutations of its own. Leave it out"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size is refused: rows per update are part of the chain. Set per_device_train_batch_size"
        )
    refuse_early_push(args)


def refuse_early_push(args: Any) -> None:
    """Refuse an upload before the end of a run."""
    strategy = HubStrategy(args.hub_strategy)
    if args.push_to_hub and strategy is not HubStrategy.END:
        raise ValueError(f"hub_strategy={strategy.value!r} would push unfinished posteriors: use hub_strategy='end'")


def _default(args: BayesianTrainingArguments, name: str) -> Any:
    return type(args).__dataclass_fields__[name].default


def refuse_accelerator(accelerator: Any) -> None:
    """Refuse an accelerator that shards or scales, set by flags, a config file, the environment or the model."""
    if accelerator.mixed_precision not in PRECISIONS:
        raise ValueError(
            f"mixed precision {accelerator.mixed_precision} is refused, expected one of {', '.join(PRECISIONS)}: loss "
            "scaling skips updates of the chain. Launch with --mixed_precision bf16 or no"
        )
    state, parallel = accelerator.state, accelerator.parallelism_config
    found = [name for name in ("deepspeed_plugin", "fsdp_plugin") if getattr(state, name, None) is not None]
    found += [] if parallel is None else [f"parallelism config {parallel}"]
    if found:
        raise ValueError(
            f"{', '.join(found)}: bases sharded over devices are not supported, every process needs the whole base. "
            "Load it without tp_plan and launch without FSDP and DeepSpeed; quantise a base that does not fit"
        )
    if not accelerator.even_batches and accelerator.num_processes > 1:
        raise ValueError(
            "even_batches=False is refused on several processes, expected True: they evaluate each batch together, and "
            "rows that fill a last one are left out of the metrics. Leave it out of accelerator_config"
        )
