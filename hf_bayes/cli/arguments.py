"""The arguments of the training commands, and the objects that they name: model, method and data."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_bayes.cli.data import load_splits
from hf_bayes.cli.padding import give_padding
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.row_places import Splits
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import grouped
from hf_bayes.methods.registry import from_dict
from hf_bayes.models.loading.checkpoint_weights import Loaded, is_in_base, load_pretrained, warn_of_unused_weights

SUBSPACE_HELP = (
    "Random weights: trainable, last_layer, last_block, all, a pattern. Only trainable has a LoRA by default."
)
TRAINABLE = "trainable"
DEFAULT_RANK = 8
BUDGET_HELP = "Minibatch gradients of all runs together. Default: ten times one run of four chains."


@dataclass
class ModelArguments:
    """The arguments of the model and its LoRA."""

    _argument_group_name = "model"

    model_name_or_path: str = field(metadata={"help": "A model of the Hub or a local folder."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a Hub model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run modelling code of the Hub repository."})
    dtype: str = field(default="auto", metadata={"help": "Dtype of the frozen weights. Random weights are float32."})
    config_overrides: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Fields of the model's config as JSON. It is best to turn dropout off."}
    )
    lora_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of the random LoRA (the head of a classifier is random, too). 0: no LoRA. Default: 8, and 0 "
            "with another --subspace than trainable."
        },
    )
    lora_alpha: int = field(default=16, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_targets: list[str] | None = field(default=None, metadata={"help": "Names of layers. Default: peft's choice."})
    lora_layers: list[int] | None = field(default=None, metadata={"help": "Indices of blocks. Default: all."})

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer. A tokenizer without a padding token pads with its end-of-sequence token.

        Raises:
            ValueError: if there is none, or for settings of the model that no model has.
        """
        self._check()
        with loading("the tokenizer", self.model_name_or_path):
            tokenizer = AutoTokenizer.from_pretrained(self.model_name_or_path, **self._repository)
        give_padding(tokenizer)
        return tokenizer

    def load_model(self, auto_class: Any, **fields: Any) -> Loaded:
        """Return the model with these ``fields`` of its config, for ``check_weights``.

        Raises:
            ValueError: for a folder that holds no model, or one with an adapter, and for ``config_overrides`` with a
                field that no config has, or one of ``fields``.
        """
        self._check()
        given = mapping(self.config_overrides)
        if set_by_data := sorted(given.keys() & {*fields, *_named(fields)}):
            raise ValueError(
                f"config_overrides: the labels of the data set {', '.join(set_by_data)}, got "
                f"{given[set_by_data[0]]!r}: leave it out"
            )
        fields = _named({**fields, **given})
        self._check_overrides(self._config())
        with loading("the model", self.model_name_or_path):
            loaded = load_pretrained(
                auto_class, self.model_name_or_path, dtype=self.dtype, **self._repository, **fields
            )
        return loaded

    def class_names(self) -> list[str] | None:
        """Return the names of the classes that the model already predicts, in their order; None if it names none.

        Raises:
            ValueError: for a folder that holds no model, or one with an adapter.
        """
        self._check()
        config = self._config()
        names = [name for _, name in sorted(config.id2label.items())]
        has_head = any("ForSequenceClassification" in kind for kind in config.architectures or ())
        return names if has_head and not all(name.startswith("LABEL_") for name in names) else None

    def _config(self) -> Any:
        with loading("the model", self.model_name_or_path):
            return AutoConfig.from_pretrained(self.model_name_or_path, **self._repository)

    def load_language_model(self) -> PreTrainedModel:
        """Return the causal language model.

        Raises:
            ValueError: as ``load_model``, and for a checkpoint without some of the weights.
        """
        loaded = self.load_model(AutoModelForCausalLM)
        self.check_weights(loaded, loaded.new, "give a causal language model with all its weights")
        return loaded.model

    def check_weights(self, loaded: Loaded, frozen: Sequence[str], advice: str) -> None:
        """Warn of weights of the checkpoint that are left out, if the model is accepted.

        Args:
            frozen: the parameters that the checkpoint lacks and the posterior does not hold.
            advice: what to do about them.
        Raises:
            ValueError: if there are such parameters.
        """
        if frozen:
            raise ValueError(
                f"{self.model_name_or_path} has no weights for {grouped(frozen)}, which the posterior would not hold "
                f"either: each load would make up others. Expected a checkpoint that has them: {advice}"
            )
        warn_of_unused_weights(loaded, self.model_name_or_path)

    def add_lora(
        self, model: PreTrainedModel, task_type: TaskType, new: Sequence[str] = (), *, subspace: str = TRAINABLE
    ) -> nn.Module:
        """Return the model with its LoRA, or unchanged if there is none.

        Args:
            new: parameters that the checkpoint lacks. Their modules are learnt in full beside the LoRA.
            subspace: the random parameters. A LoRA beside others than the trainable ones would be frozen, so there is
                none by default.
        Raises:
            ValueError: for a rank above the width of the model, and for settings of a LoRA without one.
        """
        adapted: nn.Module = model
        rank = self.lora_rank
        if rank is None:
            rank = DEFAULT_RANK if subspace == TRAINABLE else 0
        if not rank:
            if self.lora_targets or self.lora_layers:
                raise ValueError(
                    f"lora_targets and lora_layers belong to a LoRA, and there is none with subspace={subspace!r} and "
                    f"lora_rank={self.lora_rank}: leave them out, or give lora_rank"
                )
            return adapted
        width = getattr(model.config.get_text_config(), "hidden_size", None)
        if width is not None and rank > width:
            raise ValueError(
                f"lora_rank must be at most {width}, the width of this model, got {rank}: a higher rank only costs "
                "memory. Ranks of 4 to 64 are usual"
            )
        lora = LoraConfig(
            task_type=task_type,
            r=rank,
            lora_alpha=self.lora_alpha,
            target_modules=self.lora_targets,
            layers_to_transform=self.lora_layers,
            modules_to_save=_modules_of(model, new) or None,
        )
        with warnings.catch_warnings():
            # peft sees for each layer whether its weight is transposed, as GPT-2's are, and sets this field by itself
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to ")
            adapted = get_peft_model(model, lora)
        return adapted

    def _check(self) -> None:
        """Refuse what transformers and peft would refuse in other words, or not at all."""
        if self.lora_rank is not None and self.lora_rank < 0:
            raise ValueError(f"lora_rank must be at least 0, which is no LoRA, got {self.lora_rank}: give a rank, or 0")
        kind = getattr(torch, self.dtype, None)
        if self.dtype != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or another of torch's, got {self.dtype!r}")
        if self.lora_alpha <= 0:
            raise ValueError(f"lora_alpha must be at least 1, got {self.lora_alpha}: LoRA's scale is alpha / rank")
        folder = Path(self.model_name_or_path)
        if folder.is_dir() and self.model_revision != "main":
            raise ValueError(
                f"model_revision={self.model_revision!r} is for a model of the Hub, and {folder} is a folder here: "
                "leave it out"
            )
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"{self.model_name_or_path} is a folder with an adapter or a posterior, expected a base model: give "
                "the model that the adapter belongs to, or merge the adapter (hf-bayes export --model) and give that"
            )
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json: give the folder of a model with its tokenizer")

    def _check_overrides(self, config: Any) -> None:
        """Check that the config has each field of ``config_overrides``."""
        for name in mapping(self.config_overrides):
            if not hasattr(config, name):
                near = difflib.get_close_matches(name, vars(config), n=1)
                advice = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise ValueError(f"config_overrides: {type(config).__name__} has no field {name!r}: {advice}")

    @property
    def _repository(self) -> dict[str, Any]:
        return {"revision": self.model_revision, "trust_remote_code": self.trust_remote_code}


@dataclass
class MethodArguments:
    """The arguments of the random parameters and the method."""

    _argument_group_name = "method"

    subspace: str = field(default=TRAINABLE, metadata={"help": SUBSPACE_HELP})
    method: str | None = field(
        default=None,
        metadata={
            "help": "sghmc or ensemble (default), laplace and others; auto compares several. The default is sghmc if "
            "held-out rows can choose its temperature. A wrong name lists all. auto needs held-out rows."
        },
    )
    method_args: dict[str, Any] | str | None = field(default=None, metadata={"help": "Fields of its config as JSON."})
    budget: int | None = field(default=None, metadata={"help": f"For --method auto. {BUDGET_HELP}"})

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
        check_count("budget", self.budget, "minibatch gradients")
        if not self.compares and self.budget is not None:
            given = "no --method" if self.method is None else f"--method {self.method}"
            raise ValueError(f"--budget={self.budget} is for --method auto, got {given}: leave it out")
        return None if self.method in (None, "auto") else method_config(self.method, self.method_args)


@dataclass
class DataArguments:
    """The arguments of the texts for training and evaluation."""

    _argument_group_name = "data"

    dataset: str = field(metadata={"help": "A .txt, .json(l), .csv, .tsv or .parquet file, saved folder, or Hub data."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    validation_file: str | None = field(default=None, metadata={"help": "Local files to evaluate on."})
    validation_fraction: float = field(
        default=0.1, metadata={"help": "Share of rows to hold out if there is no validation split. 0: no evaluation."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the text."})

    def load(self, seed: int, *, label_column: str | None = None) -> Splits:
        """Return the splits "train" and "validation", see ``load_splits``."""
        return load_splits(
            self.dataset,
            config=self.dataset_config,
            validation_file=self.validation_file,
            validation_fraction=self.validation_fraction,
            text_column=self.text_column,
            label_column=label_column,
            seed=seed,
        )


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a config with names in place of ``num_labels``.

    transformers applies the number before the names, so it would warn that the checkpoint has as many names as before.
    """
    if "num_labels" not in fields:
        return fields
    names = {number: f"LABEL_{number}" for number in range(fields["num_labels"])}
    own = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    return own | {name: value for name, value in fields.items() if name != "num_labels"}


def _modules_of(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the modules of these parameters: of a head the outermost module, of the base model the innermost one."""
    return sorted({
        name.rpartition(".")[0] if is_in_base(model, name) else name.partition(".")[0] for name in names
    })  # fmt: skip


@contextmanager
def loading(what: str, place: str) -> Iterator[None]:
    """Turn the errors of transformers about a place into one error that names it.

    Raises:
        ValueError: naming the place, with the beginning of the reason.
    """
    try:
        yield
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError, StrictDataclassError) as error:
        where = f"of {place!r}" if Path(place).exists() else f"of {place!r}, which is no folder here,"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
        raise ValueError(
            f"{what} {where} cannot be loaded ({reason.rstrip('.')}): give the folder of a model with its "
            "tokenizer, or the name of a model of the Hub"
        ) from error


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
    given = mapping(fields)
    if given.get("name", name) != name:
        raise ValueError(f"method_args name the method {given['name']!r}, and --method is {name!r}: leave one out")
    return from_dict({**given, "name": name})
