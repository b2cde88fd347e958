"""The tasks of posteriors, one row for each. All code that depends on the task reads this table.

The rows hold only names, so that the files of a posterior can be checked without transformers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of model with an auto class of transformers.

    Attributes:
        name: the name in ``posterior_config.json``.
        description: the models, in the words of error messages.
        suffix: the end of the class names: ``AutoModel<suffix>`` loads the base, ``BayesianModel<suffix>`` the
            posterior.
        peft: peft's ``task_type``, or None if peft has none.
        tag: the Hub's ``pipeline_tag``. Our pipeline is named "bayesian-<tag>".
        unit: the unit of one likelihood term, "token" or "example".
    """

    name: str
    description: str
    suffix: str
    peft: str | None
    tag: str
    unit: str

    @property
    def auto_class(self) -> str:
        """The name of the transformers class that loads the base model."""
        return f"AutoModel{self.suffix}"

    @property
    def pipeline(self) -> str:
        """The name of the pipeline."""
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
PEFT_TASK_TYPES = {task.name: task.peft for task in _ROWS}
"""The name of a task -> the name that peft has for it, or None."""

SUPPORTED = ", ".join(f"{task.description} ({task.auto_class})" for task in _ROWS)
"""The models that can be attached, in the words of error messages."""
