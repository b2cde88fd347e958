"""Checks of rows and processes before the first update: unsuitable data, and launches that differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hf_bayes.core.config import MethodConfig
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.registry import names_with
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.inherited_prior import Inherited
from hf_bayes.models.loading import base_model
from hf_bayes.objectives.data_rows import is_stream, require_dataset
from hf_bayes.objectives.private_rows import PrivateRows
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.trainer_host import TrainerHost, eval_sets, heldout_name

_SHARED = (
    "seed", "data_seed", "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size",
    "gradient_accumulation_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "num_data", "data_unit", "minibatch", "probe_steps", "noise_std",
    "per_device_eval_batch_size", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
)  # fmt: skip
"""Arguments that must be equal in all processes with private rows, because each was launched separately."""


def require_training_rows(dataset: Any, args: BayesianTrainingArguments, method: MethodConfig) -> None:
    """Require a map-style data set (with ``__len__`` and ``__getitem__``) or a stream that all chains share."""
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
                (needs.compares_chains, f"{needs.heldout_setting} needs rows by number: materialise it"),
                (needs.final_pass, f"{method.name} passes over all rows once more at the end: materialise it"),
                (needs.batch_order != "epochs", f"{method.name} draws rows anew for every move: materialise it"),
            )
            if missing
        ]
        if wrong:
            raise ValueError(f"train_dataset ({type(dataset).__name__}) is a stream: " + "; ".join(wrong))


def require_names_of_sets(given: Any) -> None:
    """Require texts as the names of several held-out data sets. Trainer would take another name for the data itself."""
    if wrong := [name for name in eval_sets(given) if not isinstance(name, str)]:
        raise ValueError(
            f"eval_dataset has data sets with the names {wrong}, expected texts: they are a part of the names of "
            f"metrics. Write {{{str(wrong[0])!r}: ...}}"
        )


def require_heldout(dataset: Any, method: MethodConfig, *, unit: str) -> None:
    """Require enough held-out rows in a map-style data set, for a method that fits on held-out rows.

    Args:
        unit: ``Task.unit`` of the model.
    """
    setting = method.requirements.heldout_setting
    what = f"{method.name} with {setting} fits by the rows of eval_dataset"
    sets, name = eval_sets(dataset), heldout_name(dataset)
    if name is None:
        raise ValueError(
            f"{what}, and none of its data sets ({', '.join(sets)}) is named 'heldout': give this name to the data set "
            "to fit by. The metrics of the other data sets stay held out"
        )
    dataset = sets[name]
    if dataset is None:
        raise ValueError(f"{what}, got None: give eval_dataset=, or leave {setting} out")
    if is_stream(dataset):
        raise ValueError(f"{what}, and {type(dataset).__name__} is a stream: materialise it")
    least = method.requirements.least_rows(unit)
    if len(dataset) < least:
        reason = "half of them may decide for the others" if least == 2 else "fewer could not tell settings apart"
        raise ValueError(f"{what} and needs at least {least}, got {len(dataset)}: {reason}")


def require_all_chains(method: MethodConfig, mesh: ChainMesh) -> None:
    """Require that this process has all chains, for a method that compares them during the run."""
    if method.requirements.compares_chains and mesh.chain_size > 1:
        raise ValueError(
            f"{method.name} with {method.requirements.heldout_setting} compares its chains in one process, and they "
            f"are spread over {mesh.chain_size}: launch one process to choose the settings, and the others with them"
        )


def require_batches(method: MethodConfig, count: int) -> None:
    """Require more than one batch in an update, for methods that compare batches.

    Args:
        count: number of micro-batches in an update, over all processes that share a chain.
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


def meet(host: TrainerHost, method: MethodConfig, mesh: ChainMesh) -> PrivateRows:
    """Return how many rows each process has, once it is clear that all were launched for one run.

    Raises:
        ValueError: naming the process and the setting that differs.
    """
    args = host.args
    settings = {"method": method.to_dict(), **{name: getattr(args, name) for name in _SHARED}}
    for name, rows in host.eval_sets.items():  # processes share the work on these rows, as if all had the same
        settings[f"rows of eval_dataset {name}".strip()] = len(rows) if hasattr(rows, "__len__") else None
    refuse_other_settings(mesh.share(settings))
    return PrivateRows(
        tuple(mesh.share(len(host.train_dataset))),
        mesh.rank,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        disjoint=method.requirements.batch_order == "disjoint",
    )


def refuse_batch_statistics(host: TrainerHost, model: BayesianModel, method: MethodConfig) -> None:
    """Refuse random batch normalisation where the statistics of each member could not be estimated after the run."""
    if not model.members.batch_norms:
        return
    needs, args = method.requirements, host.args
    reasons = [
        words
        for wrong, words in (
            (
                model.members.statistics.names[0] in model.layout.names,
                "the model was loaded from a posterior and has statistics: begin with its base model",
            ),
            (
                needs.ends_in_gaussian,
                f"{method.name} results in a distribution, or compares predictions during the run, and only finished "
                f"draws have statistics: use a method of draws ({_methods_of_draws()}) with one temperature",
            ),
            (
                needs.learning_rate == "whitening" and args.learning_rate is None,
                f"{method.name} would find its step size from the curvature, for which every row has to have a "
                "likelihood of its own: set learning_rate",
            ),
            (is_stream(host.train_dataset), "train_dataset has no rows by number: materialise it"),
            (args.private_rows, "with private_rows no process has all rows: leave it out"),
        )
        if wrong
    ]
    if reasons:
        name = model.members.batch_norms[0].names
        raise ValueError(
            f"{next(iter(name.values()))} belongs to batch normalisation, whose statistics are estimated for each "
            f"member after the run, and {'; '.join(reasons)}. Or leave these weights out of the subspace: the layers "
            "then keep the statistics of the base model"
        )


def refuse_other_settings(found: Sequence[Mapping[str, Any]]) -> None:
    """Require equal settings (``found``) in all processes with private rows, because each was launched separately."""
    for rank, settings in enumerate(found):
        for name in found[0].keys() | settings.keys():
            if settings.get(name) != found[0].get(name):
                raise ValueError(
                    f"process {rank} has {name}={settings.get(name)!r}, process 0 {found[0].get(name)!r}: with "
                    "private_rows only the rows of train_dataset may differ. Launch all processes alike"
                )


def refuse_other_rows(found: Sequence[Mapping[str, Any]]) -> None:
    """Require equal data (``found``) in all processes, because they select rows by number."""
    _refuse_unequal(
        found,
        "train_dataset",
        ": their chains would be of two posteriors. Give every process all rows in the same order (do not shard by "
        "hand, and give split and shuffle a seed), or set private_rows=True where each is to keep its own",
    )


def refuse_other_weights(model: BayesianModel, mesh: ChainMesh) -> None:
    """Require the same base model in all processes, also if a layer of it is initialised at random."""
    if mesh.num_processes == 1:
        return
    found = mesh.share(base_model.fingerprint_weights(model.model, model.layout))
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            raise ValueError(
                f"process {rank} holds other frozen weights than process 0 (fingerprint {fingerprint[:12]}, expected "
                f"{found[0][:12]}). Call transformers.set_seed before the model is built, or load all of its weights"
            )


def refuse_other_priors(prior: str | None, mesh: ChainMesh) -> None:
    """Require the same prior in all processes.

    Args:
        prior: the fingerprint of the posterior that is the prior of this process; None for the method's own prior.
    """
    found = mesh.share(prior)
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            got, expected = (f"posterior {each[:12]}" if each else "none" for each in (fingerprint, found[0]))
            raise ValueError(
                f"process {rank} has another prior= than process 0 (got {got}, expected {expected}): their chains "
                "would be of two posteriors. Give all processes the same prior"
            )


def refuse_overwritten_prior(inherited: Inherited | None, directory: str) -> None:
    """Refuse to save into the directory of the prior: it would be lost, and the new posterior would name itself.

    Args:
        inherited: the posterior that is the prior; None for the method's own prior.
        directory: where the posterior of the run is saved.
    """
    if inherited is not None and inherited.posterior.folder == os.path.realpath(directory):
        raise ValueError(
            f"{directory!r} holds the posterior that is the prior (prior={inherited.posterior.source!r}): saving there "
            "would overwrite it, and the record of the new posterior would name itself. Choose another output_dir"
        )


def refuse_other_heldout_rows(found: Sequence[Mapping[str, Any]]) -> None:
    """Require equal held-out rows (``found``) in all processes, because each reads a part of them by number."""
    _refuse_unequal(
        found,
        "eval_dataset",
        ", and a run that fits by held-out rows shares the work on them. Give every process all of these rows in the "
        "same order (do not shard by hand, and give split and shuffle a seed)",
    )


def _refuse_unequal(found: Sequence[Mapping[str, Any]], dataset: str, consequence: str) -> None:
    """Require that the rows of ``dataset`` (``found``) are those of process 0 in every process."""
    for rank, rows in enumerate(found):
        for name in rows:
            if rows[name] != found[0][name]:
                raise ValueError(
                    f"process {rank} has another {dataset} than process 0 ({name}: got {rows[name]}, expected "
                    f"{found[0][name]}){consequence}"
                )


def _methods_of_draws() -> str:
    """Return the names of methods of draws that find their step size without the curvature."""
    finds = ("range_test", "from_length")
    return names_with(lambda needs: not needs.ends_in_gaussian and needs.learning_rate in finds)
