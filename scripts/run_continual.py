"""Learn one text after another, each posterior the prior of the next (posteriors section 5.2 and appendix E).

    python scripts/run_continual.py --model_name_or_path gpt2 --episodes one.txt "more/*.txt" \
        --output_dir continual --num_train_epochs 3

The script writes results.json, two figures like 5 and 6 of the paper, and the posterior of every method after every
episode. The same command continues an interrupted run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from continual_arguments import ContinualArguments, LoraArguments, methods, refuse_push, windows
from continual_results import Results, figures, table, test_losses
from datasets import concatenate_datasets
from peft import PeftModel, TaskType
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, set_seed

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, MAPConfig
from hf_bayes.cli.arguments import parse_arguments
from hf_bayes.cli.data import load_episode
from hf_bayes.cli.scripts import end_process_group
from hf_bayes.cli.token_windows import check_window
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.hashing import fingerprint_json
from hf_bayes.core.layout import select
from hf_bayes.models.base_model import describe
from hf_bayes.training.checkpoints import newest_complete

SETTINGS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "num_train_epochs", "max_steps",
    "seed", "data_seed", "num_data", "data_unit", "minibatch", "bf16",
)  # fmt: skip
"""Training arguments that the results depend on, beside the rows of an update."""


def write(file: Path, content: Any) -> None:
    """Write a JSON file completely. A killed process leaves the old file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, default=str))
    part.replace(file)


def agree(file: Path, settings: dict[str, Any], *, writes: bool) -> None:
    """Check that the folder was made with these settings. A new folder records them."""
    settings = json.loads(json.dumps(settings, default=str))
    if file.exists():
        found = json.loads(file.read_text())
        if differing := [key for key in settings if found.get(key) != settings[key]]:
            raise ValueError(f"{file.parent} was made with other {differing}: choose another output_dir")
    elif writes:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, settings)


def run(model_args: LoraArguments, given: ContinualArguments, args: BayesianTrainingArguments) -> Results:
    """Train each method on each episode, test on all episodes, and save. Results that exist already are kept.

    Returns:
        {method: [[test loss of episode e] after episode n]}.
    """
    refuse_push(args)
    output = Path(args.output_dir)
    tokenizer = model_args.load_tokenizer()
    collate = DataCollatorForSeq2Seq(tokenizer)

    def model(start: Path | None) -> PeftModel:
        """Return the model with a new adapter, equal for all methods, or with the adapter of a directory."""
        base = model_args.load_model(AutoModelForCausalLM)
        if start is not None:
            return PeftModel.from_pretrained(base, start, is_trainable=True)
        set_seed(args.seed)
        return model_args.add_lora(base, TaskType.CAUSAL_LM)

    first = model(None)
    # models with relative positions (Bloom) have no longest context
    window = given.window
    if window is None:
        window = min(2048, getattr(first.config, "max_position_embeddings", 2048))
    check_window(window, first.config)
    stride = window // 2 if given.stride is None else given.stride
    cut = {"length": window, "overlap": window - stride, "text_column": given.text_column}
    texts = [load_episode(e, held_out=given.held_out, text_column=given.text_column) for e in given.episodes]
    train, test = (windows(given.episodes, part, tokenizer, **cut) for part in zip(*texts, strict=True))
    settings = {**dataclasses.asdict(model_args), **dataclasses.asdict(given), "window": window, "methods": None}
    settings |= {name: getattr(args, name) for name in SETTINGS}
    settings["rows_per_update"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    # the weights at a path may have changed, and only some methods have a prior that detects this
    about = describe(first, first.get_base_model(), select(first), tokenizer)
    settings |= {f"fingerprint of {part}": value for part, value in about["fingerprint"].items()}
    del first
    settings["texts"] = [fingerprint_json([list(part[given.text_column]) for part in parts]) for parts in texts]
    for name in given.methods:
        agree(output / name / "settings.json", settings, writes=args.process_index == 0)

    def learn(rows: Any, directory: Path, config: MethodConfig, before: Path | None, scale: int = 1) -> Any:
        """Train on ``rows``, from the last posterior's adapter or with it as the prior. Return the test losses."""
        file = directory / "losses.json"
        if file.exists():
            return json.loads(file.read_text())["losses"]
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
            write(file, {"losses": found})
        return found

    results: dict[str, list[list[float]]] = {}
    for name, config in methods(given).items():
        folder, before, results[name] = output / name, None, []
        if name == "offline":  # as many updates as all episodes together, on all data
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
    """Parse the arguments, run, and show the results."""
    model_args, given, args = parse_arguments(LoraArguments, ContinualArguments, BayesianTrainingArguments)
    if "single" not in given.methods:  # every other method is compared with it
        given.methods = ["single", *given.methods]
    results = run(model_args, given, args)
    if args.process_index == 0:
        print(table(results))
        figures(results, given.episodes, Path(args.output_dir))


if __name__ == "__main__":
    main()
    end_process_group()
