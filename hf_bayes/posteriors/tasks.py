"""The tasks that a posterior can be for, one row each. Whatever depends on the task reads it here.

The rows hold names only, so that files of posteriors can be checked without transformers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of model that transformers has an auto class for.

    Attributes:
        name: what ``posterior_config.json`` calls it.
        description: the models, in words, as errors name them.
        suffix: how the classes of its models end: ``AutoModel<suffix>`` loads the base, ``BayesianModel<suffix>`` the
            posterior.
        peft: peft's ``task_type``; None where peft has none.
        tag: the Hub's ``pipeline_tag``; our pipeline is "bayesian-" and this.
        unit: what one likelihood term is about, "token" or "example".
    """

    name: str
    description: str
    suffix: str
    peft: str | None
    tag: str
    unit: str

    @property
    def auto_class(self) -> str:
        """The name of the class of transformers that loads its base models."""
        return f"AutoModel{self.suffix}"

    @property
    def bayesian_class(self) -> str:
        """The name of our class."""
        return f"BayesianModel{self.suffix}"

    @property
    def pipeline(self) -> str:
        """The name of its pipeline."""
        return f"bayesian-{self.tag}"


_ROWS = (
    Task(name="causal_lm", description="decoder-only causal language models", suffix="ForCausalLM",
         peft="CAUSAL_LM", tag="text-generation", unit="token"),
    Task(name="sequence_classification", description="classifiers of sequences", suffix="ForSequenceClassification",
         peft="SEQ_CLS", tag="text-classification", unit="example"),
    Task(name="token_classification", description="classifiers of tokens", suffix="ForTokenClassification",
         peft="TOKEN_CLS", tag="token-classification", unit="token"),
    Task(name="image_classification", description="classifiers of images", suffix="ForImageClassification",
         peft=None, tag="image-classification", unit="example"),
    Task(name="audio_classification", description="classifiers of audio", suffix="ForAudioClassification",
         peft=None, tag="audio-classification", unit="example"),
    Task(name="image_text_to_text", description="decoder-only models that write text about images",
         suffix="ForImageTextToText", peft=None, tag="image-text-to-text", unit="token"),
)  # fmt: skip

TASKS: dict[str, Task] = {task.name: task for task in _ROWS}

SUPPORTED = ", ".join(f"{task.description} ({task.auto_class})" for task in _ROWS)
"""The models that may be attached, in words."""
