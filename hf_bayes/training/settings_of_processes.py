"""The settings that processes with rows of their own must share, because each was launched on its own."""

from __future__ import annotations

from hf_bayes.core.config import MethodConfig
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.objectives.private_rows import Stratum
from hf_bayes.training.compat import TrainerHost
from hf_bayes.training.refusals import refuse_other_settings

_SHARED = (
    "seed", "data_seed", "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_data", "data_unit", "minibatch", "probe_steps", "noise_std",
    "per_device_eval_batch_size", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
)  # fmt: skip


def meet(host: TrainerHost, method: MethodConfig, mesh: ChainMesh) -> Stratum:
    """Return the number of rows of each process, after a check that all were launched for one run.

    Raises:
        ValueError: naming the process and the setting that differs.
    """
    args, sets = host.args, host.eval_dataset if isinstance(host.eval_dataset, dict) else {"": host.eval_dataset}
    settings = {"method": method.to_dict(), **{name: getattr(args, name) for name in _SHARED}}
    for name, rows in sets.items():  # processes share the work on these rows, as if they were the same everywhere
        settings[f"rows of eval_dataset {name}".strip()] = len(rows) if hasattr(rows, "__len__") else None
    refuse_other_settings(mesh.share(settings))
    return Stratum(
        tuple(mesh.share(len(host.train_dataset))),
        mesh.rank,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        disjoint=method.requirements.batch_order == "disjoint",
    )
