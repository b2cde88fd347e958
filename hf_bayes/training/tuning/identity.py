"""The identity of a tuning: what its trials have in common, and what decides their results. A record is bound to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.training.data.heldout_rows import HeldOutData
from hf_bayes.training.resuming import settings_of_run
from hf_bayes.training.run_identity import identity
from hf_bayes.training.session import required
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.training.trainer_host import TrainerHost
from hf_bayes.training.tuning.candidates import Candidate


def tuning_identity(trainer: BayesianTrainer, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return the data, model and settings that a call must share with the calls whose trials it takes.

    They are what a checkpoint is bound to (``run_identity``), and more: the held-out rows of every method, how many of
    them no evaluation reads, the micro-batches, because a budget counts them, and the weights where runs start, which
    no checkpoint replaces here. The number of updates is not among them: trials of other lengths are other trials.

    Args:
        trainer: the trainer of any of the runs, before its first update.
        candidates: the methods.
    Raises:
        ValueError: for held-out rows that the model cannot take, or without labels.
    """
    host, setup, rows = TrainerHost(trainer), trainer.setup, required(trainer.rows)
    heldout = HeldOutData(host)
    shared = identity(
        setup.model,
        tokenizer=host.tokenizer,
        mixed_precision=host.mixed_precision,
        data=rows.describe(),
        heldout={**heldout.describe(), "num_terms": heldout.count_terms(setup.model)},
        micro_batches=host.args.gradient_accumulation_steps,
    )
    return {
        **shared,
        **settings_of_run(host, setup, rows),
        "start": fingerprint_tensors([("start", setup.start)]),
        "calibrate": host.args.calibrate is not False,  # without it, trials have no temperature
        **_left_out(host, len(heldout.rows)),
        **{f"candidate {c.name}": {**c.method.to_dict(), "learning_rate": c.learning_rate} for c in candidates},
    }


def _left_out(host: TrainerHost, num_rows: int) -> dict[str, int]:
    """Return how many held-out rows no evaluation reads, if there are any: trials are compared row by row."""
    left = num_rows % host.args.eval_batch_size if host.args.dataloader_drop_last else 0
    return {"held-out rows that dataloader_drop_last leaves out": left} if left else {}
