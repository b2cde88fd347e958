from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from rich.console import Console

# A script's own folder is on the path when it runs.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import evaluate_uncertainty

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer, with_lora

NAMES = [f"set{number}" for number in range(7)]


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["other.txt"], r"takes name=file for each text, such as code=code.txt, got 'other.txt': give the file a name"),
        (["=other.txt"], "got '=other.txt': give the file a name"),
        (["code="], "got 'code=': give"),
        (
            ["code=a.txt", "test=b.txt"],
            r"got 'test=b.txt', and \"test\" is the text of --test \(t.txt\): choose another",
        ),
        (["code=a.txt", "code=b.txt"], "got the name 'code' for a.txt and for b.txt: give each text its own"),
    ],
)
def test_pairs_that_would_lose_a_text_are_refused(pairs: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate_uncertainty.texts_of("t.txt", pairs)


@pytest.mark.parametrize("flag", ["max_windows", "batch_size"])
def test_counts_below_one_are_refused_before_anything_is_loaded(flag: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} must be at least 1, got 0"):
        evaluate_uncertainty.Arguments(posterior="out", test="t.txt", **{flag: 0})


def test_pairs_name_files_in_their_order() -> None:
    found = evaluate_uncertainty.texts_of("t.txt", ["b=x=1.txt", "a=dir/y.txt"])
    assert list(found.items()) == [("test", "t.txt"), ("b", "x=1.txt"), ("a", "dir/y.txt")]


@pytest.mark.parametrize("count", [0, 1, 6, 30])
def test_no_figure_is_cut_at_a_hundred_columns(count: int) -> None:
    areas = {
        f"a rather long name of a text [number {n}]": {"total": 0.5 + n / 1000, "epistemic": 0.6 + n / 1000}
        for n in range(count)
    }
    results = {"members": 3, "nll": 12.3456, "member_nll": 23.4567, "accuracy": 0.0123, "ece": 0.4321, "auroc": areas}
    file = io.StringIO()
    evaluate_uncertainty.show(results, "out/" + "posterior" * 9, Console(width=100, file=file))
    text = file.getvalue()
    numbers = [12.3456, 23.4567, 0.0123, 0.4321, *(area for pair in areas.values() for area in pair.values())]
    assert [f"{number:.4f}" for number in numbers if f"{number:.4f}" not in text] == []
    assert [name for name in areas if name not in text] == []
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_text_has_its_figures_and_a_histogram_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    tiny_llama().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    trainer = runs.trainer(
        tmp_path / "posterior",
        SGHMCConfig(num_chains=2, init_jitter=1.0),
        model=with_lora(tiny_llama().from_pretrained(base)),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    for number, name in enumerate(["test", *NAMES]):
        (tmp_path / f"{name}.txt").write_text("\n".join(np.roll(TEXTS * 8, number)[number:]))
    drawn: list[dict[str, Any]] = []
    histogram = Axes.hist

    def hist(self: Axes, values: Any, *args: Any, **options: Any) -> Any:
        drawn.append(options)
        return histogram(self, values, *args, **options)

    monkeypatch.setattr(Axes, "hist", hist)
    arguments = [
        *["--posterior", str(tmp_path / "posterior"), "--test", str(tmp_path / "test.txt"), "--length", "16"],
        *["--ood", *(f"{name}={tmp_path / name}.txt" for name in NAMES), "--output_dir", str(tmp_path / "out")],
    ]
    monkeypatch.setattr(sys, "argv", ["evaluate_uncertainty", *arguments])
    evaluate_uncertainty.main()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["auroc"]) == NAMES
    labels = [str(options.pop("label")).split(" ")[0] for options in drawn]
    assert labels == ["test", *NAMES] * 2
    assert len({json.dumps(options) for options in drawn}) == len(NAMES) + 1
    assert (tmp_path / "out" / "uncertainty.png").stat().st_size > 0
