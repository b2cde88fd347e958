"""What a run leaves on disk at its end: the posterior. Checkpoints on the way are the matter of ``resuming``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from torch import Tensor, nn

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import Problem
from hf_bayes.diagnostics.comparison import RowScores, difference_std_error
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.methods.registry import map_rule
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.inherited_prior import Inherited
from hf_bayes.models.to_posterior import sidecars_of, to_posterior
from hf_bayes.objectives.batches import ChainBatches, FullPasses
from hf_bayes.objectives.map_estimate import descend
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.model_card import CardFields, author_fields, write_card
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.training.mixin import AnyTrainer

_KEPT_METRICS = (
    "nll",
    "accuracy",
    "ece",
    "brier",
    "total",
    "aleatoric",
    "epistemic",
    "member_nll",
    "perplexity",
    "ace",
    "mse",
    "predictive_std",
    "epistemic_std",
)


class SavingMixin(AnyTrainer):
    """The trainer's posterior and its directory."""

    bayesian: BayesianModel
    method: MethodConfig
    subspace: str
    chains: range
    mesh: ChainMesh
    _say: Callable[..., None]
    _warn: Callable[..., None]
    _loader: Callable[..., Any]
    num_data: float
    problem: Problem
    inherited: Inherited | None
    _start: Tensor
    _posterior: Posterior | None
    _sidecars: Sidecars
    """The files of the tokenizer or processor, as it was before the first step."""
    _asymptote: Callable[[], dict[str, Any] | None]
    _measure: Callable[[str], dict[str, float]]
    _card: CardFields | None = None
    _risk: dict[str, Any] | None = None
    """C(S) of the same evaluation."""
    _evaluated: dict[str, float] | None
    """What ``evaluate`` last said of the finished posterior, on the trainer's own eval_dataset."""
    _row_scores: Mapping[str, RowScores]
    _evaluated_rows: Mapping[str, RowScores]
    """The NLL of every row in the same evaluation."""

    @property
    def posterior(self) -> Posterior:
        """The result of ``train``: of several processes, the draws of the chains of this one.

        Raises:
            ValueError: before it.
        """
        if self._posterior is None:
            raise ValueError("there is no posterior yet: call train() first")
        return self._posterior

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and self._posterior is not None and not args and not kwargs:
            self._keep_evaluation(metrics)
        return metrics

    def _keep_evaluation(self, metrics: dict[str, float]) -> None:
        """Keep what the next save writes: metrics, C(S), and the rows that a MAP estimate is compared on."""
        self._evaluated, self._risk, self._evaluated_rows = metrics, self._asymptote(), self._row_scores

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the posterior directory in one step, with held-out metrics if there is an eval_dataset.

        It holds ``processing_class`` and the generation config as they are now.

        Every process calls it, and writes the members of its chains. Checkpoints (``_internal_call``) have files of
        their own.
        """
        if _internal_call:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)
            return
        posterior = self.posterior
        if self.eval_dataset is not None and not posterior.config.metrics:
            posterior = self._posterior = self._with_metrics(posterior)
        sidecars = sidecars_of(self.bayesian, self.processing_class)
        posterior = self._posterior = dataclasses.replace(posterior, sidecars=sidecars)
        directory = output_dir or self.args.output_dir
        first, card = self.mesh.data_rank == 0, self._card or CardFields()
        posterior.save_pretrained(directory, repo_id=self.args.hub_model_id, group=self.mesh, contributes=first, **card)

    def _with_metrics(self, posterior: Posterior) -> Posterior:
        """Held-out metrics of the posterior, beside the NLL of a MAP estimate."""
        if self._evaluated is None:
            self._keep_evaluation(self._measure("eval"))
        metrics = self._evaluated or {}
        sets = [f"{name}_" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else [""]
        if empty := [name for name in sets if f"eval_{name}nll" not in metrics]:
            self._warn(
                "no likelihood term in eval_dataset%s, so the posterior is saved without its metrics: it has no row "
                "(dataloader_drop_last leaves out a batch that is not full), no labels, or all of them are -100",
                "".join(f" {name[:-1]!r}" for name in empty if name),
            )
        sets = [name for name in sets if name not in empty]
        if not sets:
            return posterior
        names = [name + metric for name in sets for metric in _KEPT_METRICS]
        found = {name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics}
        point = self._map_estimate(posterior)
        if point is not None:
            chains = self._chains_optimizer
            before, chains.finished, chains.spread = (chains.finished, chains.spread), point, None
            try:
                alone = self._measure("map")
            finally:
                chains.finished, chains.spread = before
                chains.eval()
            found |= {f"{name}map_nll": alone[f"map_{name}nll"] for name in sets}
            for name in sets:
                of = f"_{name[:-1]}" if name else ""
                error = difference_std_error(self._evaluated_rows[f"eval{of}"], self._row_scores[f"map{of}"])
                found |= {} if error is None else {f"{name}map_nll_difference_std_error": error}
                self._compare(name, found[f"{name}nll"], found[f"{name}map_nll"], error)
        config = dataclasses.replace(posterior.config, metrics=found)
        if self._risk is None:
            return dataclasses.replace(posterior, config=config)
        last = sets[-1]  # of several, the one that was evaluated last
        limit = {f"{last}limit_nll": self._risk["limit"], f"{last}limit_nll_std_error": self._risk["std_error"]}
        config = dataclasses.replace(config, metrics=found | limit)
        risk = {**self._risk, "eval_set": last[:-1]} if last else self._risk
        return dataclasses.replace(posterior, config=config, trace={**(posterior.trace or {}), "risk": risk})

    def _compare(self, name: str, nll: float, map_nll: float, std_error: float | None) -> None:
        """Say the held-out NLL, and how it differs from a MAP estimate's if that is more than two standard errors."""
        of = f" ({name[:-1]})" if name else ""
        if std_error is None or abs(nll - map_nll) <= 2 * std_error:
            self._say("held-out NLL%s: %.4f", of, nll)
        elif nll < map_nll:
            self._say("held-out NLL%s: %.4f, MAP estimate %.4f (+- %.2g)", of, nll, map_nll, std_error)
        else:
            self._warn(
                "the posterior's held-out NLL%s %.4f is worse than a MAP estimate's %.4f (standard error of the "
                "difference %.2g): train longer, lower temperature or prior_std, or use the MAP estimate",
                of, nll, map_nll, std_error,
            )  # fmt: skip

    def _map_estimate(self, posterior: Posterior) -> Tensor | None:
        """[1, d]: the posterior's first member, or mean, polished by AdamW on its own energy; the same everywhere.

        By default that takes a tenth of the gradients that the run took, but no more updates than it had.
        """
        args, config, steps = self.args, self.method, self._num_steps()
        start = self.mesh.share(posterior.representative.cpu())[0][None].to(args.device)
        if config.requirements.ends_at_map:
            return start
        count = args.map_updates if args.map_updates is not None else -(-steps * config.num_chains // 10)
        count = min(count, steps)
        if count == 0:
            return None
        with evaluating(self.bayesian):
            return descend(
                self.bayesian,
                map_rule(config, self.problem),
                start,
                self._updates(),
                scale=self._likelihood_scale,
                learning_rate=config.warm_start_learning_rate,
                num_updates=count,
                autocast=self.accelerator.autocast,
                total=self.mesh.sum_over_data,
                progress=not args.disable_tqdm and self.is_world_process_zero(),
            )

    def _updates(self) -> Iterator[list[dict[str, Any]]]:
        """The micro-batches of one update after another, the same for every chain, without end."""
        loader, accumulation = self._loader(None), self.args.gradient_accumulation_steps
        for epoch in itertools.count():
            if isinstance(loader.batch_sampler, (ChainBatches, FullPasses)):
                loader.batch_sampler.set_epoch(epoch)
            batches = (self._prepare_inputs(batch) for batch in loader)
            while update := list(itertools.islice(batches, accumulation)):
                yield update

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save, and upload the posterior's own files: never training_args.bin, checkpoints or tokens.

        Args:
            commit_message: of the commit.
            blocking: False returns at once, while the upload goes on.
            token: of the Hub; ``args.hub_token`` by default.
            revision: a branch, made if it is not there, or a pull request (refs/pr/1); ``args.hub_revision`` by
                default, or else the main branch.
            private: whether a new repository is; ``args.hub_private_repo`` by default.
            card: license, language, datasets (or dataset_tags), tags and model_name of the model card.
        Returns:
            The commit, a text which is its address; what will be it, if not blocking; None in processes but the first.
        Raises:
            ValueError: for anything else: the rest of the card is written from what the run was.
        """
        self._card = author_fields(self._card, card)
        self.save_model()
        if not self.is_world_process_zero():
            return None
        args, whole = self.args, self.mesh.chain_size == 1
        posterior = self.posterior if whole else Posterior.from_pretrained(args.output_dir)
        push = partial(
            posterior.push_to_hub,
            args.hub_model_id or Path(args.output_dir).absolute().name,
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision if revision is None else revision,
            commit_message=commit_message,
            **self._card,
        )
        return push() if blocking else HfApi().run_as_future(push)

    def create_model_card(self, *_: Any, **card: Any) -> None:
        """Keep the fields that only an author can give the model card; write the card anew if a posterior is saved.

        A run that has not ended has no posterior and gets no card; TRL asks for one at every checkpoint.

        Args:
            card: as in ``push_to_hub``.
        """
        self._card = author_fields(self._card, card)
        if self.args.should_save and (Path(self.args.output_dir) / storage.MANIFEST).exists():
            write_card(self.args.output_dir, repo_id=self.args.hub_model_id, **self._card)

    def _to_posterior(self, approximation: Any, diagnostics: dict[str, Any], trace: dict[str, Any]) -> Posterior:
        return to_posterior(
            self.bayesian,
            approximation,
            self.method,
            subspace=self.subspace,
            num_data=self.num_data,
            data_unit=self.args.data_unit,
            tokenizer=self.processing_class,
            seed=self.args.seed,
            diagnostics=diagnostics,
            trace=trace,
            prior=None if self.inherited is None else self.inherited.record,
            # a tokenizer takes room on the disk to be written, which must not lose a finished run
            sidecars=sidecars_of(self.bayesian, None, self._sidecars),
        )

    # -- a private hook of Trainer, whose signature a test pins -------------------------------------------------

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """None: the norm over all chains together means nothing, and theta holds no gradient."""
