"""Rewards of texts from a posterior of reward models: mean, standard deviation, lower bound, and best of n.

A member m gives a text x the reward r_m(x), which preferences determine up to a constant of the member. So rewards are
centred before members are compared: over the candidates of one question in ``best_of_n``, and over reference texts if
there are any. With M members and a bound of k standard deviations,

    lower(x) = mean_m r_m(x) - k std_m r_m(x)

is low where the members disagree, as they do for texts unlike the data (Coste et al. 2024, Reward model ensembles help
mitigate overoptimization).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_count, is_finite_number
from hf_bayes.models.classification import BayesianClassifier
from hf_bayes.uncertainty.custom.bradley_terry import Preferences

CHOICES = ("mean", "lower")

Text = str | Sequence[dict[str, Any]]
"""A text, or a conversation: a list of messages."""


class Rewards(NamedTuple):
    """The rewards of N texts.

    Attributes:
        mean: [N] the mean over members.
        std: [N] the standard deviation over members.
        lower: [N] the lower confidence bound.
    """

    mean: Tensor
    std: Tensor
    lower: Tensor


class RewardModel:
    """A scorer of texts by a posterior of reward models.

    Args:
        model: a Bayesian model with the likelihood of preferences (``BradleyTerry``).
        tokenizer: its tokenizer; conversations need a chat template.
        bound: k, the standard deviations between the mean and the lower bound.
        reference: texts over which the rewards of every member are centred; None leaves the constants of the members
            in the standard deviation.
        batch_size: texts in a forward pass.
    Raises:
        ValueError: for a model without rewards, or settings that have no meaning.
    """

    __name__ = "bayesian_reward"  # the name of the function in TRL's logs

    def __init__(
        self,
        model: BayesianClassifier,
        tokenizer: Any,
        *,
        bound: float = 1.0,
        reference: Sequence[Text] | None = None,
        batch_size: int = 16,
    ) -> None:
        if not isinstance(model.likelihood, Preferences):
            raise ValueError(
                f"RewardModel needs a model with the likelihood of preferences, got {model.likelihood.name}: train "
                "one with likelihood=BradleyTerry() (docs/rewards.md)"
            )
        if not is_finite_number(bound) or bound < 0:
            raise ValueError(f"bound is a number of standard deviations, got {bound!r}: give a number >= 0")
        if not is_count(batch_size):
            raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
        self.model, self.tokenizer, self.bound, self.batch_size = model, tokenizer, float(bound), batch_size
        self._centre: Tensor | None = None
        if reference is not None:
            self._centre = self.member_rewards(reference).mean(1, keepdim=True)

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **_: Any) -> list[float]:
        """Return the lower bound of each completion: TRL's interface of a reward function (``compute_reward``)."""
        return self.compute_reward(prompts, completions)

    def compute_reward(self, prompts: Sequence[Text], completions: Sequence[Text], **_: Any) -> list[float]:
        """Return the lower bound of each completion of its prompt, for a ``reward_funcs`` of TRL.

        Args:
            prompts, completions: texts, or lists of messages.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"got {len(prompts)} prompts and {len(completions)} completions: give one for each")
        texts = [_joined(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        return [float(value) for value in self.score(texts).lower]

    def score(self, texts: Sequence[Text]) -> Rewards:
        """Return the rewards of texts."""
        rewards = self.member_rewards(texts)
        return self._summary(rewards if self._centre is None else rewards - self._centre)

    def best_of_n(self, candidates: Sequence[Text], *, by: str = "lower") -> int:
        """Return the number of the best candidate; the rewards of every member are centred over the candidates.

        Args:
            candidates: the answers to one question, each with the question.
            by: "lower" or "mean".
        Raises:
            ValueError: for no candidate, or another choice.
        """
        if by not in CHOICES:
            raise ValueError(f"by must be one of {', '.join(CHOICES)}, got {by!r}")
        if not candidates:
            raise ValueError("best_of_n needs candidates, got none")
        return best(self.member_rewards(candidates), by=by, bound=self.bound)

    @torch.no_grad()
    def member_rewards(self, texts: Sequence[Text]) -> Tensor:
        """Return [M, N], the reward that each member here gives to each text.

        Members of a linearised model are draws of its Gaussian, and their rewards are linear in theta.
        """
        if not texts:
            raise ValueError("rewards are of texts, got none")
        parts = [self.model.drawn_outputs(batch)[..., 0] for batch in self._batches(texts)]
        return torch.cat(parts, 1).float()

    def _batches(self, texts: Sequence[Text]) -> Iterator[dict[str, Any]]:
        for start in range(0, len(texts), self.batch_size):
            some = [self._ids(text) for text in texts[start : start + self.batch_size]]
            batch = self.tokenizer.pad({"input_ids": some}, return_tensors="pt", padding_side="right")
            found = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            self.model.check_inputs(found, where="the texts", first=start)
            yield found

    def _ids(self, text: Text) -> list[int]:
        """Return token ids as TRL's RewardTrainer makes them: a text ends with the end of a sequence."""
        if isinstance(text, str):
            end = self.tokenizer.eos_token or ""
            return list(self.tokenizer(text if text.endswith(end) else text + end)["input_ids"])
        return list(self.tokenizer.apply_chat_template(list(text), tokenize=True, return_dict=True)["input_ids"])

    def _summary(self, rewards: Tensor) -> Rewards:
        group = self.model.member_group
        mean = group.mean(rewards)
        std = group.mean((rewards - mean).square()).sqrt()
        return Rewards(mean, std, mean - self.bound * std)


def best(rewards: Tensor, *, by: str, bound: float) -> int:
    """Return the best of N candidates, given the rewards [M, N] of the members; see ``RewardModel.best_of_n``."""
    centred = rewards - rewards.mean(1, keepdim=True)
    mean = centred.mean(0)
    value = mean if by == "mean" else mean - bound * (centred - mean).square().mean(0).sqrt()
    return int(value.argmax())


def _joined(prompt: Text, answer: Text) -> Text:
    match prompt, answer:
        case str() as before, str() as after:
            return before + after
        case (str(), _) | (_, str()):
            raise ValueError("prompts and completions must both be texts, or both be lists of messages")
    return [*prompt, *answer]
