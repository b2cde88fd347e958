"""The model ``hf_bayes`` of the package lm-evaluation-harness (``lm_eval``), which is no dependency of hf_bayes.

It is registered by the entry point of the group ``lm_eval.models``. Releases of lm_eval up to 0.4.13 read no entry
points; there ``python -m hf_bayes.cli.harness`` is lm_eval's command with this model.

An answer's log-likelihood is ``sequence_logprob``, log mean_m prod_t p_m(token t): the posterior predictive probability
of the whole answer, by which answers are compared. The log-likelihood of a text (``loglikelihood_rolling``) is the sum
of the tokens' log-probabilities, from which perplexity is computed, and which does not depend on where a long text is
cut into windows. ``per_token=True`` takes the sum for answers, too: the number that lm_eval's own model ``hf`` computes
from the logits of a Bayesian model.

``evaluate`` is ``lm_eval.simple_evaluate`` with the metrics of ``harness_metrics``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lm_eval
from lm_eval.api.registry import register_model

from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.pipelines.continuations import Continuation, Row, read_continuations
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.pipelines.harness_metrics import Answer, with_uncertainty
from hf_bayes.posteriors.tasks import TASKS

if TYPE_CHECKING:

    class HFLM:
        """The part of lm_eval's model ``hf`` that is used here. Types are checked without the library."""

        model: BayesianModelForCausalLM
        batch_size: int
        max_length: int
        cache_hook: Any

        def __init__(self, pretrained: BayesianModelForCausalLM, **kwargs: Any) -> None: ...

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]: ...

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: Any = None
        ) -> Sequence[tuple[float, bool]]: ...
else:
    from lm_eval.models.huggingface import HFLM

_LOADING = ("members", "revision", "subfolder", "dtype", "trust_remote_code", "base_model", "prediction")
"""Arguments of ``hf_bayes.pipeline`` that ``--model_args`` may have."""


@register_model("hf_bayes")
class BayesianHarnessLM(HFLM):
    """A saved posterior of causal language models as a model of lm_eval.

    Args:
        pretrained: a posterior's directory or repository, or a ``BayesianModelForCausalLM`` with its ``tokenizer``.
        tokenizer: another tokenizer than the posterior's.
        per_token: True to score answers by the sum of the tokens' log-probabilities.
        batch_size: rows of a forward pass, for all members.
        device: as in transformers.
        kwargs: ``members``, ``revision``, ``subfolder``, ``dtype``, ``trust_remote_code``, ``base_model`` and
            ``prediction`` as in ``hf_bayes.pipeline``; others go to lm_eval's model ``hf``.
    Raises:
        ValueError: for ``batch_size="auto"``, and for a model without member probabilities.
    """

    def __init__(
        self,
        pretrained: str | BayesianModelForCausalLM,
        tokenizer: Any = None,
        *,
        per_token: bool = False,
        batch_size: int | str = 8,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size is how many rows go through all members at a time, got {batch_size!r}: give "
                             "a number, 1 or more")  # fmt: skip
        loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
        loaded = pipeline(TASKS["causal_lm"].pipeline, pretrained, tokenizer, device=device, **loading)
        loaded.model.predictor.require_members("a log-likelihood")
        super().__init__(
            loaded.model, tokenizer=loaded.tokenizer, backend="causal", batch_size=int(batch_size), **kwargs
        )
        self.per_token, self.source = per_token, str(pretrained) if isinstance(pretrained, str) else "in memory"

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the sum of the tokens' log-probabilities of each text."""
        chosen, self.per_token = self.per_token, True
        try:
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.per_token = chosen
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[Answer]:
        """Return the answer to each request (its texts, the ids of its context, the ids of its continuation)."""
        rows = [self._fitted(context, continuation) for _, context, continuation in requests]
        found = read_continuations(self.model, rows, batch_size=int(self.batch_size))
        answers = [self._answer(each) for each in found]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts[0] is not None if isinstance(texts, tuple) else texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _fitted(self, context: list[int], continuation: list[int]) -> Row:
        """Return the row with the beginning of its context cut off where it exceeds the model's context."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"an answer has {len(continuation)} tokens, and the model's context has {self.max_length}: leave the "
                "document out, or raise max_length in --model_args if the model supports longer texts"
            )
        room = self.max_length + 1 - len(continuation)  # the last token is predicted, not read
        return context[-room:], continuation

    def _answer(self, found: Continuation) -> Answer:
        logprob = found.sequence_logprob_tokenwise if self.per_token else found.sequence_logprob
        return Answer(logprob, found.is_greedy, found.epistemic.mean().item(), found.member_logprobs.sum(-1).tolist())

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval writes into the configuration of its results."""
        posterior = self.model.posterior
        return {
            "pretrained": self.source,
            "method": None if posterior is None else posterior.config.method,
            "num_members": self.model.num_members,
            "answer_probability": "sum of token logprobs" if self.per_token else "log mean_m prod_t p_m",
        }


evaluate = with_uncertainty(lm_eval.simple_evaluate)
"""``lm_eval.simple_evaluate`` with the metrics of ``add_uncertainty``; it knows the model "hf_bayes"."""
