"""Messages of a run: to the log, or next to the progress bar if no log is shown."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

from hf_bayes.training.compat import TrainerHost

logger = logging.getLogger("hf_bayes.training.trainer")


class Messages:
    """The messages of one trainer; the first process writes warnings."""

    def __init__(self, host: TrainerHost) -> None:
        self._host = host

    def say(self, message: str, *values: object) -> None:
        """Log a message; if the log is off, write it next to the progress bar, if that is shown."""
        logger.info(message, *values)
        if not logger.isEnabledFor(logging.INFO) and not self._host.args.disable_tqdm and self._host.is_first_process:
            tqdm.write(message % values, file=sys.stderr)

    def warn(self, message: str, *values: object) -> None:
        """Log a warning, in the first process."""
        if self._host.is_first_process:
            logger.warning(message, *values)
