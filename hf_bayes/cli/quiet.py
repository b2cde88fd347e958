"""Keep messages of other libraries off the terminal that the user of a command cannot act on.

All filters stand here, each as narrow as it can be. This module imports nothing that is slow, because some messages
come from imports.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    (FutureWarning, "`is_gradient_checkpointing` is deprecated", "transformers"),  # read by peft
    (UserWarning, ".*pin_memory.*", "torch"),  # a loader that transformers makes, on a machine without an accelerator
)
"""The category, the beginning of the message as a pattern, and the package of a warning."""

RECORDS = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),  # kernels for other devices
    # our errors name the file and the reason
    "datasets.packaged_modules.csv.csv": ("Failed to read file ",),
    "datasets.packaged_modules.json.json": ("Failed to load JSON from file ",),
    "datasets.packaged_modules.parquet.parquet": ("Failed to read file ",),
    # our checks of the inputs say the same, with the model's context
    "transformers.tokenization_utils_base": ("Token indices sequence length is longer",),
    "transformers.generation.stopping_criteria": ("This is a friendly reminder",),
    "transformers.trainer_utils": ("The tokenizer has new PAD/BOS/EOS tokens",),  # the config was aligned
    "torch.utils._pytree": ("<enum '",),  # torchao registers its classes by a call that torch has deprecated
}
"""The name of a logger -> the beginnings of its messages."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop these warnings and records in the block, and print each other warning as its message alone."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        warnings.formatwarning = lambda message, *place, **line: f"{message}\n"
        for category, message, package in WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category, module=rf"{package}\.")
        for name, beginnings in RECORDS.items():
            drop = _Drop(beginnings)
            logger = logging.getLogger(name)
            logger.addFilter(drop)
            stack.callback(logger.removeFilter, drop)
        yield


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hide the progress bars of datasets and transformers in the block, but not those of downloads.

    Only libraries that are loaded already are changed.
    """
    with ExitStack() as stack:
        if "datasets" in sys.modules:
            from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

            if not are_progress_bars_disabled():
                disable_progress_bars()
                stack.callback(enable_progress_bars)
        if "transformers" in sys.modules:
            from huggingface_hub.utils.tqdm import enable_progress_bars as show_downloads
            from transformers.utils import logging as messages

            if messages.is_progress_bar_enabled():
                messages.disable_progress_bar()
                show_downloads()  # a download may take long
                stack.callback(messages.enable_progress_bar)
        yield


class _Drop(logging.Filter):
    """A filter that drops the records whose message has one of these beginnings."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginnings)
