"""Load a model of transformers, and say which of its weights the checkpoint lacks.

transformers logs a table of such weights at each load. For a head that is new on purpose the table says nothing that a
user can act on, and it hides the case that matters: weights of the base model that are missing. So the table is kept
off the log here, and the callers decide which names are worth a message.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedModel

from hf_bayes.core.layout import Layout, grouped
from hf_bayes.models.loading import lora_layers
from hf_bayes.models.loading.base_location import NOTED_REVISION

LOGGER = "transformers.modeling_utils"
REPORT = " LOAD REPORT"
"""The logger of transformers' table, and words of its title."""


class Loaded(NamedTuple):
    """A model and the differences between its weights and those of the checkpoint.

    Attributes:
        model: the model.
        new: parameters that the checkpoint lacks, or has in another shape. Their values are random.
        unused: weights of the checkpoint for the base model, not for a head, that the model has no place for.
    """

    model: PreTrainedModel
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def load_pretrained(auto_class: Any, name: str, **settings: Any) -> Loaded:
    """Load a model with ``auto_class.from_pretrained`` and these settings, without transformers' table of weights.

    Weights of another shape, such as those of a head for other labels, are new, unless the settings say otherwise. If
    loading fails, the table is logged after all: the error of transformers may refer to it.
    """
    settings = {"ignore_mismatched_sizes": True} | settings
    with _without_report():
        model, found = auto_class.from_pretrained(name, output_loading_info=True, **settings)
    setattr(model, NOTED_REVISION, settings.get("revision"))
    new = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    unused = (key for key in found["unexpected_keys"] if is_in_base(model, key))
    return Loaded(model, tuple(sorted(new)), tuple(sorted(unused)))


def is_in_base(model: PreTrainedModel, name: str) -> bool:
    """Return whether a weight belongs to the base model, and not to the head that a task puts on it."""
    prefix = model.base_model_prefix
    return bool(prefix) and name.startswith(f"{prefix}.")


def warn_of_unused_weights(loaded: Loaded, name: str) -> None:
    """Warn of weights of the checkpoint ``name`` that the model has no place for."""
    if loaded.unused:
        warnings.warn(
            f"{name} has weights that {type(loaded.model).__name__} has no place for, and they are left out: "
            f"{grouped(loaded.unused)}. Check that this is the model you want"
        )


def warn_of_random_weights(loaded: Loaded, name: str) -> None:
    """Warn of weights of the base model that the checkpoint ``name`` lacks."""
    if lacking := [each for each in loaded.new if is_in_base(loaded.model, each)]:
        warnings.warn(
            f"{name} has no weights for {grouped(lacking)}, so they are random. If they are not trained, a saved "
            "posterior cannot be loaded, since each load would make up others: name their modules in modules_to_save "
            "of the LoRA, or give a checkpoint that has them"
        )


def warn_of_frozen_head(core: PreTrainedModel, layout: Layout) -> None:
    """Warn of a head that the checkpoint lacks and that is frozen: its random values will be in no file.

    Args:
        layout: the random parameters, by their names in the model with its adapter.
    """
    name, kind = core.name_or_path, type(core).__name__
    names = map(lora_layers.plain_name, layout.names)
    try:
        stored = AutoConfig.from_pretrained(name or "", local_files_only=True)
    except (OSError, ValueError):  # of no folder
        return
    is_new = kind not in (stored.architectures or [kind]) or stored.num_labels != core.config.num_labels
    head = [each for each, _ in core.named_parameters() if not is_in_base(core, each)]
    if core.can_generate() or not is_new or not head or not all(is_in_base(core, each) for each in names):
        return
    warnings.warn(
        f"{name} has no head for {core.config.num_labels} labels, so {grouped(map(lora_layers.plain_name, head))} is "
        "random, and it is frozen: a saved posterior cannot be loaded, since each load would make up another head. "
        'Train it: LoraConfig(task_type="SEQ_CLS") ("TOKEN_CLS" for token classes), or name its modules in '
        "modules_to_save",
        stacklevel=2,
    )


def warn_of_lost_weights(loaded: Loaded, layout: Layout, what: str) -> None:
    """Warn of weights that neither the base model's checkpoint nor the posterior has, and of weights left out.

    Args:
        layout: the parameters of the posterior, by their names in the model with its adapter.
        what: the name of the posterior in the warning.
    """
    stored = {lora_layers.plain_name(name) for name in layout.names}
    lacking = [name for name in loaded.new if name not in stored]
    for names, problem in ((lacking, "has no weights for"), (loaded.unused, "has weights that are not used:")):
        if names:
            warnings.warn(
                f"{what}: the checkpoint of the base model {problem} {grouped(names)}, so it may be another model than "
                "the posterior's: give the right one as base_model="
            )


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep the table off the log in the block, unless the block raises an error."""
    logger, held = logging.getLogger(LOGGER), _Held()
    logger.addFilter(held)
    try:
        yield
    except BaseException:
        logger.removeFilter(held)
        for record in held.records:
            logger.handle(record)
        raise
    finally:
        logger.removeFilter(held)


class _Held(logging.Filter):
    """A filter that keeps the tables back."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        report = REPORT in record.getMessage()
        if report:
            self.records.append(record)
        return not report
