from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers.pipelines import PIPELINE_REGISTRY

import hf_bayes
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.metrics.calibration import Calibration
from hf_bayes.posteriors.card_results import stamp
from hf_bayes.posteriors.model_card import card_fields, known_fields, render_card, write_card
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.faults.posteriors import config, draws, gaussian
from tests.posteriors.hostile import HOSTILE


def cards() -> dict[str, Posterior]:
    return {
        "lora": draws(3, adapter=True),
        "plain": draws(3, task="causal_lm"),
        "tagger": draws(3, adapter=True, task="token_classification", head={"labels": ["O", "B", "I"]}),
        "images": draws(3, task="image_classification"),
        "numbers": draws(3, adapter=True, head={"labels": ["LABEL_0"], "noise_std": 0.5}),
        "labels": draws(3, head={"labels": ["a", "b"], "problem_type": "multi_label_classification"}),
        "gaussian": gaussian(adapter=True, method={"name": "mean_field", "temperature": 1.0}),
        "bare": draws(1, diagnostics={}, metrics={}, num_data=None, prior={}, method={"name": "map"}),
    }


@pytest.mark.parametrize("kind", cards())
def test_card_parses_back_with_its_tags(kind: str, tmp_path: Path) -> None:
    posterior = cards()[kind]
    posterior.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    adapter = posterior.adapter_config is not None
    assert {"hf_bayes", "bayesian", posterior.config.method["name"]} <= set(card.data.tags)
    assert ("lora" in card.data.tags) == adapter
    assert card.data.library_name == "hf_bayes"
    assert card.data.base_model == "someone/base"
    assert card.data.base_model_relation == ("adapter" if adapter else "finetune")
    text = card.text
    assert "{{" not in text
    assert "{%" not in text
    assert not re.search(r"\n\n\n", text)
    # Tables are unbroken: a row follows each ruler.
    assert all(row.startswith("|") for row in re.findall(r"\|---\|(?:---\|)+\n(.*)", text))
    assert "](http" not in text  # no link, because its target may not exist


def test_card_tells_method_data_diagnostics_and_metrics() -> None:
    posterior = draws(3, adapter=True, head={"labels": ["no", "maybe", "yes"]})
    text = render_card(posterior.config.to_dict(), adapter=True, repo_id="user/x")
    for expected in (
        "**3 draws**",
        "3 draws of 3 chains",
        "| temperature T | 1.0 |",
        "| N | 1,234 (unit: example) |",
        "chains agree",
        "| r_hat | 1.004 |",
        "| nll | 0.432 |",
        "| map_nll | 0.437 |",
        "name = gaussian, std = 1.0",
        "prior_std = 1",
        'pipeline("bayesian-text-classification", "user/x")',
        "BayesianModelForSequenceClassification",
        'subfolder="members/member_000"',
        'from_pretrained("someone/base", num_labels=3)',
    ):
        assert expected in text, expected


def test_card_shows_few_digits_and_nothing_that_is_not_there() -> None:
    found = {
        "distance": [0.7421258687973022, 12.0],
        "penalty": None,
        "chains": list(range(9)),
        "verdict": "chains agree",
    }
    posterior = draws(3, adapter=True, diagnostics=found, data_unit="token", num_data=10)
    text = render_card(posterior.config.to_dict(), adapter=True)
    assert "| distance | 0.7421, 12 |" in text
    assert "| chains | 9 values |" in text
    assert "penalty" not in text
    assert "| N | 10 (unit: example) |" in text  # a likelihood term of this head is an example


@pytest.mark.parametrize(
    ("task", "tag", "suffix"),
    [
        ("causal_lm", "text-generation", "ForCausalLM"),
        ("sequence_classification", "text-classification", "ForSequenceClassification"),
        ("token_classification", "token-classification", "ForTokenClassification"),
        ("image_classification", "image-classification", "ForImageClassification"),
    ],
)
def test_card_names_what_loads_its_task(task: str, tag: str, suffix: str) -> None:
    posterior = draws(3, adapter=True, task=task, metrics={"nll": 0.4})
    card = ModelCard(render_card(posterior.config.to_dict(), adapter=True))
    assert card.data.pipeline_tag == tag
    assert card.data.eval_results[0].task_type == tag
    assert f'pipeline("bayesian-{tag}", "user/this-posterior")' in card.text
    assert hf_bayes.pipeline  # the first access imports it, which registers the tasks
    assert f"bayesian-{tag}" in PIPELINE_REGISTRY.get_supported_tasks()
    assert f"from hf_bayes import BayesianModel{suffix}\n" in card.text
    assert f"from transformers import AutoModel{suffix}\n" in card.text
    assert hasattr(hf_bayes, f"BayesianModel{suffix}")


@pytest.mark.parametrize(
    ("head", "says", "keeps_silent_of"),
    [
        ({"labels": ["no", "yes"]}, [".total, .aleatoric, .epistemic", "cannot exceed log(3) nats"], ["epistemic_std"]),
        (
            {"problem_type": "regression", "labels": ["LABEL_0"], "noise_std": 0.5},
            ["average of the members' numbers", ".predictive_std, .epistemic_std", "noise_std = 0.5"],
            [".aleatoric", "log(3)", "every token"],
        ),
        (
            {"problem_type": "multi_label_classification", "labels": ["a", "b"]},
            ["average of the members' probabilities.", "# .logits\n"],
            [".aleatoric", "log(3)", "epistemic_std", "every token"],
        ),
    ],
)
def test_card_promises_what_its_head_answers(head: dict[str, Any], says: list[str], keeps_silent_of: list[str]) -> None:
    text = render_card(draws(3, adapter=True, head=head).config.to_dict(), adapter=True)
    assert [words for words in says if words not in text] == []
    assert [words for words in keeps_silent_of if words in text] == []
    assert not re.search(r"\n\n\n", text)


def test_held_out_figures_are_in_the_model_index(tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path)
    results = ModelCard.load(tmp_path / "README.md").data.eval_results
    assert {result.metric_type: result.metric_value for result in results} == {"nll": 0.432, "accuracy": 0.81}


def test_the_files_beside_a_card_have_their_sections(tmp_path: Path) -> None:
    draws(3, task="causal_lm").save_pretrained(tmp_path, license="mit", tags=["own"], language="en")
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate/generate.py").touch()
    (tmp_path / "heat_map.png").write_text(stamp(draws(3).fingerprint))
    evaluation = {"posterior": draws(3).fingerprint, "ece": 0.02, "auroc": {"code": {"epistemic": 0.9}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    fields = known_fields(tmp_path)
    assert fields == {"license": "mit", "language": ["en"], "tags": ["own"]}
    write_card(tmp_path, repo_id="user/x", **fields)
    card = ModelCard.load(tmp_path / "README.md")
    for expected in (
        'custom_generate="user/x", trust_remote_code=True', "](heat_map.png)", "| code | auroc_epistemic | 0.9 |  |",
    ):  # fmt: skip
        assert expected in card.text, expected
    assert not re.search(r"\n\n\n", card.text)
    found = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert found["code against the test set", "auroc_epistemic"] == 0.9
    assert card.data.license == "mit"


def test_a_card_written_anew_is_of_the_next_posterior(tmp_path: Path) -> None:
    draws(2, seed=1, metrics={"nll": 0.25}).save_pretrained(tmp_path)
    write_card(tmp_path, license="mit")
    draws(2, seed=2, metrics={"nll": 0.75}).save_pretrained(tmp_path, license="mit")
    assert [result.metric_value for result in ModelCard.load(tmp_path / "README.md").data.eval_results] == [0.75]
    (tmp_path / "README.md").write_text("by hand")
    with pytest.warns(UserWarning, match="was edited and is kept"):
        draws(2, seed=3).save_pretrained(tmp_path)


def test_a_run_into_the_same_folder_keeps_no_old_figures(tmp_path: Path) -> None:
    evaluation = {"posterior": draws(3, seed=1).fingerprint, "ece": 0.02}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    draws(3, seed=2, metrics={}).save_pretrained(tmp_path)
    (tmp_path / "heat_map.png").write_text(stamp(draws(3, seed=1).fingerprint))
    with pytest.warns(UserWarning, match="The card is written without it") as warned:
        write_card(tmp_path)
    words = "\n".join(str(each.message) for each in warned)
    assert re.search(r"evaluation.json has the figures of another posterior", words)
    assert re.search(r"heat_map.png is of another posterior", words)
    card = ModelCard.load(tmp_path / "README.md")
    assert "0.02" not in card.text
    assert "heat_map.png" not in card.text
    assert not card.data.eval_results


def test_card_of_a_run_that_did_not_converge_says_so_first() -> None:
    posterior = draws(2, diagnostics={"converged": False, "verdict": "r_hat 1.4"})
    text = render_card(posterior.config.to_dict(), adapter=False)
    assert "**No; treat every figure here with care.** r_hat 1.4" in text


def test_card_of_a_temperature_that_predictions_chose_says_so() -> None:
    chosen = {"converged": None, "verdict": "r_hat 1.4", "chosen_temperature": 0.3, "ladder_nll": [1.25, 0.75]}
    text = render_card(draws(2, diagnostics=chosen).config.to_dict(), adapter=False)
    assert "**It did not have to.** r_hat 1.4" in text
    assert "| ladder_nll | 1.25, 0.75 | NLL of held-out rows at each T of the ladder, when one was chosen." in text
    unknown = draws(2, diagnostics={**chosen, "chosen_temperature": None})
    assert "**Not known.** r_hat 1.4" in render_card(unknown.config.to_dict(), adapter=False)


def test_card_of_a_ladder_without_a_choice_states_no_temperature() -> None:
    values = draws(2).config.to_dict()
    values["method"] = {**values["method"], "ladder": {"temperature": [1.0, 0.3]}}
    text = render_card(values, adapter=False)
    assert "| temperature T | not chosen: the run was stopped too early |" in text


def test_card_holds_no_local_path_and_names_a_local_base_as_such() -> None:
    base = {**config().base_model, "name_or_path": "/home/somebody/models/tiny"}
    diagnostics = {"converged": True, "verdict": "see /root/runs/7 and /Users/me/log.txt"}
    values = draws(2, adapter=True, base_model=base, diagnostics=diagnostics).config.to_dict()
    text = render_card(values, adapter=True)
    assert not re.search("/home/|/root/|/Users/|somebody", text)
    assert "(a local model of its author)" in text
    assert ModelCard(text).data.base_model is None


def test_values_cannot_break_the_card() -> None:
    metrics = {"a|b\nc": 1.0, "<script>": 2.0}
    text = render_card(draws(2, metrics=metrics, subspace="{{ 7 * 7 }}").config.to_dict(), adapter=False)
    assert "| a\\|b c | 1 |" in text
    assert "<script>" not in text
    assert "49" not in text


# -- escaping --------------------------------------------------------------------------------------------------------


def rough(text: str) -> dict[str, Any]:
    """Return a config with ``text`` in every free text."""
    values = draws(2, adapter=True).config.to_dict()
    values["base_model"] = {**values["base_model"], "name_or_path": text}
    values["method"] = {"name": text, text: text, "temperature": text}
    values["diagnostics"] = {"converged": None, "verdict": text, text: text, "nested": [{text: text}]}
    return {**values, "subspace": text, "data_unit": text, "prior": {text: text}, "versions": {text: text},
            "metrics": {text: 1.0, "nll": 0.4}}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_no_field_of_a_card_bypasses_the_escaping(text: str) -> None:
    """A hostile text gives the same headings, tables, code blocks and metadata as a harmless text."""

    def structure(value: str) -> tuple[list[str], dict[str, Any]]:
        source = render_card(rough(value), adapter=True, repo_id=value, license=value, language=value, tags=[value])
        front, body = re.match(r"---\n(.*?)\n---\n(.*)", source, flags=re.DOTALL).groups()  # type: ignore[union-attr]
        parser = MarkdownIt("commonmark", {"html": True}).enable("table")
        tokens = [child for token in parser.parse(body) for child in (token, *(token.children or ()))]
        return [token.type for token in tokens if token.type not in ("text", "text_special", "entity")], yaml.safe_load(
            front
        )

    (kinds, metadata), (expected, known) = structure(text), structure("harmless")
    assert kinds == expected
    assert {*metadata, "base_model", "base_model_relation", "license", "language"} == {*known}
    assert all(isinstance(tag, str) for tag in metadata["tags"])


# -- what an author says ---------------------------------------------------------------------------------------------

AUTHOR = {"license": "apache-2.0", "language": "no", "datasets": ["user/set"], "tags": "demo"}


def test_an_author_s_fields_are_in_the_metadata(tmp_path: Path) -> None:
    draws(2, adapter=True).save_pretrained(tmp_path, **AUTHOR)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.license, data.language, data.datasets) == ("apache-2.0", ["no"], ["user/set"])
    assert data.tags[-1] == "demo"
    write_card(tmp_path, repo_id="user/x", license="mit")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.get("datasets")) == ("mit", None)
    assert '"user/x"' in card.text
    assert Posterior.from_pretrained(tmp_path).config.num_members == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"licence": "mit"}, "card takes license, language, datasets, tags, model_name, got licence"),
        ({"license": ["mit"]}, r"license of a model card are texts, got \['mit'\]"),
        ({"language": 3}, "language"),
        ({"tags": ["a", None, 3]}, "tags of a model card are texts, got 3"),
        ({"datasets": "GLUE MRPC"}, "datasets of a model card are ids of the Hub .*, got 'GLUE MRPC'"),
    ],
)
def test_an_author_s_mistakes_are_named(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draws(2).save_pretrained(tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()
    assert card_fields(license="", tags=[], language=None) == {}


def test_a_trainer_s_card_has_its_author_s_fields(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), hub_model_id="user/x")
    trainer.create_model_card(license="mit", model_name="Mine")  # as a checkpoint may, before there is a posterior
    assert not (tmp_path / "README.md").exists()
    trainer.train()
    trainer.save_model()
    assert ModelCard.load(tmp_path / "README.md").data.license == "mit"
    trainer.create_model_card(dataset_tags="user/set", language="en")
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.license, data.datasets, data.language) == ("mit", ["user/set"], ["en"])
    with pytest.raises(ValueError, match="got finetuned_from"):
        trainer.create_model_card(finetuned_from="gpt2")


# -- what a card says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "", "two words", "/home/somebody/base", "a/b/c", "x\n- y"])
def test_a_base_without_an_id_is_not_in_the_metadata(name: str | None) -> None:
    values = draws(2, adapter=True).config.to_dict()
    values["base_model"]["name_or_path"] = name
    text = render_card(values, adapter=True)
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert not {"base_model", "base_model_relation"} & set(metadata)
    assert None not in metadata.values()


def test_a_single_member_is_one_and_disagrees_with_nobody() -> None:
    one = render_card(draws(1, adapter=True, metrics={}).config.to_dict(), adapter=True)
    assert "**1 draw** of" in one
    assert "| members | 1 draw of 1 chain |" in one
    assert not re.search(r"1 draws|1 chains|disagree|log\(1\)|average of the members|One member as", one)
    several = render_card(draws(2, adapter=True).config.to_dict(), adapter=True)
    assert re.search(r"2 draws of 2 chains", several)
    assert "disagreement" in several


def test_a_report_of_each_chain_is_a_row_of_values() -> None:
    report = [{"log_lik": -3.0, "diagonal": {"w": "too wide"}}, {"log_lik": -4.5}]
    found = {"converged": None, "verdict": "not assessed", "laplace": report}
    text = render_card(gaussian(diagnostics=found).config.to_dict(), adapter=False)
    assert "| laplace.log_lik | -3, -4.5 | Log-likelihood of the training data" in text
    assert "| laplace.diagonal | 1, not defined | Number of tensors" in text


@pytest.mark.parametrize(
    ("approximation", "words"),
    [("gaussian", "diagonal"), ("gaussian_kronecker", "Kronecker-factored (K-FAC): one block for each tensor")],
)
def test_a_card_names_the_covariance_that_a_default_chose(approximation: str, words: str) -> None:
    found = gaussian().config.to_dict()
    assert f"| covariance | {words} |" in render_card({**found, "approximation": approximation}, adapter=False)
    assert "| covariance |" not in render_card(draws(2).config.to_dict(), adapter=False)


def test_a_prior_that_is_a_posterior_is_named_in_words() -> None:
    first = {"name": "gaussian", "std": 1.0}
    record = {"posterior": "/tmp/x/first", "fingerprint": "ab" * 32, "method": "laplace", "approximation": "gaussian",
              "used_as": "gaussian", "num_data": 1200.0, "prior": first}  # fmt: skip
    second = {**record, "posterior": None, "prior": record}
    text = render_card(draws(2, prior=second).config.to_dict(), adapter=False)
    words = "laplace, used as gaussian, N = 1,200, fingerprint abababababab"
    assert f"the posterior of an earlier run ({words}), whose own prior: the posterior first ({words})" in text
    assert "whose own prior: name = gaussian, std = 1.0 |" in text


def test_many_stds_of_a_prior_are_given_by_their_range() -> None:
    stds = {f"layer.{index}": 0.03 + 0.01 * index for index in range(5)}
    text = render_card(draws(2, prior={"name": "gaussian", "std": stds}).config.to_dict(), adapter=False)
    assert "| prior | name = gaussian, std = 0.03 to 0.07, tensor by tensor |" in text


def test_both_nlls_of_a_calibrated_posterior_are_on_the_card() -> None:
    found = Calibration(
        temperature=0.71, log_std_error=0.03, nll=0.654, calibrated_nll=0.6377, nll_std_error=0.0071, num_terms=500,
        num_members=2, prediction="members",
    )  # fmt: skip
    config = draws(2, head={"labels": ["no", "yes"]}, calibration=found.to_dict()).config.to_dict()
    text = render_card(config, adapter=False)
    assert "Predictions use the temperature 0.71 of the mixture. It was fitted on 500 " in text
    assert "| without a temperature | 0.6540 |\n| with the fitted temperature | 0.6377 |" in text
    none = render_card(draws(2, calibration={**found.to_dict(), "temperature": 1.0}).config.to_dict(), adapter=False)
    assert "no other was better by more than a standard error" in none


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "model_cards").glob("*.json"))


def test_every_example_has_its_configuration_and_its_page() -> None:
    assert EXAMPLES
    assert {path.stem for path in (ROOT / "model_cards").glob("*.md")} == {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_what_its_configuration_renders_to(path: Path) -> None:
    example = json.loads(path.read_text())
    given = {name: example[name] for name in ("adapter", "repo_id", "custom_generate") if name in example}
    text = render_card(example["config"], **given, **example["author"])
    assert path.with_suffix(".md").read_text() == text
    assert not re.search(r"/tmp/|/home/|/work/|\(local path\)", path.read_text() + text)
