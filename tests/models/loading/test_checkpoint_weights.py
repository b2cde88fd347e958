from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from hf_bayes.core.layout import Layout, select
from hf_bayes.models.loading.checkpoint_weights import (
    LOGGER,
    REPORT,
    Loaded,
    load_pretrained,
    warn_of_frozen_head,
    warn_of_lost_weights,
)
from tests.tiny_models import tiny_bert

HEAD = ("classifier.bias", "classifier.weight")
IN_BASE = "bert.encoder.layer.1.output.dense.weight"


def saved(folder: Path, *, without: str = "", extra: str = "") -> str:
    """Return a folder with a classifier of three classes, without one of its weights and with another one."""
    tiny_bert().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if extra:
        weights[extra] = next(iter(weights.values())).clone()
    kept = {name: value for name, value in weights.items() if name != without}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_new_head_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_bert().bert.save_pretrained(tmp_path)
    found = load_pretrained(AutoModelForSequenceClassification, str(tmp_path))
    assert found[1:] == (HEAD, ())
    assert not caplog.records


def test_a_head_of_another_size_is_new(tmp_path: Path) -> None:
    found = load_pretrained(AutoModelForSequenceClassification, saved(tmp_path), num_labels=2)
    assert found.new == HEAD
    assert found.model.classifier.weight.shape[0] == 2


def test_a_missing_weight_of_the_base_is_named(tmp_path: Path) -> None:
    found = load_pretrained(AutoModelForSequenceClassification, saved(tmp_path, without=IN_BASE))
    assert found.new == (IN_BASE,)


def test_weights_left_out_are_named_unless_of_a_head(tmp_path: Path) -> None:
    extra = IN_BASE.replace("dense", "gate")
    assert load_pretrained(AutoModelForSequenceClassification, saved(tmp_path / "a", extra=extra)).unused == (extra,)
    assert load_pretrained(AutoModelForSequenceClassification, saved(tmp_path / "b", extra="lm.weight")).unused == ()


def test_a_failure_shows_the_report(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @staticmethod
        def from_pretrained(*given: Any, **settings: Any) -> None:
            logging.getLogger(LOGGER).warning("Bert%s from: here", REPORT)
            raise RuntimeError("see the report")

    with pytest.raises(RuntimeError, match="see the report"):
        load_pretrained(Broken, "here")
    assert [REPORT in record.getMessage() for record in caplog.records] == [True]


def test_weights_that_nothing_holds_are_warned_of() -> None:
    layout = Layout(("base_model.model.classifier.modules_to_save.default.weight",), ((3, 16),))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_lost_weights(Loaded(tiny_bert(), ("classifier.weight",)), layout, "the posterior")
        assert not found
        warn_of_lost_weights(Loaded(tiny_bert(), (IN_BASE,), ("bert.extra",)), layout, "the posterior")
    first, second = (str(each.message) for each in found)
    assert "has no weights for bert.encoder.layer.*.output.dense.weight" in first
    assert "not used: bert.extra" in second


@pytest.mark.parametrize(("task", "frozen"), [(None, True), ("SEQ_CLS", False)])
@pytest.mark.parametrize("with_head", [False, True])
def test_a_new_head_that_is_frozen_is_warned_of(
    tmp_path: Path, task: str | None, frozen: bool, with_head: bool, recwarn: pytest.WarningsRecorder
) -> None:
    stored = tiny_bert(num_labels=4)
    (stored if with_head else stored.bert).save_pretrained(tmp_path)
    base = load_pretrained(AutoModelForSequenceClassification, str(tmp_path), num_labels=3).model
    lora = LoraConfig(task_type=task, target_modules=["query"])
    warn_of_frozen_head(base, select(get_peft_model(base, lora), "trainable"))
    said = [str(warning.message) for warning in recwarn if "cannot be loaded" in str(warning.message)]
    assert len(said) == frozen
    assert all("no head for 3 labels, so classifier." in text for text in said)


def test_a_head_of_the_checkpoint_may_be_frozen(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    base = load_pretrained(AutoModelForSequenceClassification, saved(tmp_path)).model
    for model in (base, tiny_bert()):  # and one of no folder
        adapted = get_peft_model(model, LoraConfig(target_modules=["query"]))
        warn_of_frozen_head(model, select(adapted, "trainable"))
    assert not [warning for warning in recwarn if "cannot be loaded" in str(warning.message)]
