"""The held-out rows on which a method fits: the trainer's eval_dataset, or the one named "heldout" of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader
from tqdm import tqdm

from hf_bayes.core.config import MethodConfig
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_access import row_batches
from hf_bayes.objectives.data_rows import in_words, is_stream
from hf_bayes.objectives.likelihood_terms import count_terms_of
from hf_bayes.posteriors.tasks import TASKS
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.checks.rows import refuse_other_heldout_rows, require_heldout
from hf_bayes.training.data.fingerprint import describe_rows
from hf_bayes.training.data.generators import seeded_batches
from hf_bayes.training.trainer_host import TrainerHost, eval_sets, heldout_name
from hf_bayes.uncertainty.likelihoods import refuse_labels

CHECKED_ROWS = 64
"""The rows of a batch that are checked at once."""


def reason_without_rows(args: BayesianTrainingArguments, eval_dataset: Any) -> str | None:
    """Return, in words, why nothing can be fitted to a trainer's held-out rows; None if it can."""
    if args.private_rows:
        return "private_rows keeps the rows of every process apart"
    if eval_dataset is None:
        return "there is no eval_dataset"
    name, sets = heldout_name(eval_dataset), eval_sets(eval_dataset)
    if name is None:
        return f"eval_dataset has several sets ({', '.join(map(str, sets))}) and none is named 'heldout'"
    if is_stream(sets[name]):
        return "eval_dataset is a stream, whose rows have no numbers"
    return None


def evenly_spread(count: int, most: int) -> list[int]:
    """Return the numbers of at most ``most`` of ``count`` rows, evenly spread."""
    return [number * count // min(count, most) for number in range(min(count, most))]


class HeldOutData:
    """Held-out rows, in batches of an evaluation."""

    def __init__(self, host: TrainerHost) -> None:
        self._host = host

    @property
    def rows(self) -> Any:
        """The data set."""
        name = heldout_name(self._host.eval_dataset)
        assert name is not None  # the callers have refused several sets without this name
        return self._host.eval_sets[name]

    def check(self, model: BayesianModel, method: MethodConfig) -> None:
        """Check that the rows can be counted and have labels, before anything runs."""
        require_heldout(self._host.eval_dataset, method, unit=TASKS[model.task].unit)
        self.count_terms(model, both_halves=method.requirements.heldout == "split")

    def check_sets(self, model: BayesianModel, *, besides: str | None) -> None:
        """Check that the model can take the rows of all data sets, so that no run is made in vain.

        A data set without labels is no error: the posterior then has no metrics.

        Args:
            besides: the name of a data set that is checked elsewhere.
        Raises:
            ValueError: for inputs or labels that the model cannot take, naming the row.
        """
        for name, rows in self._host.eval_sets.items():
            if name == besides or rows is None or is_stream(rows):
                continue
            where = f"eval_dataset {name!r}" if name else "eval_dataset"
            dataset, collate = self._host.without_unused(rows, "evaluation")
            loader = DataLoader(dataset, batch_size=CHECKED_ROWS, collate_fn=in_words(collate, where))
            quiet = self._host.args.disable_tqdm or not self._host.is_first_process
            for index, batch in enumerate(tqdm(loader, f"Checking {where}", delay=5.0, disable=quiet, leave=False)):
                model.check_inputs(batch, where=where, first=index * CHECKED_ROWS)
                if batch.get("labels") is not None:
                    refuse_labels(
                        model.likelihood, batch["labels"], model.num_outputs, where=where, first=index * CHECKED_ROWS
                    )

    def require_same(self, mesh: ChainMesh) -> None:
        """Check that all processes have these rows."""
        if mesh.num_processes > 1:
            refuse_other_heldout_rows(mesh.share(self.describe()))

    def count_terms(self, model: BayesianModel, *, both_halves: bool = False) -> int:
        """Return the number of likelihood terms.

        Args:
            both_halves: True if each half of the rows needs terms.
        """
        dataset, collate = self._host.without_unused(self.rows, "evaluation")
        return count_terms_of(model, dataset, collate, name="eval_dataset", both_halves=both_halves).total

    def by_number(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Return these rows, in this order, in batches. A resumed run reads the same ones from a random collator."""
        dataset, collate = self._host.without_unused(self.rows, "evaluation")
        size = self._host.args.per_device_eval_batch_size
        batches = row_batches(dataset, rows, collate=collate, batch_size=size, prepare=self._host.prepare)
        return seeded_batches(batches, self._host.args.seed, dataset, collate)

    def describe(self) -> dict[str, Any]:
        """Return the identity of these rows for a checkpoint."""
        dataset, collate = self._host.without_unused(self.rows, "evaluation")
        return {"num_rows": len(dataset), **describe_rows(dataset, collate, seed=self._host.args.seed)}
