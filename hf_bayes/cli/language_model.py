"""A causal language model and windows of texts to train it on."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import TaskType
from transformers import DataCollatorForSeq2Seq

from hf_bayes.cli.arguments import TRAINABLE, DataArguments, ModelArguments
from hf_bayes.cli.scripts import ModelAndData
from hf_bayes.cli.token_windows import token_windows, window_length
from hf_bayes.models.input_check import context_of
from hf_bayes.models.loading.base_model import core_of
from hf_bayes.training.arguments import BayesianTrainingArguments


@dataclass
class TrainingWindowArguments:
    """The windows over the texts. By default every token counts once, with half a window of context.

    The posteriors paper has a window of 300, an overlap of 100 and 50 tokens that count (app. F).
    """

    _argument_group_name = "windows of a language model"

    window: int | None = field(
        default=None,
        metadata={"help": "Tokens in a window. Default: 256, or the model's context if less."},
    )
    overlap: int | None = field(
        default=None, metadata={"help": "Tokens that neighbours share. Default: half a window."}
    )
    loss_tokens: int | None = field(
        default=None, metadata={"help": "Last tokens of a window that count. Default: all new ones."}
    )
    score_start: bool = field(default=True, metadata={"help": "Count all tokens of the first window of a text."})
    join_texts: bool = field(default=False, metadata={"help": "Treat all rows as one text, for many short rows."})


def language_model(
    model_args: ModelArguments,
    data_args: DataArguments,
    windows: TrainingWindowArguments,
    args: BayesianTrainingArguments,
    *,
    subspace: str = TRAINABLE,
) -> ModelAndData:
    """Load the model with its LoRA, and cut the texts into windows.

    Args:
        subspace: the random parameters, see ``hf_bayes.core.layout.select``.
    Raises:
        ValueError: for windows that do not fit the model, and as ``DataArguments.load``.
    """
    tokenizer = model_args.load_tokenizer()
    model = model_args.add_lora(model_args.load_language_model(), TaskType.CAUSAL_LM, subspace=subspace)
    length = window_length(windows.window, context_of(core_of(model))[0], default=256)
    with args.main_process_first(desc="data"):
        splits = {
            split: token_windows(
                rows,
                tokenizer,
                length=length,
                overlap=length // 2 if windows.overlap is None else windows.overlap,
                loss_tokens=windows.loss_tokens,
                score_start=windows.score_start,
                text_column=data_args.text_column,
                join=windows.join_texts,
            )
            for split, rows in data_args.load(args.seed).rows.items()
        }
    return ModelAndData(model, splits["train"], splits.get("validation"), DataCollatorForSeq2Seq(tokenizer), tokenizer)
