"""What a run leaves on disk: the posterior at its end, checkpoints on the way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from torch import Tensor, nn
from transformers import SchedulerType

from hf_bayes import base_model, checkpoints
from hf_bayes.artifact import Posterior
from hf_bayes.batches import ChainBatches, FullPasses
from hf_bayes.config import MethodConfig
from hf_bayes.distributed import ChainMesh
from hf_bayes.fingerprint import fingerprint_tensors
from hf_bayes.inheritance import Inherited
from hf_bayes.members.modes import evaluating
from hf_bayes.methods import map_rule
from hf_bayes.mixin import AnyTrainer
from hf_bayes.model import BayesianModel
from hf_bayes.point import descend
from hf_bayes.posterior_config import PosteriorConfig
from hf_bayes.strata import Strata
from hf_bayes.types import Approximation, Problem

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


def to_posterior(
    model: BayesianModel,
    approximation: Approximation,
    method: MethodConfig,
    *,
    subspace: str,
    num_data: float | None,
    data_unit: str,
    tokenizer: Any,
    seed: int,
    diagnostics: dict[str, Any],
    prior: dict[str, Any] | None = None,
    trace: dict[str, Any] | None = None,
) -> Posterior:
    """What a method made of the random parameters of ``model``, with all that is needed to use it."""
    layout = model.layout
    noise_std = getattr(model.likelihood, "noise_std", None)
    return Posterior(
        approximation=approximation,  # type: ignore[arg-type]
        adapter_config=base_model.adapter_config(model.model),
        trace=trace,
        config=PosteriorConfig(
            task=model.task,
            method=method.to_dict(),
            approximation=approximation.kind,
            parameters=[[name, list(shape)] for name, shape in layout.named_shapes.items()],
            num_members=approximation.num_stored,
            subspace=subspace,
            prior=prior
            or {
                "name": method.prior,
                "std": 1.0 if method.prior_std is None else method.prior_std,
                "mean": method.prior_mean,
            },
            num_data=num_data,
            data_unit=data_unit,
            base_model=base_model.describe(model.model, model.core, layout, tokenizer),
            head=base_model.describe_head(model.core, noise_std),
            prediction="linearised" if method.predicts_linearised and model.linearises else "members",
            seed=seed,
            diagnostics=diagnostics,
        ),
    )


class SavingMixin(AnyTrainer):
    """The trainer's posterior, its directory, and checkpoints with one file a chain."""

    bayesian: BayesianModel
    method: MethodConfig
    subspace: str
    chains: range
    mesh: ChainMesh
    _say: Callable[..., None]
    _warn: Callable[..., None]
    _loader: Callable[..., Any]
    num_data: float
    num_rows: int | None
    strata: Strata | None
    problem: Problem
    inherited: Inherited | None
    _start: Tensor
    _posterior: Posterior | None
    _asymptote: Callable[[], dict[str, Any] | None]
    _measure: Callable[[str], dict[str, float]]
    _risk: dict[str, Any] | None = None
    """C(S) of the same evaluation."""
    _evaluated: dict[str, float] | None
    """What ``evaluate`` last said of the finished posterior, on the trainer's own eval_dataset."""

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
            self._evaluated = metrics
            self._risk = self._asymptote()
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the posterior directory, with held-out metrics if there is an eval_dataset.

        Every process calls it, and writes the members of its chains. Checkpoints (``_internal_call``) have files of
        their own.
        """
        if _internal_call:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)
            return
        posterior = self.posterior
        if self.eval_dataset is not None and not posterior.config.metrics:
            posterior = self._posterior = self._with_metrics(posterior)
        directory = output_dir or self.args.output_dir
        posterior.save_pretrained(directory, group=self.mesh, contributes=self.mesh.data_rank == 0)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(directory)

    def _with_metrics(self, posterior: Posterior) -> Posterior:
        """Held-out metrics of the posterior, beside the NLL of a MAP estimate."""
        if self._evaluated is None:
            self._evaluated = self._measure("eval")
            self._risk = self._asymptote()
        metrics = self._evaluated
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
                self._compare(name, found[f"{name}nll"], found[f"{name}map_nll"])
        config = dataclasses.replace(posterior.config, metrics=found)
        if self._risk is None:
            return dataclasses.replace(posterior, config=config)
        last = sets[-1]  # of several, the one that was evaluated last
        limit = {f"{last}limit_nll": self._risk["limit"], f"{last}limit_nll_std_error": self._risk["std_error"]}
        config = dataclasses.replace(config, metrics=found | limit)
        risk = {**self._risk, "eval_set": last[:-1]} if last else self._risk
        return dataclasses.replace(posterior, config=config, trace={**(posterior.trace or {}), "risk": risk})

    def _compare(self, name: str, nll: float, map_nll: float) -> None:
        of = f" ({name[:-1]})" if name else ""
        self._say("held-out NLL%s: posterior %.4f, MAP estimate %.4f", of, nll, map_nll)
        if nll > map_nll:
            self._warn(
                "the posterior's held-out NLL%s %.4f is worse than a MAP estimate's %.4f: train longer, lower "
                "temperature or prior_std, or use the MAP estimate",
                of, nll, map_nll,
            )  # fmt: skip

    def _map_estimate(self, posterior: Posterior) -> Tensor | None:
        """[1, d]: the posterior's first member, or mean, polished by AdamW on its own energy; the same everywhere.

        By default that takes a tenth of the gradients that the run took, but no more updates than it had.
        """
        args, config, steps = self.args, self.method, self._num_steps()
        start = self.mesh.share(posterior.representative.cpu())[0][None].to(args.device)
        if config.ends_at_map:
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
        tags: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save, and upload the posterior's own files: never training_args.bin, checkpoints or tokens.

        Args:
            commit_message: of the commit.
            blocking: False returns at once, while the upload goes on.
            token: of the Hub; ``args.hub_token`` by default.
            revision: a branch, made if it is not there, or a pull request (refs/pr/1); ``args.hub_revision`` by
                default, or else the main branch.
            private: whether a new repository is; ``args.hub_private_repo`` by default.
            tags: of the model card, beside its own.
        Returns:
            The commit, a text which is its address; what will be it, if not blocking; None in processes but the first.
        Raises:
            ValueError: for anything else: a posterior's card is written from what the run was.
        """
        if kwargs:
            raise ValueError(
                f"push_to_hub takes commit_message, blocking, token, revision, private and tags, got "
                f"{', '.join(sorted(kwargs))}: leave it out. For another card, edit README.md in the directory that "
                "save_model has written, and push that by hf_bayes.hub.push_directory"
            )
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
            tags=tags,
        )
        return push() if blocking else HfApi().run_as_future(push)

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
        )

    # -- checkpoints: private hooks of Trainer, whose signatures a test pins -------------------------------------

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must share with the one that was saved."""
        args, layout = self.args, self.bayesian.layout
        return {
            "method": self.method.to_dict(),
            "prior": None if self.inherited is None else self.inherited.record["fingerprint"],
            "prior_mean": self._centre(),
            "num_updates": self._chains_optimizer.num_updates,
            "num_rows": self.num_rows,
            "private_rows": None if self.strata is None else list(self.strata.sizes),
            "num_data": self.num_data,
            "rows_per_update": self.get_total_train_batch_size(args),
            "minibatch": args.minibatch,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
            "lr_scheduler_kwargs": args.lr_scheduler_kwargs or {},
            "warmup_steps": args.warmup_steps,
            "noise_std": args.noise_std,
            "num_steps": self._num_steps(),
            "seed": args.seed,
            "data_seed": args.data_seed,
            "parameters": [[name, list(shape)] for name, shape in layout.named_shapes.items()],
            "device": args.device.type,  # generators of another kind draw other numbers, and take no state from these
        }

    def _centre(self) -> str:
        """What the prior is centred at: weights that were drawn anew would be those of another prior."""
        if self.method.prior_mean == "zero" or self.inherited is not None:
            return "zero"
        return fingerprint_tensors([("prior_mean", self._start)])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        tensors = self._chains_optimizer.chain_tensors() if self.mesh.data_rank == 0 else {}
        checkpoints.save(output_dir, tensors, self._settings(), group=self.mesh)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse what cannot go on, before anything runs; the base model is the one given, not a checkpoint's."""
        checkpoints.load(resume_from_checkpoint, self._settings(), chains=self.chains)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            tensors, saved = checkpoints.load(checkpoint, self._settings(), chains=self.chains)
            self._chains_optimizer.load_chain_tensors(tensors, saved["num_updates"])

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """None: the norm over all chains together means nothing, and theta holds no gradient."""
