"""The choice between trials."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from hf_bayes.training.tuning.candidates import PLAIN
from hf_bayes.training.tuning.choice import as_table, best_of, sentence
from hf_bayes.training.tuning.record import TuningTrial
from tests.training.tuning.test_record import trial

NOISE = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def scored(name: str, gain: float, cost: int, noise: float = 1.0) -> TuningTrial:
    """Return a trial whose NLL is below the plain one's by ``gain``, with a standard error of noise / 20."""
    own = NOISE - NOISE.mean()
    nll = 1 - gain + (0 if name == PLAIN else noise) * own / own.std()
    return trial(name, nll=nll.tolist(), cost=cost)


def test_the_cheapest_within_a_standard_error_is_chosen() -> None:
    plain = scored(PLAIN, 0.0, 1)
    assert best_of([plain, scored("ensemble", 0.045, 4)]).name == PLAIN  # the standard error is .05
    assert best_of([plain, scored("ensemble", 0.055, 4)]).name == "ensemble"
    assert best_of([plain, scored("sghmc", 0.055, 16), scored("ensemble", 0.055, 4)]).name == "ensemble"


def test_failed_trials_are_not_chosen() -> None:
    failed = trial("swag", nll=[], failure="diverged")
    assert best_of([failed, scored(PLAIN, 0.0, 1)]).name == PLAIN
    with pytest.raises(ValueError, match=r"no candidate ran to its end.*swag: diverged"):
        best_of([failed])


def test_the_sentence_says_when_plain_fine_tuning_is_as_good() -> None:
    plain, ensemble = scored(PLAIN, 0.0, 1), scored("ensemble", 0.01, 4)
    assert (
        "Plain fine-tuning with a temperature is as good here: the best other method (ensemble) differs by -0.01"
        in (sentence(plain, [plain, ensemble]))
    )
    assert sentence(ensemble, [plain, ensemble]).endswith(
        "0.0100 (standard error 0.05) less than plain fine-tuning with a temperature."
    )


def test_the_sentence_of_a_regression_names_no_temperature() -> None:
    plain, ensemble = (one._replace(metrics={"rmse": 1.0}) for one in (scored(PLAIN, 0.0, 1), scored("x", 0.01, 4)))
    assert "Plain fine-tuning is as good here: the best" in sentence(plain, [plain, ensemble])
    assert sentence(ensemble, [plain, ensemble]).endswith(" less than plain fine-tuning.")


def test_the_sentence_says_that_a_longer_run_is_worse() -> None:
    plain = scored(PLAIN, 0.0, 1)
    long = scored(PLAIN, -0.1, 1)._replace(gradients=400)
    end = "The chosen run has 100 gradients; with 400 the NLL is 1.1000, so do not train longer."
    assert sentence(plain, [plain, long]).endswith(end)
    assert "longer" not in sentence(long, [plain, long])


def test_the_table_has_a_line_for_every_trial() -> None:
    plain, failed = scored(PLAIN, 0.0, 1), trial("swag", nll=[], failure="diverged at step 3")
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(as_table([failed, plain, scored("ensemble", -0.1, 4)], plain))
    title, head, *lines, caption = console.export_text().splitlines()
    assert (title.strip(), head.split()[:2]) == ("Held-out rows", ["method", "gradients"])
    assert len(lines) == 2
    assert lines[0].startswith(PLAIN)
    assert lines[1].startswith("ensemble")
    assert "100 1.1000 +0.100 ± 0.050" in " ".join(lines[1].split())
    assert caption.strip() == "swag failed: diverged at step 3"
