"""The training rows: their number of likelihood terms, and the rows that each chain sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import seed_of
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.assembly import with_batch_posterior
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.image_text import counting_images
from hf_bayes.models.language.packing import first_documents, is_flattened, refuse_mixed_documents
from hf_bayes.objectives.batches import PAD_ROWS, ChainBatches, FullPasses
from hf_bayes.objectives.data_access import row_batches
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.likelihood_terms import count_terms_of
from hf_bayes.objectives.private_rows import PrivateRows
from hf_bayes.training.checks.rows import meet, refuse_other_rows, require_batches, require_training_rows
from hf_bayes.training.data.fingerprint import describe_rows, fingerprint_rows
from hf_bayes.training.data.generators import seeded
from hf_bayes.training.data.streams import Stream
from hf_bayes.training.data.workers import NumberedBatches, SeededRows
from hf_bayes.training.trainer_host import TrainerHost


class TrainingRows:
    """The rows of a run: a permutation for each chain, or a stream in the order in which its rows come.

    If every update needs all rows, ``args.gradient_accumulation_steps`` is set to the micro-batches of one pass.

    Args:
        host: the trainer.
        model: attached.
        method: as the user gave it; ``method`` of the object is the method for batches of this size.
        mesh: the processes.
    Attributes:
        requirements: the needs of the method.
        stream: the training data where they have no length, else None.
        num_rows: number of rows in all processes; None for a stream.
        num_terms: number of likelihood terms in these rows; None for a stream.
        most_terms: the largest number of likelihood terms in one row; None for a stream.
        num_data: N.
        private: the place of this process among processes with private rows; None if all processes have the same rows.
        run_number: the number of the current run on these rows, from 0 (``seed_of_run``).
        num_runs: the number of runs that have ended.
    Raises:
        ValueError: for data that cannot be counted, or batches that cannot be drawn.
    """

    def __init__(self, host: TrainerHost, model: BayesianModel, method: MethodConfig, mesh: ChainMesh) -> None:
        self.host, self.model, self.mesh = host, model, mesh
        self.method, self.requirements = method, method.requirements
        args, dataset = host.args, host.train_dataset
        self.stream: Stream | None = None
        self.num_rows: int | None = None
        self.num_terms: int | None = None
        self.most_terms: int | None = None
        self.private: PrivateRows | None = None
        self.run_number = self.num_runs = 0
        require_training_rows(dataset, args, method)
        own = args.private_rows
        require_batches(method, args.gradient_accumulation_steps * (1 if own else mesh.data_size))
        if is_stream(dataset):
            self.stream = Stream(host, model, mesh)
            assert args.num_data is not None  # require_training_rows
            self.num_data = float(args.num_data)
            return
        self._count(own)
        natural = self.num_rows if args.data_unit == "sequence" else self.num_terms
        assert natural is not None
        self.num_data = float(args.num_data or natural)
        assert self.batch_fraction is not None
        self.method = with_batch_posterior(method, self.batch_fraction)
        self.requirements = self.method.requirements
        if self.requirements.all_data_in_every_update:
            args.gradient_accumulation_steps = len(self._batches(None))
        self._batches(None)  # refuses batches that cannot be drawn

    def _count(self, own: bool) -> None:
        """Count rows and likelihood terms, and check that all processes have the same rows or private rows."""
        args, mesh, model = self.host.args, self.mesh, self.model
        dataset, collate = self.data()
        self.num_rows = len(dataset)
        if own:
            self.private = meet(self.host, self.method, mesh)
            self.num_rows = self.private.num_rows
        self.num_terms, self.most_terms = count_terms_of(
            model, dataset, collate, progress=not args.disable_tqdm, by_row=self._reason_not_to_pack()
        )
        if own:
            self.num_terms = sum(mesh.share(self.num_terms))
            self.most_terms = max(mesh.share(self.most_terms))
        elif mesh.num_processes > 1:
            rows = {"rows": self.num_rows, "likelihood terms": self.num_terms}
            some = fingerprint_rows(dataset, collate, seed=args.seed)
            refuse_other_rows(mesh.share({**rows, "fingerprint of some rows": some}))

    def _reason_not_to_pack(self) -> str | None:
        """Return the reason why a collator may not pack rows, and what to do; None if packing is allowed."""
        if self.requirements.final_pass:
            return f"{self.method.name} squares the gradients of rows one by one: {PAD_ROWS}"
        if self.shared or len(self.mesh.chains) == 1:
            return None
        return f"minibatch='independent' deals rows to chains by number: {PAD_ROWS}, or set minibatch='shared'"

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """True if all chains see the same rows."""
        return self.host.args.minibatch == "shared" or self.requirements.all_data_in_every_update

    @property
    def batch_fraction(self) -> float | None:
        """The share of all rows in a batch. With private rows, a batch consists of the batches of all processes."""
        if self.num_rows is None:
            return None
        processes = 1 if self.private is None else len(self.private.sizes)
        return processes * self.host.args.per_device_train_batch_size / self.num_rows

    @property
    def rows_per_update(self) -> int:
        """R, the number of rows in an update of a chain, over all processes that share it."""
        args = self.host.args
        if self.requirements.all_data_in_every_update:
            return len(self.host.train_dataset)
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.mesh.data_size

    @property
    def scale(self) -> DataScale:
        """The size of the data and of an update."""
        return DataScale(self.num_data, self.num_rows, self.num_terms, self.rows_per_update)

    @property
    def updates_of_epoch(self) -> float | None:
        """Updates in which a chain sees as many rows as there are; None for a stream."""
        return None if self.num_rows is None else self.num_rows / self.scale.rows_per_update

    @property
    def num_steps(self) -> int:
        """The number of updates in the whole run."""
        args = self.host.args
        if args.max_steps >= 0:
            return args.max_steps
        if self.stream is not None:
            raise ValueError("train_dataset has no length, and max_steps is not set: an endless run. Set max_steps")
        assert self.num_rows is not None
        updates = -(-self.num_rows // self.rows_per_update)
        return math.ceil(args.num_train_epochs * updates)

    # -- batches ---------------------------------------------------------------------------------------------------

    def data(self) -> tuple[Any, Callable[..., Any]]:
        """Return the data set and its collator, without columns that the model does not take."""
        return self.host.without_unused(self.host.train_dataset, "training")

    def countable(self) -> tuple[Any, Callable[..., Any]]:
        """Return ``data``, with a collator whose batches can be divided by rows."""
        dataset, collate = self.data()
        return dataset, counting_images(self.model, collate)

    def _data_of_updates(self) -> tuple[Any, Callable[..., Any]]:
        """Return ``countable`` if updates read some rows of a batch apart, and else ``data``: counting takes time.

        They may if each chain reads rows of its own, and where the noise of a gradient is found from parts of a batch.
        """
        apart = not self.shared and len(self.mesh.chains) > 1
        measures = self.requirements.gradient_variance != "none"
        return self.countable() if apart or measures else self.data()

    def loader(self, *, shared_rows: bool = False) -> DataLoader[Any]:
        """Return batches for the chains of this process.

        Args:
            shared_rows: use the same rows for all chains.
        """
        dataset, collate = self._data_of_updates()
        if self.stream is not None:
            return self.stream.loader(collate)
        args, chains = self.host.args, None if shared_rows or self.shared else self.mesh.chains
        batches: Any = self._batches(chains)
        if args.dataloader_num_workers > 0:
            first = "shared" if chains is None else chains.start
            dataset = SeededRows(dataset, self._seed, "workers", first, self.mesh.data_rank)
            batches = NumberedBatches(batches)
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
        )

    def start_loader(self, before_update: Callable[[int], None] | None = None) -> DataLoader[Any]:
        """Return the batches of a run, from its beginning.

        Args:
            before_update: called with the number of an update, from 0, before its rows are read from a stream.
        """
        if self.stream is None:
            return self.loader()
        self.stream.keep_first()
        return self.stream.loader(self._data_of_updates()[1], before_update)

    def take(self, batches: Iterator[Any], count: int) -> list[Any]:
        """Return the next micro-batches. Micro-batches of a stream are checked here."""
        found = list(itertools.islice(batches, count))
        if self.stream is not None:
            for batch in found:
                self.stream.check(batch)
        return found

    def _batches(self, chains: range | None) -> ChainBatches | FullPasses:
        args, num_rows = self.host.args, len(self.host.train_dataset)
        share: dict[str, Any] = {"data_rank": self.mesh.data_rank, "data_size": self.mesh.data_size}
        seed = self._seed
        if self.requirements.all_data_in_every_update:
            return FullPasses(num_rows, batch_size=args.per_device_train_batch_size, **share)
        if self.private is not None:  # epochs are those of all rows, so that they end together
            assert self.num_rows is not None
            share = {"updates_per_epoch": -(-self.num_rows // self.rows_per_update)}
            seed = seed_of(seed, "process", self.mesh.rank)
        return ChainBatches(
            num_rows,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            chains=chains,
            seed=seed,
            order=self.requirements.batch_order,
            **share,
        )

    @property
    def _seed(self) -> int:
        """The seed of the rows of the current run."""
        args = self.host.args
        return self.seed_of_run(args.seed if args.data_seed is None else args.data_seed)

    def seed_of_run(self, seed: int) -> int:
        """Return the seed of the current run.

        The first run takes ``seed`` itself. A later one on the same trainer would repeat its noise and its rows with
        that, and draws of both would not be independent.
        """
        return seed if self.run_number == 0 else seed_of(seed, "run", self.run_number)

    def shared_updates(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the batches of each update without end; all chains get the same ones."""
        loader, accumulation = self.loader(shared_rows=True), self.host.args.gradient_accumulation_steps
        for epoch in itertools.count():
            if isinstance(loader.batch_sampler, (ChainBatches, FullPasses, NumberedBatches)):
                loader.batch_sampler.set_epoch(epoch)
            batches = iter(loader)
            while update := list(itertools.islice(batches, accumulation)):
                yield update

    def by_number(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Return these rows of the training data, in this order, in batches of its size."""
        dataset, collate = self.countable()
        size = self.host.args.per_device_train_batch_size
        return row_batches(dataset, rows, collate=collate, batch_size=size, prepare=self.host.prepare)

    def first(self) -> dict[str, Any]:
        """Return a micro-batch that is the same in every process."""
        if self.stream is not None:
            return self.stream.first()
        dataset, collate = self.countable()
        count = min(len(dataset), self.host.args.per_device_train_batch_size)
        batch: dict[str, Any] = self.host.prepare(collate([dataset[row] for row in range(count)]))
        return batch

    def first_terms(self, num_terms: int, most_rows: int) -> list[dict[str, Any]]:
        """Return the first rows until they hold ``num_terms`` likelihood terms, at most ``most_rows`` of them."""
        if self.stream is not None:
            return [self.first()]
        dataset, collate = self.countable()
        rows: list[Any] = []
        terms = 0
        with self._seeded():
            while terms < num_terms and len(rows) < min(most_rows, len(dataset)):
                rows.append(dataset[len(rows)])
                terms += int(self.model.terms_per_row(collate(rows[-1:])))
            size = self.host.args.per_device_eval_batch_size
            return [self.host.prepare(collate(rows[i : i + size])) for i in range(0, len(rows), size)]

    def _seeded(self) -> AbstractContextManager[None]:
        """Return the context in which rows are read that belong to no update. A data set or collator may be random."""
        return seeded(self.host.args.seed, *self.data())

    # -- checks ----------------------------------------------------------------------------------------------------

    def refuse_mixed_documents(self) -> None:
        """Check, on the first rows, that the model keeps packed documents apart."""
        with self._seeded():
            inputs = self.first()
            if is_flattened(inputs) and first_documents(inputs) is None and self.stream is None:
                dataset, collate = self.data()  # a batch of one row may hold one document
                inputs = self.host.prepare(collate([dataset[row] for row in range(min(2, len(dataset)))]))
        with self.host.autocast():
            refuse_mixed_documents(self.model, self.model.theta.detach()[:2], inputs)

    def check_likelihood(self) -> None:
        """Check, on the first rows, that a user's likelihood is a finite sum over likelihood terms."""
        if not self.model.likelihood.has_check:
            return
        with self._seeded():
            inputs = self.first()
        with torch.no_grad(), self.host.autocast():
            self.model.each_term(inputs, self.model.likelihood.check)

    def describe(self) -> dict[str, Any]:
        """Return the identity of the training data for a checkpoint; for private rows, one hash per process."""
        dataset, collate = self.data()
        if self.stream is not None:
            return self.stream.describe(collate)
        found = describe_rows(dataset, collate, seed=self.host.args.seed)
        if self.private is not None:
            parts = self.mesh.share(found)
            found = {name: [part[name] for part in parts] for name in ("columns", "fingerprint")}
            found["packs"] = any(part["packs"] for part in parts)
        return {**found, "num_terms": self.num_terms}
