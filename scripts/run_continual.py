"""Learn one text after another, each posterior the prior of the next (posteriors section 5.2 and appendix E).

    python scripts/run_continual.py --model_name_or_path gpt2 --episodes one.txt "more/*.txt" \
        --output_dir continual --strength 1 --prior_std 0.1 --learning_rate 1e-3 --num_train_epochs 3

Leaves results.json, two figures as the paper's 5 and 6, and the posterior of every method after every episode. The same
command goes on where it was stopped.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from continual_results import figures, table, test_losses
from datasets import concatenate_datasets
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, LaplaceConfig, MAPConfig, MeanFieldConfig
from hf_bayes.checkpoints import newest_complete
from hf_bayes.cli import mapping, parse_arguments
from hf_bayes.config import MethodConfig
from hf_bayes.data import load_episode, token_windows

Losses = dict[str, list[list[float]]]


@dataclass
class ModelArguments:
    """The base model and its LoRA."""

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a local folder."})
    dtype: str = field(default="auto", metadata={"help": "Of the frozen weights; random ones are float32."})
    lora_rank: int = field(default=8, metadata={"help": "Rank."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_targets: list[str] | None = field(default=None, metadata={"help": "Layers; peft's choice by default."})
    lora_layers: list[int] | None = field(default=None, metadata={"help": "Indices of blocks; all by default."})


@dataclass
class ContinualArguments:
    """The episodes, and how they are learnt."""

    episodes: list[str] = field(metadata={"help": "Files, globs, or NAME[/CONFIG][:SPLIT] of the Hub, in this order."})
    methods: list[str] = field(
        default_factory=lambda: ["sequential", "offline", "laplace_diagonal", "laplace_kronecker", "mean_field"],
        metadata={"help": "Of sequential, offline, laplace_diagonal, laplace_kronecker, mean_field."},
    )
    held_out: float = field(default=0.15, metadata={"help": "The last part of each episode, for testing."})
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    window: int | None = field(default=None, metadata={"help": "Tokens; 2048, or the model's context if shorter."})
    stride: int | None = field(
        default=None, metadata={"help": "New tokens in a window, the others are their context; half a window."}
    )
    prior_std: float = field(default=0.1, metadata={"help": "Of the first prior, and of methods that inherit none."})
    strength: float = field(default=1.0, metadata={"help": "lambda of precision_new = precision_old + lambda F."})
    estimator: str = field(
        default="ef_sequence", metadata={"help": "F: ef_sequence (the paper's), ef_token, ggn: see docs/laplace.md."}
    )
    mean_field_args: dict | str | None = field(default=None, metadata={"help": "Fields of MeanFieldConfig, as JSON."})


def methods(given: ContinualArguments) -> dict[str, MethodConfig]:
    """What each row of the table trains with."""
    common: dict[str, Any] = {"prior_std": given.prior_std}
    laplace = {**common, "estimator": given.estimator, "strength": given.strength}
    known = {
        **dict.fromkeys(("single", "sequential", "offline"), MAPConfig(**common)),
        **{f"laplace_{name}": LaplaceConfig(structure=name, **laplace) for name in ("diagonal", "kronecker")},
        "mean_field": MeanFieldConfig(**common, **mapping(given.mean_field_args)),
    }
    if unknown := sorted(set(given.methods) - set(known)):
        raise ValueError(f"methods {unknown} are unknown: choose of {', '.join(known)}")
    return {name: known[name] for name in given.methods}


def run(model_args: ModelArguments, given: ContinualArguments, args: BayesianTrainingArguments) -> Losses:
    """For each method and episode: train, test on all episodes, save. What is there already is not made again.

    Returns:
        {method: [[test loss of episode e] after episode n]}.
    """
    output = Path(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding never enters the loss: any token will do
    collate = DataCollatorForSeq2Seq(tokenizer)

    def model(start: Path | None) -> PeftModel:
        """With a fresh adapter, the same for all methods, or with the one of a directory."""
        base = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=model_args.dtype)
        if start is not None:
            return PeftModel.from_pretrained(base, start, is_trainable=True)
        set_seed(args.seed)
        rank, layers, targets = model_args.lora_rank, model_args.lora_layers, model_args.lora_targets
        return get_peft_model(base, LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=model_args.lora_alpha, target_modules=targets,
            layers_to_transform=layers,
        ))  # fmt: skip

    window = given.window or min(2048, model(None).config.max_position_embeddings)
    cut = {"length": window, "overlap": window - (given.stride or window // 2), "text_column": given.text_column}
    texts = [load_episode(e, held_out=given.held_out, text_column=given.text_column) for e in given.episodes]
    train, test = ([token_windows(rows, tokenizer, **cut) for rows in part] for part in zip(*texts, strict=True))
    settings = {**dataclasses.asdict(model_args), **dataclasses.asdict(given), "window": window, "methods": None}
    settings |= {name: getattr(args, name) for name in ("learning_rate", "num_train_epochs", "max_steps", "seed")}

    def learn(rows: Any, directory: Path, config: MethodConfig, before: Path | None, scale: int = 1) -> Any:
        """Test losses after training on ``rows``, from the last posterior's adapter or with it as the prior."""
        file = directory / "losses.json"
        if file.exists():
            done = json.loads(file.read_text())
            if differing := [key for key in settings if done["settings"].get(key) != settings[key]]:
                raise ValueError(f"{directory} was made with other {differing}: choose another output_dir")
            return done["losses"]
        own = copy.copy(args)
        own.output_dir, own.max_steps, own.map_updates = str(directory), args.max_steps * scale, 0
        prior = None if isinstance(config, MAPConfig) else before
        trainer = BayesianTrainer(
            model(before if prior is None else None),
            config if prior is None else dataclasses.replace(config, prior_std=None),
            own, train_dataset=rows, data_collator=collate, processing_class=tokenizer, prior=prior,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=newest_complete(directory))
        trainer.save_model()
        found = test_losses(trainer, test, collate)
        if trainer.is_world_process_zero():
            file.write_text(json.dumps({"settings": settings, "losses": found}))
        return found

    results: Losses = {}
    for name, config in methods(given).items():
        folder, before, results[name] = output / name, None, []
        if name == "offline":  # all updates that the others make, on all data
            found = learn(concatenate_datasets(train), folder, config, None, len(train))
            results[name] = [found] * len(train)
            continue
        for index, rows in enumerate(train):
            results[name].append(learn(rows, folder / f"episode_{index}", config, before))
            before = None if name == "single" else folder / f"episode_{index}"
    if args.process_index == 0:
        (output / "results.json").write_text(json.dumps({"settings": settings, "losses": results}, indent=1))
    return results


def main() -> None:
    """Parse, run, show."""
    model_args, given, args = parse_arguments(ModelArguments, ContinualArguments, BayesianTrainingArguments)
    if "single" not in given.methods:  # the others are compared with it
        given.methods = ["single", *given.methods]
    results = run(model_args, given, args)
    if args.process_index == 0:
        print(table(results))
        figures(results, given.episodes, Path(args.output_dir))


if __name__ == "__main__":
    main()
