from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs


def test_later_saves_keep_the_authors_fields(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path / "out", SGHMCConfig())
    trainer.train()
    trainer.create_model_card(license="mit")
    assert not (tmp_path / "out/README.md").exists()  # nothing is saved yet
    trainer.save_model()
    trainer.create_model_card(tags=["extra"])
    trainer.save_model(str(tmp_path / "other"))
    for directory in ("out", "other"):
        card = (tmp_path / directory / "README.md").read_text()
        assert "license: mit" in card, directory
        assert "- extra\n" in card, directory


def test_a_field_that_no_card_has_is_refused(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig())
    with pytest.raises(ValueError, match="dataset_name"):
        trainer.create_model_card(dataset_name="mine")
