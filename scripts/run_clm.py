"""Fine-tune a causal language model into a posterior.

    accelerate launch scripts/run_clm.py --model_name_or_path gpt2 --dataset book.txt --output_dir posterior \
        --method sghmc --num_train_epochs 3
    python scripts/run_clm.py --model_name_or_path gpt2 --dataset book.txt --output_dir posterior --method auto
    python scripts/run_clm.py run.yaml
    python scripts/run_clm.py --config run.yaml --num_train_epochs 5
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import TaskType
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, set_seed
from transformers.utils import logging

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, MethodArguments, ModelArguments, parse_arguments
from hf_bayes.cli.scripts import end_process_group, train_or_tune
from hf_bayes.cli.token_windows import check_window, token_windows


@dataclass
class WindowArguments(DataArguments):
    """The arguments of texts and their windows. By default every token counts once, with half a window of context."""

    window: int = field(default=256, metadata={"help": "Tokens in a window (300 in the posteriors paper, app. F)."})
    overlap: int | None = field(
        default=None, metadata={"help": "Tokens that neighbours share (100 in the paper). Default: half a window."}
    )
    loss_tokens: int | None = field(
        default=None, metadata={"help": "Last tokens of a window that count (50 in the paper). Default: all new ones."}
    )
    score_start: bool = field(default=True, metadata={"help": "Count all tokens of the first window of a text."})
    join_texts: bool = field(default=False, metadata={"help": "Treat all rows as one text: for many short rows."})


def main() -> None:
    """Parse the arguments, load the data and the model, train, and save."""
    model_args, method_args, data_args, args = parse_arguments(
        ModelArguments, MethodArguments, WindowArguments, BayesianTrainingArguments
    )
    logging.set_verbosity(args.get_process_log_level())
    set_seed(args.seed)  # a new adapter or head is then equal in every process and in every run
    method = method_args.config()

    tokenizer = model_args.load_tokenizer()
    model = model_args.add_lora(model_args.load_model(AutoModelForCausalLM), TaskType.CAUSAL_LM)
    check_window(data_args.window, model.config)

    with args.main_process_first(desc="data"):
        windows = {
            split: token_windows(
                rows,
                tokenizer,
                length=data_args.window,
                overlap=data_args.window // 2 if data_args.overlap is None else data_args.overlap,
                loss_tokens=data_args.loss_tokens,
                score_start=data_args.score_start,
                text_column=data_args.text_column,
                join=data_args.join_texts,
            )
            for split, rows in data_args.load(args.seed).items()
        }

    given = {
        "train_dataset": windows["train"], "eval_dataset": windows.get("validation"),
        "data_collator": DataCollatorForSeq2Seq(tokenizer),
        "processing_class": tokenizer, "subspace": method_args.subspace,
    }  # fmt: skip
    train_or_tune(model, args, method, chosen=method_args, **given)


if __name__ == "__main__":
    main()
    end_process_group()
