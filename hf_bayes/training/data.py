"""Which rows the trainer shows to which chain, and how many likelihood terms they stand for."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import datasets
import torch
from accelerate.data_loader import IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator, seed_of
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.members.trunk import num_rows_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.packing import first_documents, is_flattened, refuse_mixed_documents
from hf_bayes.objectives.batches import PAD_ROWS, ChainBatches, FullPasses, WholeUpdates, count_terms
from hf_bayes.objectives.data_rows import in_words, is_stream
from hf_bayes.training.data_fingerprint import describe_rows, describe_stream, fingerprint_rows
from hf_bayes.training.mixin import AnyTrainer
from hf_bayes.training.refusals import refuse_other_rows, refuse_other_settings, require_batches, require_rows
from hf_bayes.training.stratified_rows import Strata
from hf_bayes.uncertainty.likelihoods import Likelihood, refuse_labels


class TrainingDataMixin(AnyTrainer):
    """The trainer's data: rows by chain for a data set that has a length, in the order they come for a stream."""

    bayesian: BayesianModel
    likelihood: Likelihood
    method: MethodConfig
    mesh: ChainMesh
    chains: range
    num_data: float
    _signature_columns: list[str] | None
    num_rows: int | None
    """Of the training data, of all processes; None for a stream."""
    strata: Strata | None = None
    """Where processes keep their rows to themselves: whose those are."""
    num_terms: int | None
    """Likelihood terms counted in the data set; None for a stream."""
    most_terms: int | None
    """Those of the row that has most."""
    _peeked: dict[str, Any] | None = None
    """The first rows of a stream."""

    def _prepare_data(self) -> None:
        """Find N, and fit accumulation to kernels that see all data in every move."""
        args = self.args
        require_rows(self.train_dataset, args, self.method)
        own = args.private_rows
        require_batches(self.method, args.gradient_accumulation_steps * (1 if own else self.mesh.data_size))
        if is_stream(self.train_dataset):
            self.num_rows = self.num_terms = self.most_terms = None
            self.num_data = float(args.num_data)
            return
        dataset, collate = self._training_data()
        self.num_rows = len(dataset)
        if own:
            self.strata = self._meet_the_others()
            self.num_rows = self.strata.num_rows
        self.num_terms, self.most_terms = count_terms(
            dataset,
            collate,
            self.likelihood,
            shift=self.bayesian.shifts_labels,
            num_outputs=self.bayesian.num_outputs,
            progress=not args.disable_tqdm,
            by_row=self._no_packing(),
            check=self.bayesian.check_inputs,
        )
        if own:
            self.num_terms = sum(self.mesh.share(self.num_terms))
            self.most_terms = max(self.mesh.share(self.most_terms))
        elif self.mesh.num_processes > 1:
            rows = {"rows": self.num_rows, "likelihood terms": self.num_terms}
            refuse_other_rows(self.mesh.share({**rows, "fingerprint of some rows": self._fingerprint_rows()}))
        natural = self.num_rows if args.data_unit == "sequence" else self.num_terms
        self.num_data = float(args.num_data or natural)
        fraction = self._batch_fraction
        assert fraction is not None
        self.method = self.method.for_batches(fraction)
        if self.method.requirements.all_data_in_every_update:
            args.gradient_accumulation_steps = len(self._batches(None))
        self._batches(None)  # refuses batches that cannot be drawn

    def _no_packing(self) -> str | None:
        """Why a collator may not pack rows into fewer, and what to do, in words; None where it may."""
        if self.method.requirements.one_more_pass:
            return f"{self.method.name} squares the gradients of rows one by one: {PAD_ROWS}"
        if self._shared or len(self.chains) == 1:
            return None
        return f"minibatch='independent' deals rows to chains by number: {PAD_ROWS}, or set minibatch='shared'"

    def _fingerprint_rows(self) -> str:
        """Return a hash of some rows, as the collator presents them, that processes compare."""
        return fingerprint_rows(*self._training_data(), seed=self.args.seed)

    def _describe_data(self) -> dict[str, Any]:
        """Return what a checkpoint is bound to of the training data; of private rows, a hash for each process."""
        dataset, collate = self._training_data()
        if is_stream(dataset):
            first = self._turns(dataset)
            first.set_epoch(0)
            # workers share a stream out, so that other workers give its rows in another order
            workers = self.args.dataloader_num_workers
            return {**describe_stream(first, collate, seed=self.args.seed), "workers": workers}
        found = describe_rows(dataset, collate, seed=self.args.seed)
        if self.strata is not None:
            parts = self.mesh.share(found)
            found = {name: [part[name] for part in parts] for name in ("columns", "fingerprint")}
            found["packs"] = any(part["packs"] for part in parts)
        return {**found, "num_terms": self.num_terms}

    def _meet_the_others(self) -> Strata:
        """How many rows each process has, once it is clear that all have been launched for one run."""
        args, sets = self.args, self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        names = (
            "seed", "data_seed", "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size",
            "gradient_accumulation_steps", "num_data", "data_unit", "minibatch", "probe_steps", "noise_std",
            "per_device_eval_batch_size", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
        )  # fmt: skip
        settings = {"method": self.method.to_dict(), **{name: getattr(args, name) for name in names}}
        for name, rows in sets.items():  # processes share the work on them, as if these were the same everywhere
            settings[f"rows of eval_dataset {name}".strip()] = len(rows) if hasattr(rows, "__len__") else None
        refuse_other_settings(self.mesh.share(settings))
        return Strata(
            tuple(self.mesh.share(len(self.train_dataset))),
            self.mesh.rank,
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            disjoint=self.method.requirements.batch_order == "disjoint",
        )

    @property
    def _batch_fraction(self) -> float | None:
        """The share of all rows in a batch: the batches of all processes where these have rows of their own."""
        if self.num_rows is None:
            return None
        processes = 1 if self.strata is None else len(self.strata.sizes)
        return processes * self.args.per_device_train_batch_size / self.num_rows

    def _columns_to_keep(self) -> list[str]:
        """List the columns of a data set that Trainer is not to remove: what the wrapped model takes, and labels.

        A host such as TRL's SFTTrainer keeps others for its collator, such as the lengths of packed documents.
        """
        columns = [*inspect.signature(self.bayesian.core.forward).parameters, *self.label_names, "label", "label_ids"]
        if type(self)._set_signature_columns_if_needed is not Trainer._set_signature_columns_if_needed:
            self._signature_columns = None
            self._set_signature_columns_if_needed()
            columns += self._signature_columns or []
        return columns

    def _refuse_mixed_documents(self) -> None:
        """Check, on the first rows, that the model keeps packed documents apart."""
        with torch.random.fork_rng(devices=[]):  # a collator may be random
            inputs = self._first_rows()
            if is_flattened(inputs) and first_documents(inputs) is None and not is_stream(self.train_dataset):
                dataset, collate = self._training_data()  # a batch of one row may hold one document
                inputs = self._prepare_inputs(collate([dataset[row] for row in range(min(2, len(dataset)))]))
        with self.accelerator.autocast():
            refuse_mixed_documents(self.bayesian, self.bayesian.theta.detach()[:2], inputs)

    def _training_data(self) -> tuple[Any, Callable]:
        """The data set and its collator, without columns that the model does not take: as Trainer leaves them out."""
        return self._without_unused(self.train_dataset, "training")

    def _without_unused(self, dataset: Any, what: str) -> tuple[Any, Callable]:
        # a stream that was mapped names its columns only as its rows come by: the collator leaves them out
        if isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)) and dataset.column_names is not None:
            return self._remove_unused_columns(dataset, description=what), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=what)

    @property
    def _shared(self) -> bool:
        """Whether all chains see the same rows."""
        return self.args.minibatch == "shared" or self.method.requirements.all_data_in_every_update

    def get_train_dataloader(self) -> DataLoader:
        """Rows by chain: no sampler of Trainer's, and not sharded by accelerate."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        if is_stream(self.train_dataset):
            # now, not in the middle of a pass: a stream that draws as it goes would go on differently
            self._peeked = self._peek()
        return self._loader(None if self._shared else self.chains)

    def _loader(self, chains: range | None) -> DataLoader:
        """Batches for ``chains``; None: for all of them, the same."""
        (dataset, collate), args = self._training_data(), self.args
        common: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if not is_stream(dataset):
            common["persistent_workers"] = args.dataloader_persistent_workers
            return DataLoader(dataset, batch_sampler=self._batches(chains), **common)
        size, seed = args.per_device_train_batch_size, args.seed if args.data_seed is None else args.data_seed
        # Processes that share chains take turns, batch by batch. Workers begin anew with every pass: those that stay
        # have a copy of the data set that nobody tells which one it is.
        one_pass = DataLoader(
            self._turns(dataset, self.mesh.data_size, self.mesh.data_rank),
            batch_size=size,
            drop_last=True,
            generator=generator(seed, "passes"),  # the workers' seeds, else of the state that a resumed run finds
            **common,
        )
        # what Trainer skips, when it resumes, are items of a loader's data set
        updates = WholeUpdates(one_pass, args.gradient_accumulation_steps, name=self._stream_name)
        return DataLoader(updates, batch_size=None, collate_fn=_as_it_is)

    def _turns(self, stream: Any, processes: int = 1, rank: int = 0) -> IterableDatasetShard:
        """One process's batches of a stream, which is told of a pass in either way that transformers knows."""
        size = self.args.per_device_train_batch_size
        return IterableDatasetShard(
            stream, batch_size=size, drop_last=True, num_processes=processes, process_index=rank
        )

    @property
    def _stream_name(self) -> str:
        return f"train_dataset ({type(self.train_dataset).__name__})"

    def _batches(self, chains: range | None) -> ChainBatches | FullPasses:
        args, num_rows = self.args, len(self.train_dataset)
        share: dict[str, Any] = {"data_rank": self.mesh.data_rank, "data_size": self.mesh.data_size}
        seed = args.seed if args.data_seed is None else args.data_seed
        if self.method.requirements.all_data_in_every_update:
            return FullPasses(num_rows, batch_size=args.per_device_train_batch_size, **share)
        if self.strata is not None:  # epochs are those of all rows, so that they end together
            rows = self.get_total_train_batch_size(args)
            share = {"updates_per_epoch": -(-self.strata.num_rows // rows)}
            seed = seed_of(seed, "process", self.mesh.rank)
        return ChainBatches(
            num_rows,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            chains=chains,
            seed=seed,
            order=self.method.requirements.batch_order,
            **share,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """R: rows of an update, per chain, over all processes that share it."""
        if self.method.requirements.all_data_in_every_update:
            return len(self.train_dataset)
        return self._train_batch_size * args.gradient_accumulation_steps * self.mesh.data_size

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor]:
        """The micro-batches of an update, and the likelihood terms that each chain finds in it."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if self.num_terms is None:
            for batch in batches:
                self._look_through(batch)
        groups = 1 if self._shared else len(self.chains)
        per_row = [self.bayesian.terms_per_row(batch) for batch in batches]
        terms = sum((rows.view(groups, -1).sum(1) for rows in per_row), torch.zeros(groups, dtype=torch.int64))
        if self.strata is not None:
            terms = self.strata.weight * terms.double()
        return batches, self.mesh.sum_over_data(terms.to(device)).expand(len(self.chains))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Trainer's estimate, for the members here: each runs the wrapped model."""
        main_input = inputs.get(getattr(self.bayesian, "main_input_name", "input_ids"))
        if main_input is None:
            return 0
        copies = len(self.chains) if self._shared else 1
        return 6 * copies * main_input.numel() * self.bayesian.core.num_parameters(exclude_embeddings=True)

    def _likelihood_scale(self, terms: Tensor) -> float | Tensor:
        """What the log-likelihood of an update is multiplied by, to stand for all data.

        rows / rows of the update: unbiased for any mixture of lengths. How many rows a stream has nobody knows: there
        it is N / ``terms`` [M], terms of the update, a ratio estimator.
        """
        if self.num_terms is None or self.num_rows is None:
            return self.num_data / terms.clamp_min(1)
        per_term = self.num_data / self.num_terms
        return self.num_rows / self.get_total_train_batch_size(self.args) * per_term

    def _rows_of(self, inputs: dict[str, Any], members: slice) -> dict[str, Any]:
        """The rows of a micro-batch that belong to some members; all of them if shared, or of one chain alone."""
        if self._shared or len(self.chains) == 1:
            return inputs
        if members == slice(0, len(self.chains)):
            return inputs
        rows = num_rows_of(inputs) // len(self.chains)
        return self.bayesian.take_rows(inputs, torch.arange(members.start * rows, members.stop * rows))

    def _rows_by_number(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """These rows of the training data, in this order, in batches of its size."""
        dataset, collate = self._training_data()
        size = self.args.per_device_train_batch_size
        for batch in DataLoader(dataset, batch_size=size, sampler=rows, collate_fn=collate):
            yield self._prepare_inputs(batch)

    def _first_rows(self) -> dict[str, Any]:
        """A micro-batch that every process finds alike."""
        if is_stream(self.train_dataset):
            return self._peek() if self._peeked is None else self._peeked
        dataset, collate = self._training_data()
        count = min(len(dataset), self.args.per_device_train_batch_size)
        return self._prepare_inputs(collate([dataset[row] for row in range(count)]))

    def _peek(self) -> dict[str, Any]:
        """The first rows of a stream's first pass."""
        dataset, collate = self._training_data()
        first = self._turns(dataset)
        first.set_epoch(0)
        rows = list(itertools.islice(first, self.args.per_device_train_batch_size))
        if not rows:
            raise ValueError(
                f"{self._stream_name} gave no row, or fewer than per_device_train_batch_size="
                f"{self.args.per_device_train_batch_size}: give it more, or lower that"
            )
        with torch.random.fork_rng(devices=[]):  # a collator may be random
            batch = in_words(collate, self._stream_name)(rows)
        self._look_through(batch)
        return self._prepare_inputs(batch)

    def _look_through(self, batch: dict[str, Any]) -> None:
        """Check inputs and labels of a stream, whose rows are not counted, where they come by."""
        where = f"a batch of {self._stream_name}"
        self.bayesian.check_inputs(batch, where=where)
        if batch.get("labels") is not None:
            refuse_labels(self.likelihood, batch["labels"], self.bayesian.num_outputs, where=where)


def _as_it_is(batch: Any) -> Any:
    return batch
