"""Fine-tune a causal language model into a posterior.

    accelerate launch scripts/run_clm.py --model_name_or_path gpt2 --dataset book.txt --output_dir posterior \
        --method sghmc --method_args '{"num_chains": 8, "prior_std": 0.1}' --learning_rate 1e-2 --num_train_epochs 3
    python scripts/run_clm.py run.yaml
    python scripts/run_clm.py --config run.yaml --learning_rate 3e-3
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed
from transformers.utils import logging

from hf_bayes import BayesianTrainer, BayesianTrainingArguments
from hf_bayes.cli import mapping, method_config, parse_arguments
from hf_bayes.data import load_splits, token_windows


@dataclass
class ModelArguments:
    """The model, what of it is random, and the method."""

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a local folder."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a Hub model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run modelling code of the Hub repository."})
    dtype: str = field(default="auto", metadata={"help": "Of the frozen weights; random ones are float32."})
    config_overrides: dict | str | None = field(
        default=None, metadata={"help": "Fields of the model's config, as JSON: dropout is best turned off."}
    )
    lora_rank: int = field(default=8, metadata={"help": "Rank of the LoRA that becomes random; 0: no LoRA."})
    lora_alpha: int = field(default=16, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_targets: list[str] | None = field(default=None, metadata={"help": "Layers; peft's choice by default."})
    subspace: str = field(
        default="trainable",
        metadata={
            "help": "What is random: trainable, last_layer, last_block or a regular expression (with --lora_rank 0)."
        },
    )
    method: str = field(default="sghmc", metadata={"help": "A name of hf_bayes.METHODS."})
    method_args: dict | str | None = field(default=None, metadata={"help": "Fields of its config, as JSON."})


@dataclass
class DataArguments:
    """The text and its windows: by default all tokens count once, each with half a window of context."""

    dataset: str = field(metadata={"help": "A .txt, .jsonl, .csv or .parquet file or glob, or a data set of the Hub."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    validation_file: str | None = field(default=None, metadata={"help": "Local files to evaluate on."})
    validation_fraction: float = field(default=0.1, metadata={"help": "Held out where there is no validation split."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    window: int = field(default=256, metadata={"help": "Tokens in a window (300 in the posteriors paper, app. F)."})
    overlap: int | None = field(
        default=None, metadata={"help": "Tokens that neighbours share (there 100); half a window."}
    )
    loss_tokens: int | None = field(
        default=None, metadata={"help": "How many last tokens of a window count (there 50); all new ones by default."}
    )
    score_start: bool = field(default=True, metadata={"help": "Whether all tokens of a text's first window count."})
    join_texts: bool = field(default=False, metadata={"help": "Treat all rows as one text: for many short rows."})


def main() -> None:
    """Parse, load, train, save."""
    model_args, data_args, args = parse_arguments(ModelArguments, DataArguments, BayesianTrainingArguments)
    logging.set_verbosity(args.get_process_log_level())
    set_seed(args.seed)  # a fresh adapter or head is then the same in every process, and in every run
    method = method_config(model_args.method, model_args.method_args)

    hub = {"revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, **hub)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding never enters the loss: any token will do
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, dtype=model_args.dtype, **hub, **mapping(model_args.config_overrides)
    )
    if model_args.lora_rank:
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=model_args.lora_rank,
            lora_alpha=model_args.lora_alpha,
            target_modules=model_args.lora_targets,
        )
        model = get_peft_model(model, lora)

    with args.main_process_first(desc="data"):
        texts = load_splits(
            data_args.dataset,
            config=data_args.dataset_config,
            validation_file=data_args.validation_file,
            validation_fraction=data_args.validation_fraction,
            text_column=data_args.text_column,
            seed=args.seed,
        )
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
            for split, rows in texts.items()
        }

    trainer = BayesianTrainer(
        model=model,
        method=method,
        args=args,
        subspace=model_args.subspace,
        train_dataset=windows["train"],
        eval_dataset=windows["validation"],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_metrics("eval", metrics)
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
