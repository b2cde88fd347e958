"""``hf-bayes continual``: learn one text after another (posteriors section 5.2 and appendix E)."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from datasets import concatenate_datasets
from peft import PeftModel, TaskType
from tqdm import tqdm
from transformers import DataCollatorForSeq2Seq, set_seed

from hf_bayes.cli.command import Command
from hf_bayes.cli.continual_arguments import (
    ContinualArguments,
    LoraArguments,
    methods,
    overlap_of,
    refuse_push,
    windows,
)
from hf_bayes.cli.continual_results import Results, figures, losses_on, table
from hf_bayes.cli.data import load_episode
from hf_bayes.cli.json_text import json_text
from hf_bayes.cli.output_file import write_file
from hf_bayes.cli.progress import one_bar
from hf_bayes.cli.scripts import begin, continuing_comparison
from hf_bayes.cli.token_windows import window_length
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.hashing import fingerprint_json
from hf_bayes.core.layout import select
from hf_bayes.models.input_check import context_of
from hf_bayes.models.loading.base_model import describe
from hf_bayes.posteriors.storage import check_folder
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.checkpoints import WORDS, newest_complete
from hf_bayes.training.checks.arguments import refuse_arguments
from hf_bayes.training.trainer import BayesianTrainer

SETTINGS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "num_train_epochs", "max_steps",
    "seed", "data_seed", "num_data", "data_unit", "minibatch", "bf16",
)  # fmt: skip
"""Training arguments that the results depend on, beside the rows of an update."""


def agree(file: Path, settings: dict[str, Any], *, writes: bool) -> None:
    """Check that the folder was made with these settings. A new folder records them."""
    settings = json.loads(json.dumps(settings, default=str))
    if file.exists():
        found = json.loads(file.read_text())
        if differing := [key for key in settings if found.get(key) != settings[key]]:
            raise ValueError(f"{file.parent} was made with other {differing}: choose another output_dir")
    elif writes:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(settings), flag="--output_dir")


def run(model_args: LoraArguments, given: ContinualArguments, args: BayesianTrainingArguments) -> Results:
    """Train each method on each episode, test on all episodes, and save. Results that exist already are kept.

    Returns:
        {method: [[test loss of episode e] after episode n]}.
    """
    refuse_push(args)
    configs = methods(given)  # wrong settings are refused before a model is loaded
    for config in configs.values():  # and where results are finished, so that no trainer would check them
        refuse_arguments(args, config, None, {})
    check_folder(str(args.output_dir))
    output, tokenizer = Path(str(args.output_dir)), model_args.load_tokenizer()
    first = _new_model(model_args, args)
    window = window_length(given.window, context_of(first.get_base_model())[0], default=2048)
    cut = {"length": window, "overlap": overlap_of(given.stride, window), "text_column": given.text_column}
    texts = [load_episode(e, held_out=given.held_out, text_column=given.text_column) for e in given.episodes]
    train, test = (windows(given.episodes, part, tokenizer, **cut) for part in zip(*texts, strict=True))
    settings = {**dataclasses.asdict(model_args), **dataclasses.asdict(given), "window": window, "methods": None}
    settings |= {name: getattr(args, name) for name in SETTINGS}
    settings[WORDS["rows_per_update"]] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    # the weights at a path may have changed, and only some methods have a prior that detects this
    about = describe(first, first.get_base_model(), select(first), tokenizer)
    settings |= {f"fingerprint of {part}": value for part, value in about["fingerprint"].items()}
    del first
    settings["texts"] = [fingerprint_json([list(part[given.text_column]) for part in parts]) for parts in texts]
    for name in given.methods:
        agree(output / name / "settings.json", settings, writes=args.process_index == 0)

    results: dict[str, list[list[float]]] = {}
    hide = bool(args.disable_tqdm) or args.process_index > 0
    with tqdm(total=len(given.methods) * len(train), unit="episode", disable=hide) as bar:
        learner = _Learner(model_args, args, tokenizer, test, bar)
        for name, config in configs.items():
            folder, before, results[name] = output / name, None, []
            if name == "offline":  # as many updates as all episodes together, on all data
                found = learner.learn(concatenate_datasets(train), folder, config, None, len(train))
                results[name] = [found] * len(train)
                continue
            for index, rows in enumerate(train):
                results[name].append(learner.learn(rows, folder / f"episode_{index}", config, before))
                before = None if name == "single" else folder / f"episode_{index}"
    if args.process_index == 0:
        content = json_text({"settings": settings, "losses": results}, indent=1)
        write_file(output / "results.json", content, flag="--output_dir")
    return results


class _Learner:
    """Runs of single episodes, each tested on all of them."""

    def __init__(self, model_args: LoraArguments, args: BayesianTrainingArguments, tokenizer: Any, test: Any, bar: Any):
        self._model_args, self._args, self._tokenizer, self._test, self._bar = model_args, args, tokenizer, test, bar

    def learn(self, rows: Any, directory: Path, config: MethodConfig, before: Path | None, scale: int = 1) -> Any:
        """Train on ``rows``, from the last posterior's adapter or with it as the prior. Return the test losses."""
        self._bar.set_postfix_str("/".join(directory.parts[-2:]))
        file = directory / "losses.json"
        found = json.loads(file.read_text())["losses"] if file.exists() else None
        if found is None:
            trainer = self._trained(rows, directory, config, before, scale)
            found = losses_on(trainer, self._test, trainer.data_collator)
            if trainer.is_world_process_zero():
                write_file(file, json.dumps({"losses": found}), flag="--output_dir")
        self._bar.update(scale)
        return found

    def _trained(
        self, rows: Any, directory: Path, config: MethodConfig, before: Path | None, scale: int
    ) -> BayesianTrainer:
        own = copy.copy(self._args)
        own.output_dir, own.max_steps, own.map_updates = str(directory), self._args.max_steps * scale, 0
        prior = before if config.requirements.ends_in_gaussian else None
        quiet = own.log_level == "passive"
        own.disable_tqdm = quiet or own.disable_tqdm  # one bar counts the episodes
        trainer = BayesianTrainer(
            _new_model(self._model_args, self._args, before if prior is None else None),
            config if prior is None else dataclasses.replace(config, prior_std=None),
            own,
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(self._tokenizer),
            processing_class=self._tokenizer,
            prior=prior,
        )
        if quiet:
            one_bar(trainer)
        trainer.train(resume_from_checkpoint=newest_complete(directory))
        trainer.save_model()
        return trainer


def _new_model(model_args: LoraArguments, args: BayesianTrainingArguments, start: Path | None = None) -> Any:
    """Return the model with a new adapter, equal for all methods, or with the adapter of a directory."""
    base = model_args.load_language_model()
    if start is not None:
        return PeftModel.from_pretrained(base, start, is_trainable=True)
    set_seed(args.seed)
    return model_args.add_lora(base, TaskType.CAUSAL_LM)


def continual(model_args: LoraArguments, given: ContinualArguments, args: BayesianTrainingArguments) -> Results:
    """Learn one text after another, each posterior the prior of the next, and compare methods that do so.

    Writes results.json, two figures like 5 and 6 of the posteriors paper, and the posterior of every method after every
    episode. The same command continues an interrupted run.
    """
    if "single" not in given.methods:  # every other method is compared with it
        given.methods = ["single", *given.methods]
    begin(args)
    results = run(model_args, given, args)
    if args.process_index == 0:
        print(table(results))
        figures(results, given.episodes, Path(str(args.output_dir)))
    return results


COMMAND = Command(
    run=continual,
    arguments=(LoraArguments, ContinualArguments, BayesianTrainingArguments),
    example='continual --model_name_or_path gpt2 --episodes one.txt "more/*.txt" --output_dir continual',
    continuing=continuing_comparison,
    unused=frozenset({"push_to_hub", "hub_model_id"}),
)
