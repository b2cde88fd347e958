"""What scripts share: arguments from the command line or a YAML or JSON file, the model they name, and the run."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from datasets import DatasetDict
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from hf_bayes.cli.data import load_splits
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.registry import from_dict
from hf_bayes.training.trainer import BayesianTrainer


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-4 for a string; everybody who writes a learning rate means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass
class ModelArguments:
    """The model and its LoRA."""

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a local folder."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a Hub model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run modelling code of the Hub repository."})
    dtype: str = field(default="auto", metadata={"help": "Of the frozen weights; random ones are float32."})
    config_overrides: dict | str | None = field(
        default=None, metadata={"help": "Fields of the model's config, as JSON: dropout is best turned off."}
    )
    lora_rank: int = field(
        default=8, metadata={"help": "Rank of the LoRA that becomes random, with a classifier's head; 0: no LoRA."}
    )
    lora_alpha: int = field(default=16, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_targets: list[str] | None = field(default=None, metadata={"help": "Layers; peft's choice by default."})
    lora_layers: list[int] | None = field(default=None, metadata={"help": "Indices of blocks; all by default."})

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Where it has no padding token it pads with its last one: padding is never read."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_name_or_path, **self._repository)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def load_model(self, auto_class: Any, **fields: Any) -> PreTrainedModel:
        """The model; ``fields`` of its config give way to ``config_overrides``."""
        fields = {**fields, **mapping(self.config_overrides)}
        return auto_class.from_pretrained(self.model_name_or_path, dtype=self.dtype, **self._repository, **fields)

    def add_lora(self, model: PreTrainedModel, task_type: TaskType) -> nn.Module:
        """The model with its LoRA, if it gets one."""
        if not self.lora_rank:
            return model
        lora = LoraConfig(
            task_type=task_type,
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,
            target_modules=self.lora_targets,
            layers_to_transform=self.lora_layers,
        )
        return get_peft_model(model, lora)

    @property
    def _repository(self) -> dict[str, Any]:
        return {"revision": self.model_revision, "trust_remote_code": self.trust_remote_code}


@dataclass
class MethodArguments:
    """What of the model is random, and the method."""

    subspace: str = field(
        default="trainable",
        metadata={
            "help": "What is random: trainable; with --lora_rank 0 last_layer, last_block, all or a regular expression."
        },
    )
    method: str = field(default="sghmc", metadata={"help": "A name of hf_bayes.METHODS."})
    method_args: dict | str | None = field(default=None, metadata={"help": "Fields of its config, as JSON."})

    def config(self) -> MethodConfig:
        """The method's config, see ``method_config``."""
        return method_config(self.method, self.method_args)


@dataclass
class DataArguments:
    """Texts to train and to evaluate on."""

    dataset: str = field(metadata={"help": "A .txt, .jsonl, .csv or .parquet file or glob, or a data set of the Hub."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    validation_file: str | None = field(default=None, metadata={"help": "Local files to evaluate on."})
    validation_fraction: float = field(
        default=0.1, metadata={"help": "Held out where there is no validation split; 0: nothing is evaluated then."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the text."})

    def load(self, seed: int) -> DatasetDict:
        """The splits "train" and, unless nothing is held out, "validation", see ``load_splits``."""
        return load_splits(
            self.dataset,
            config=self.dataset_config,
            validation_file=self.validation_file,
            validation_fraction=self.validation_fraction,
            text_column=self.text_column,
            seed=seed,
        )


def train_and_save(trainer: BayesianTrainer) -> None:
    """Train (or go on from ``resume_from_checkpoint``), evaluate on rows held out if any are, save, and push if asked.

    ``resume_from_checkpoint`` is a folder, or in any case of letters "true" for the newest complete checkpoint of
    output_dir, or "false" for none: what arrives from a file or a command line is text.
    """
    given = trainer.args.resume_from_checkpoint
    words = {"true": True, "false": None}
    trainer.train(resume_from_checkpoint=words.get(given.lower(), given) if isinstance(given, str) else given)
    metrics = None if trainer.eval_dataset is None else trainer.evaluate()
    if metrics is not None:
        trainer.log_metrics("eval", metrics)
    trainer.save_model()
    if metrics is not None:
        trainer.save_metrics("eval", metrics)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


def end_process_group() -> None:
    """The last line of a launched script, after the function that made the trainer has returned.

    gloo's threads end with the last reference to their group, and a trainer, which is part of circles, would hold its
    groups until the interpreter is taken down: what they meet then aborts a process that is done.
    """
    PartialState().destroy_process_group()
    gc.collect()


def parse_arguments(*types: Any, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One object of each dataclass: ``script [--config] FILE [--field value ...]`` or fields alone.

    FILE is a .yaml, .yml or .json mapping of field names to values; fields given on the command line win over it.

    Args:
        types: dataclasses, as for transformers' ``HfArgumentParser``.
        arguments: the command line, ``sys.argv[1:]`` by default.
    Raises:
        ValueError: for a file that is no mapping, or a field that no dataclass has.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and Path(given[0]).suffix in (".yaml", ".yml", ".json"):
        given = ["--config", *given]
    if "--config" in given:
        place = given.index("--config")
        if place + 1 == len(given):
            raise ValueError("--config needs a file")
        file = given[place + 1]
        # First the file, then the flags: of two equal flags argparse takes the last.
        given = [*_as_flags(_read(file), types, where=file), *given[:place], *given[place + 2 :]]
    parser = HfArgumentParser(types)
    return tuple(parser.parse_args_into_dataclasses(args=given, look_for_args_file=False))


def mapping(fields: dict[str, Any] | str | None) -> dict[str, Any]:
    """Fields from a file (a mapping), from the command line (the JSON of one) or not given.

    Raises:
        ValueError: for text that is no JSON mapping.
    """
    if isinstance(fields, str):
        try:
            fields = json.loads(fields)
        except json.JSONDecodeError as error:
            raise ValueError(f"fields must be JSON such as '{{\"prior_std\": 0.1}}', got {fields!r}") from error
    if fields is not None and not isinstance(fields, dict):
        raise ValueError(f"fields must be a mapping, got {fields!r}")
    return fields or {}


def method_config(name: str, fields: dict[str, Any] | str | None = None) -> MethodConfig:
    """The config of a method from its name and its fields, see ``mapping``.

    Raises:
        ValueError: for an unknown method or field, or a refused value.
    """
    return from_dict({**mapping(fields), "name": name})


def _read(file: str) -> dict[str, Any]:
    text = Path(file).read_text()
    content = json.loads(text) if file.endswith(".json") else yaml.load(text, _Loader)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a mapping of fields to values, got {type(content).__name__}")
    return content


def _as_flags(values: dict[str, Any], types: Sequence[Any], *, where: str) -> list[str]:
    """As if typed: the parser then checks choices and converts, alike for files and for the command line."""
    defaults = {field.name: field.default for kind in types for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(values) - set(defaults))
    if unknown:
        raise ValueError(f"{where} has fields that this script does not know: {', '.join(unknown)}")
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            if defaults[name] is not None:
                raise ValueError(f"{where}: {name} cannot be null; leave it out for its default")
            continue
        items = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *(json.dumps(i) if isinstance(i, (dict, bool)) else str(i) for i in items)]
    return flags
