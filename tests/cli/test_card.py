from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_bayes.cli.card import rewrite_card
from hf_bayes.posteriors.card_results import read_beside
from hf_bayes.posteriors.model_card import write_card
from hf_bayes.posteriors.posterior import Posterior
from tests.cli.commands.conftest import posterior  # noqa: F401


@pytest.fixture
def directory(posterior: str, tmp_path: Path) -> str:  # noqa: F811
    shutil.copytree(posterior, tmp_path / "out")
    write_card(tmp_path / "out", license="mit")
    return str(tmp_path / "out")


def test_a_card_gets_results_and_a_heat_map(directory: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    own = Posterior.from_pretrained(directory).fingerprint
    results.write_text(json.dumps({"posterior": own, "nll": 2.5, "auroc": {"code": {"epistemic": 0.75}}}))
    rewrite_card(directory, results=str(results), text="The mitochondrion is the powerhouse.", repo_id="user/x",
                 benchmark="user/set:default:nll")  # fmt: skip
    assert (Path(directory) / ".eval_results" / "user-set-default.yaml").exists()
    card = ModelCard.load(Path(directory) / "README.md")
    assert card.data.license == "mit"
    assert {result.metric_value for result in card.data.eval_results} >= {2.5, 0.75}
    assert "](heat_map.png)" in card.text
    assert (Path(directory) / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    for name in ("heat_map.png", "evaluation.json", ".eval_results/user-set-default.yaml"):
        read_beside(Path(directory) / name, own)


def test_a_refused_text_leaves_the_card_and_its_files(directory: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"posterior": Posterior.from_pretrained(directory).fingerprint, "nll": 2.5}))
    before = {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}
    with pytest.raises(OSError, match="nowhere"):
        rewrite_card(directory, results=str(results), benchmark="user/set:default:nll", text="A text of some words.",
                     base_model=str(tmp_path / "nowhere"))  # fmt: skip
    assert {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()} == before


def test_what_is_no_result_and_no_directory_is_refused(directory: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"loss": 1}')
    with pytest.raises(ValueError, match=r"other.json has no figures: give results.json"):
        rewrite_card(directory, results=str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match="--card writes into a posterior directory, got 'user/x'"):
        rewrite_card("user/x")
    with pytest.raises(ValueError, match=r"--benchmark names the benchmark of --results: give results.json"):
        rewrite_card(directory, benchmark="user/set:default:nll")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"posterior": "0" * 64},
            r"results.json has the figures of another posterior \(fingerprint '000000000000', exp",
        ),
        ({}, "results.json does not record which posterior it is of: run hf-bayes evaluate again"),
    ],
    ids=["another", "no record"],
)
def test_figures_of_another_posterior_are_refused(
    directory: str, tmp_path: Path, record: dict[str, str], words: str
) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({**record, "nll": 2.5}))
    before = {path.name: path.stat().st_mtime_ns for path in Path(directory).iterdir()}
    with pytest.raises(ValueError, match=words):
        rewrite_card(directory, results=str(results), benchmark="user/set:default:nll", text="A text of some words.")
    assert {path.name: path.stat().st_mtime_ns for path in Path(directory).iterdir()} == before


def test_an_earlier_evaluation_of_other_weights_is_refused(directory: str) -> None:
    (Path(directory) / "evaluation.json").write_text(json.dumps({"posterior": "0" * 64, "nll": 2.5}))
    with pytest.raises(ValueError, match=r"evaluation.json has the figures of another posterior"):
        rewrite_card(directory)
