"""Training data without a length: all chains get the same rows, in the order of the data set."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader

from hf_bayes.core.rng import generator
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.image_text import counting_images
from hf_bayes.objectives.batches import WholeUpdates
from hf_bayes.objectives.data_rows import in_words
from hf_bayes.training.data.fingerprint import describe_stream
from hf_bayes.training.data.generators import seeded
from hf_bayes.training.trainer_host import TrainerHost
from hf_bayes.uncertainty.likelihoods import refuse_labels


class Stream:
    """A stream of training rows. Processes that share chains take turns, batch by batch."""

    def __init__(self, host: TrainerHost, model: BayesianModel, mesh: ChainMesh) -> None:
        self.host, self.model, self.mesh = host, model, mesh
        self._first: dict[str, Any] | None = None

    def loader(
        self, collate: Callable[..., Any], before_update: Callable[[int], None] | None = None
    ) -> DataLoader[Any]:
        """Return the batches of whole updates, pass after pass.

        Workers start again with every pass. A persistent worker keeps its own copy of the data set, and would repeat
        the first pass.

        Args:
            collate: the collator.
            before_update: see ``WholeUpdates``.
        """
        args = self.host.args
        seed = args.seed if args.data_seed is None else args.data_seed
        one_pass = DataLoader(
            self._batches_of_process(self.mesh.data_size, self.mesh.data_rank),
            batch_size=args.per_device_train_batch_size,
            drop_last=True,
            generator=generator(seed, "passes"),  # the workers' seeds, else of the state that a resumed run finds
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        # Trainer skips items of a loader's data set when it resumes
        updates = WholeUpdates(one_pass, args.gradient_accumulation_steps, name=self._name, before_update=before_update)
        return DataLoader(updates, batch_size=None, collate_fn=_as_it_is)

    def first(self) -> dict[str, Any]:
        """Return the first rows: those that ``keep_first`` stored, or read again."""
        return self._read_first() if self._first is None else self._first

    def keep_first(self) -> None:
        """Read and store the first rows now, because reading them later could change a stream that draws its rows."""
        self._first = self._read_first()

    def check(self, batch: dict[str, Any]) -> None:
        """Check inputs and labels of a batch, because the rows of a stream are not counted beforehand."""
        where = f"a batch of {self._name}"
        self.model.check_inputs(batch, where=where)
        if batch.get("labels") is not None:
            refuse_labels(self.model.likelihood, batch["labels"], self.model.num_outputs, where=where)

    def describe(self, collate: Callable[..., Any]) -> dict[str, Any]:
        """Return the identity of the stream for a checkpoint."""
        first = self._batches_of_process()
        first.set_epoch(0)
        # workers share a stream out, so that other workers give its rows in another order
        workers = self.host.args.dataloader_num_workers
        return {**describe_stream(first, collate, seed=self.host.args.seed), "workers": workers}

    def _batches_of_process(self, processes: int = 1, rank: int = 0) -> IterableDatasetShard:
        """Return one process's batches; a pass is set in either way that transformers knows."""
        size = self.host.args.per_device_train_batch_size
        dataset, _ = self.host.without_unused(self.host.train_dataset, "training")
        return IterableDatasetShard(
            dataset, batch_size=size, drop_last=True, num_processes=processes, process_index=rank
        )

    def _read_first(self) -> dict[str, Any]:
        _, collate = self.host.without_unused(self.host.train_dataset, "training")
        size = self.host.args.per_device_train_batch_size
        first = self._batches_of_process()
        first.set_epoch(0)
        with seeded(self.host.args.seed, first, collate):  # the rows may be random
            rows = list(itertools.islice(first, size))
            if not rows:
                raise ValueError(
                    f"{self._name} gave no row, or fewer than per_device_train_batch_size={size}: give it more, or "
                    "lower that"
                )
            batch = counting_images(self.model, in_words(collate, self._name))(rows)
        self.check(batch)
        prepared: dict[str, Any] = self.host.prepare(batch)
        return prepared

    @property
    def _name(self) -> str:
        return f"train_dataset ({type(self.host.train_dataset).__name__})"


def _as_it_is(batch: Any) -> Any:
    return batch
