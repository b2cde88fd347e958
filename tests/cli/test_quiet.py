from __future__ import annotations

import logging
import sys
import warnings

import datasets
import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

from hf_bayes.cli.quiet import hidden_bars, quiet_libraries


def test_named_warnings_are_dropped_and_others_are_short() -> None:
    words, place = "`is_gradient_checkpointing` is deprecated", {"filename": "x.py", "lineno": 1}
    before = warnings.formatwarning
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with quiet_libraries():
            warnings.warn_explicit(f"{words}, see", FutureWarning, module="transformers.modeling_utils", **place)
            warnings.warn_explicit(words, FutureWarning, module="other", **place)
            assert warnings.formatwarning("pay attention", UserWarning, **place) == "pay attention\n"
    assert [str(each.message) for each in found] == [words]
    assert warnings.formatwarning is before


def test_named_records_are_dropped_within_the_block(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao")
    with quiet_libraries():
        logger.warning("Failed to load x.so: wrong version")
        logger.warning("another message")
    logger.warning("Failed to load y.so: wrong version")
    assert [record.message for record in caplog.records] == ["another message", "Failed to load y.so: wrong version"]


def test_bars_of_libraries_are_hidden_within_the_block() -> None:
    def enabled() -> tuple[bool, bool]:
        return not datasets.are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()

    before = enabled()
    with hidden_bars():
        assert enabled() == (False, False)
        assert not are_progress_bars_disabled()  # downloads
    assert enabled() == before


def test_libraries_that_are_not_loaded_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datasets")
    with hidden_bars():
        assert "datasets" not in sys.modules
