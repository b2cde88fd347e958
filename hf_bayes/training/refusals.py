"""What a trainer refuses before it touches anything: settings that would quietly change the law being sampled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, SchedulerType

from hf_bayes.core.config import MethodConfig
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.methods.registry import METHODS
from hf_bayes.models import base_model
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_rows import is_stream, require_dataset
from hf_bayes.training.arguments import PRECISIONS, BayesianTrainingArguments
from hf_bayes.training.host_trainers import refuse_loss_settings

_OF_AN_OPTIMIZER = ("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")


def refuse_arguments(args: Any, method: Any, model: Any, kwargs: dict[str, Any]) -> None:
    """Everything that would quietly change the law being sampled, or that this trainer cannot honour."""
    if not isinstance(args, BayesianTrainingArguments):
        raise ValueError(
            f"args must be BayesianTrainingArguments, got {type(args).__name__}: its defaults suit samplers"
        )
    if not isinstance(method, MethodConfig):
        raise ValueError(f"method must be a config such as SGHMCConfig(...), got {type(method).__name__}")
    named = isinstance(model, str | os.PathLike) and hasattr(args, "model_init_kwargs")  # TRL's trainers load it
    if not named and not isinstance(model, (PreTrainedModel, PeftModel, BayesianModel)):
        raise ValueError(f"model must be a transformers or peft model, got {type(model).__name__}")
    refuse_loss_settings(args)
    if args.device.type == "mps":
        raise ValueError(
            "an Apple GPU (mps) has no float64, in which chains sum log-likelihoods: set use_cpu=True, or train on CUDA"
        )
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
    if method.schedule is not None and args.lr_scheduler_type != "constant":
        raise ValueError(
            f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r} and {method.name}'s own "
            f"schedule={method.schedule.name!r} are two schedules: leave one of them out"
        )
    ignored = [name for name in _OF_AN_OPTIMIZER if getattr(args, name) != _default(args, name)]
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)} of the arguments would be ignored: {method.name} is the optimizer. Leave them out, "
            "and set the fields of the method's config"
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
            "torch_compile=True is refused: a model with a member axis cannot be compiled as a whole. Compile its "
            "layers in place before training: for layer in model.model.layers: layer.compile() (of a peft model: "
            "model.get_base_model().model.layers)"
        )
    if SchedulerType(args.lr_scheduler_type) is SchedulerType.REDUCE_ON_PLATEAU:
        raise ValueError(
            "lr_scheduler_type='reduce_lr_on_plateau' is refused: the steps of the chains would follow held-out rows, "
            "which a posterior must not have seen. Take a schedule of the step number, such as 'cosine'"
        )
    if args.bf16_full_eval or args.fp16_full_eval:
        raise ValueError(
            "bf16_full_eval and fp16_full_eval are refused: an evaluation outside of training would round the model's "
            "weights for good, and a later run would sample the posterior of another model. Set bf16=True, which "
            "evaluates in bf16 and leaves them as they are"
        )
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
            "load_best_model_at_end is refused: a posterior is all of its draws, not the best checkpoint of a run"
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
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError(f"hub_strategy={args.hub_strategy!r} would push unfinished posteriors: use hub_strategy='end'")
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor must be 0: a smoothed loss is no log-likelihood")
    if args.neftune_noise_alpha:
        raise ValueError(
            "neftune_noise_alpha must be unset: noise on embeddings changes the likelihood that is sampled"
        )
    if args.private_rows and not method.requirements.allows_private_rows:
        able = [name for name, kind in METHODS.items() if kind().requirements.allows_private_rows]
        raise ValueError(
            f"{method.name} does not take private_rows: its gradients are of rows that all processes share. Use a "
            f"method that does ({', '.join(able)}), or give every process all rows"
        )
    if kwargs.get("train_dataset") is not None:
        require_rows(kwargs["train_dataset"], args, method)
    for name in ("optimizers", "optimizer_cls_and_kwargs", "model_init", "compute_loss_func"):
        if kwargs.get(name) not in (None, (None, None)):
            raise ValueError(f"{name} is refused: the method is the optimizer, and the likelihood is the model's own")


def refuse_accelerator(accelerator: Any) -> None:
    """What the accelerator came to, whoever asked for it: flags, a config file, the environment or the base model."""
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


def _default(args: BayesianTrainingArguments, name: str) -> Any:
    return type(args).__dataclass_fields__[name].default


def require_rows(dataset: Any, args: BayesianTrainingArguments, method: MethodConfig) -> None:
    """Chains draw permutations of rows that can be counted and asked for by number; a stream serves all of them."""
    require_dataset(dataset, "train_dataset")
    if is_stream(dataset):
        needs = method.requirements
        wrong = [
            words
            for missing, words in (
                (args.num_data is None, "pass num_data=: cannot infer N"),
                (args.max_steps <= 0, "set max_steps: it has no epochs"),
                (args.minibatch != "shared", "set minibatch='shared': it has no rows for every chain to permute"),
                (needs.all_data_in_every_update, f"{method.name} needs all rows in every move: materialise it"),
                (needs.one_more_pass, f"{method.name} passes over all rows once more at the end: materialise it"),
                (needs.batch_order != "epochs", f"{method.name} draws rows anew for every move: materialise it"),
            )
            if missing
        ]
        if wrong:
            raise ValueError(f"train_dataset ({type(dataset).__name__}) has no length: " + "; ".join(wrong))


def require_heldout(dataset: Any, method: MethodConfig) -> None:
    """A method that fits something by held-out rows needs two of them or more, that can be asked for by number."""
    setting = method.requirements.heldout_setting
    what = f"{method.name} with {setting} fits by the rows of eval_dataset"
    if isinstance(dataset, dict):
        if "heldout" not in dataset:
            raise ValueError(
                f"{what}, and of several by those of 'heldout', got {', '.join(dataset)}: name one so; the figures of "
                "the others stay held out"
            )
        dataset = dataset["heldout"]
    if dataset is None:
        raise ValueError(f"{what}, got None: give eval_dataset=, or leave {setting} out")
    if is_stream(dataset):
        raise ValueError(f"{what}, and {type(dataset).__name__} has no length: materialise it")
    if len(dataset) < 2:
        raise ValueError(f"{what} and needs at least 2, got {len(dataset)}: half of them may decide for the others")


def require_batches(method: MethodConfig, count: int) -> None:
    """Methods that compare the batches of an update need more than one.

    Args:
        count: micro-batches of an update, of all processes that share a chain.
    """
    needs = method.requirements
    if needs.gradient_variance == "needed" and count < 2:
        raise ValueError(
            f"{method.name} measures the noise of its gradient between the micro-batches of an update and needs at "
            f"least 2 (gradient_accumulation_steps x processes that share a chain), got {count}: split the batch"
        )
    if count < needs.min_batches:
        raise ValueError(
            f"{method.name} needs at least {needs.min_batches} batches per update to estimate their variance, got "
            f"{count} (gradient_accumulation_steps x processes that share a chain): raise gradient_accumulation_steps"
        )


def refuse_other_settings(found: Sequence[Mapping[str, Any]]) -> None:
    """Processes with rows of their own, launched each on its own, must run one chain: ``found`` in every process."""
    for rank, settings in enumerate(found):
        for name in found[0].keys() | settings.keys():
            if settings.get(name) != found[0].get(name):
                raise ValueError(
                    f"process {rank} has {name}={settings.get(name)!r}, process 0 {found[0].get(name)!r}: with "
                    "private_rows only the rows of train_dataset may differ. Launch all processes alike"
                )


def refuse_other_rows(found: Sequence[Mapping[str, Any]]) -> None:
    """Processes deal rows to chains, and to batches of a chain, by number: ``found`` of the rows in every process."""
    for rank, rows in enumerate(found):
        for name in rows:
            if rows[name] != found[0][name]:
                raise ValueError(
                    f"process {rank} has another train_dataset than process 0 ({name}: got {rows[name]}, expected "
                    f"{found[0][name]}): their chains would be of two posteriors. Give every process all rows in the "
                    "same order (do not shard by hand, and give split and shuffle a seed), or set private_rows=True "
                    "where each is to keep its own"
                )


def refuse_other_weights(model: BayesianModel, mesh: ChainMesh) -> None:
    """Chains of one posterior need one base model; a layer that each process has drawn anew is none."""
    if mesh.num_processes == 1:
        return
    found = mesh.share(base_model.fingerprint_weights(model.model, model.layout))
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            raise ValueError(
                f"process {rank} holds other frozen weights than process 0 (fingerprint {fingerprint[:12]}, expected "
                f"{found[0][:12]}). Call transformers.set_seed before the model is built, or load all of its weights"
            )
