"""Arguments of the training scripts, from the command line or from a YAML or JSON file, and the objects they name."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import DatasetDict
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from hf_bayes.cli.data import load_splits
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.registry import from_dict
from hf_bayes.posteriors.storage.json_types import as_list


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-4 as a number. YAML 1.1 reads it as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass
class ModelArguments:
    """The arguments of the model and its LoRA."""

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a local folder."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a Hub model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run modelling code of the Hub repository."})
    dtype: str = field(default="auto", metadata={"help": "Dtype of the frozen weights. Random weights are float32."})
    config_overrides: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Fields of the model's config as JSON. It is best to turn dropout off."}
    )
    lora_rank: int = field(
        default=8, metadata={"help": "Rank of the LoRA, which is random (like the head of a classifier). 0: no LoRA."}
    )
    lora_alpha: int = field(default=16, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_targets: list[str] | None = field(default=None, metadata={"help": "Names of layers. Default: peft's choice."})
    lora_layers: list[int] | None = field(default=None, metadata={"help": "Indices of blocks. Default: all."})

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer. A tokenizer without a padding token pads with its end-of-sequence token."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_name_or_path, **self._repository)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def load_model(self, auto_class: Any, **fields: Any) -> PreTrainedModel:
        """Return the model with these ``fields`` of its config. ``config_overrides`` take precedence."""
        fields = {**fields, **mapping(self.config_overrides)}
        model: PreTrainedModel = auto_class.from_pretrained(
            self.model_name_or_path, dtype=self.dtype, **self._repository, **fields
        )
        return model

    def add_lora(self, model: PreTrainedModel, task_type: TaskType) -> nn.Module:
        """Return the model with its LoRA, or unchanged if ``lora_rank`` is 0."""
        adapted: nn.Module = model
        if not self.lora_rank:
            return adapted
        lora = LoraConfig(
            task_type=task_type,
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,
            target_modules=self.lora_targets,
            layers_to_transform=self.lora_layers,
        )
        adapted = get_peft_model(model, lora)
        return adapted

    @property
    def _repository(self) -> dict[str, Any]:
        return {"revision": self.model_revision, "trust_remote_code": self.trust_remote_code}


@dataclass
class MethodArguments:
    """The arguments of the random parameters and the method."""

    subspace: str = field(
        default="trainable",
        metadata={
            "help": "Random weights: trainable; with --lora_rank 0 last_layer, last_block, all or a regular expression."
        },
    )
    method: str | None = field(
        default=None,
        metadata={
            "help": "Name of a method in hf_bayes.METHODS; or auto, which compares several on held-out rows. Default: "
            "sghmc, whose temperature the held-out rows choose."
        },
    )
    method_args: dict[str, Any] | str | None = field(default=None, metadata={"help": "Fields of its config as JSON."})
    budget: int | None = field(
        default=None,
        metadata={
            "help": "Gradients of all runs of --method auto together. Default: ten times one run of four chains."
        },
    )

    @property
    def compares(self) -> bool:
        """True for ``--method auto``."""
        return self.method == "auto"

    def config(self) -> MethodConfig | None:
        """Return the config of the method, see ``method_config``; None if the trainer, or a comparison, chooses one.

        Raises:
            ValueError: for fields of a method that is not named, refused ones, or a budget without a comparison.
        """
        if self.method in (None, "auto") and self.method_args:
            raise ValueError(
                f"method_args={self.method_args!r} are fields of a method: name it with --method, or leave them out"
            )
        if not self.compares and self.budget is not None:
            given = "no --method" if self.method is None else f"--method {self.method}"
            raise ValueError(f"--budget={self.budget} is for --method auto, got {given}: leave it out")
        return None if self.method in (None, "auto") else method_config(self.method, self.method_args)


@dataclass
class DataArguments:
    """The arguments of the texts for training and evaluation."""

    dataset: str = field(metadata={"help": "A .txt, .jsonl, .csv or .parquet file or glob, or a data set of the Hub."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    validation_file: str | None = field(default=None, metadata={"help": "Local files to evaluate on."})
    validation_fraction: float = field(
        default=0.1, metadata={"help": "Share of rows to hold out if there is no validation split. 0: no evaluation."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the text."})

    def load(self, seed: int) -> DatasetDict:
        """Return the splits "train" and "validation", see ``load_splits``."""
        return load_splits(
            self.dataset,
            config=self.dataset_config,
            validation_file=self.validation_file,
            validation_fraction=self.validation_fraction,
            text_column=self.text_column,
            seed=seed,
        )


def parse_arguments(*types: Any, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Return one object of each dataclass from ``[--config] FILE [--field value ...]``, or from fields alone.

    FILE is a .yaml, .yml or .json mapping of field names to values. Fields on the command line take precedence.

    Args:
        types: dataclasses, as for transformers' ``HfArgumentParser``.
        arguments: the command line, by default ``sys.argv[1:]``.
    Raises:
        ValueError: for a file that is not a mapping, or a field that no dataclass has.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and Path(given[0]).suffix in (".yaml", ".yml", ".json"):
        given = ["--config", *given]
    if "--config" in given:
        place = given.index("--config")
        if place + 1 == len(given):
            raise ValueError("--config needs a file")
        file = given[place + 1]
        # The file comes before the flags, because argparse takes the last of two equal flags.
        given = [*_as_flags(_read(file), types, where=file), *given[:place], *given[place + 2 :]]
    parser = HfArgumentParser(types)
    return tuple(parser.parse_args_into_dataclasses(args=given, look_for_args_file=False))


def mapping(fields: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return fields as a mapping: from a file (a mapping), the command line (JSON) or None.

    Raises:
        ValueError: for text that is not a JSON mapping.
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
    """Return the config of a method from its name and its fields, see ``mapping``.

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
    """Return the command-line flags of these values, so that one parser checks and converts files and flags alike."""
    defaults = {field.name: field.default for kind in types for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(values) - set(defaults))
    if unknown:
        raise ValueError(f"{where} has fields that this script does not have: {', '.join(unknown)}")
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            if defaults[name] is not None:
                raise ValueError(f"{where}: {name} cannot be null; leave it out for its default")
            continue
        items = as_list(value)
        flags += [f"--{name}", *(json.dumps(i) if isinstance(i, (dict, bool)) else str(i) for i in items)]
    return flags
