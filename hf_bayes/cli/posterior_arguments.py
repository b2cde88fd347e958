"""The arguments of the commands that use a saved posterior: its place, and the way in which it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState

from hf_bayes.cli.data import texts_in
from hf_bayes.cli.padding import give_padding
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.loading.posterior import load_tokenizer
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors.posterior import Posterior


@dataclass
class PosteriorArguments:
    """The posterior and its predictions."""

    _argument_group_name = "posterior"

    posterior: str = field(metadata={"help": "A posterior directory or a repository of the Hub."})
    base_model: str | None = field(default=None, metadata={"help": "Folder or id of the base model, if it has moved."})
    members: int | None = field(default=None, metadata={"help": "Number of members. Default: all."})
    predict: str | None = field(
        default=None, metadata={"help": "members, linearised, distilled and others. Default: as stored."}
    )
    check_base: bool = field(
        default=True, metadata={"help": "Refuse a base model with other weights than the posterior was made with."}
    )
    calibrated: bool = field(default=True, metadata={"help": "Apply the temperature stored with the posterior."})

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of ``from_pretrained``."""
        return {
            "members": self.members, "base_model": self.base_model, "check_base": self.check_base,
            "prediction": self.predict, "calibrated": self.calibrated,
        }  # fmt: skip

    def text_pipeline(self, work: str) -> Any:
        """Return the text-generation pipeline of a language model's posterior.

        Args:
            work: the verb of the command, for the error message.
        Raises:
            ValueError: for a posterior of another task.
        """
        posterior = Posterior.from_pretrained(self.posterior)
        task = posterior.config.task
        if task != BayesianModelForCausalLM.task:
            raise ValueError(
                f"hf-bayes {work} takes the posterior of a language model, got {self.posterior}, a posterior for "
                f"{task}: use hf-bayes evaluate, or hf_bayes.pipeline in Python"
            )
        tokenizer = load_tokenizer(self.posterior, posterior=posterior, base_model=self.base_model)
        give_padding(tokenizer)  # batches of texts of several lengths
        model = BayesianModelForCausalLM.from_pretrained(posterior, **self.loading)
        model.to(PartialState().device)  # the device that training would use
        return pipeline(model=model, tokenizer=tokenizer)


def given_texts(texts: Sequence[str], file: str | None, *, column: str, flag: str) -> list[str]:
    """Return the texts of the command line, or of a file as ``texts_in`` reads it.

    Args:
        column: the column of the texts in a file of rows.
        flag: the flag of the texts, for the error message.
    Raises:
        ValueError, OSError: for texts from both or from neither, and as ``texts_in``.
    """
    if bool(texts) == bool(file):
        given = "both" if texts else "neither"
        raise ValueError(f"give the text by {flag} or by --file, got {given}")
    if file is None:
        return list(texts)
    return texts_in(file, column)
