"""A push to a server with the Hub's API, and a load in a clean cache, give the same tokens and uncertainties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors import hub
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.training.trainer import BayesianTrainer
from tests.faults.posteriors import draws, equal
from tests.hub_server import Hub, serving
from tests.posteriors.test_sidecars import CHAT, chat_tokenizer
from tests.runs import trainer
from tests.tiny_models import tiny_llama, tiny_tokenizer, with_lora

PROMPTS: list[Any] = ["The cell", CHAT]


@pytest.fixture
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


def base_on(server: Hub, folder: Path, template: str | None) -> None:
    """Serve a base model, with or without a chat template of its own, as user/base."""
    tiny_llama().save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.commit("user/base", "main", files, [])


def answers(model: Any, cache: Path) -> list[Any]:
    generate = pipeline("bayesian-text-generation", model, cache_dir=cache)
    return [generate(prompt, do_sample=False, max_new_tokens=4) for prompt in PROMPTS]


def by_trainer(run: BayesianTrainer) -> None:
    run.push_to_hub()


def by_posterior(run: BayesianTrainer) -> None:
    run.posterior.push_to_hub("user/posterior")


def by_loaded_posterior(run: BayesianTrainer) -> None:
    Posterior.from_pretrained(run.args.output_dir).push_to_hub("user/posterior")


def by_directory(run: BayesianTrainer) -> None:
    hub.push_directory(run.args.output_dir, "user/posterior")


@pytest.mark.parametrize("push", [by_trainer, by_posterior, by_loaded_posterior, by_directory])
@pytest.mark.parametrize("base_template", [None, "other {{ messages[0]['content'] }}"], ids=["bare", "other"])
def test_what_is_pushed_answers_as_what_was_saved(
    server: Hub, tmp_path: Path, push: Any, base_template: str | None
) -> None:
    base_on(server, tmp_path / "base", base_template)
    model = with_lora(AutoModelForCausalLM.from_pretrained("user/base", cache_dir=tmp_path / "first"))
    run = trainer(
        tmp_path / "run", MAPConfig(num_chains=2), model=model, processing_class=chat_tokenizer(),
        hub_model_id="user/posterior",
    )  # fmt: skip
    run.train()
    run.save_model()
    expected = answers(tmp_path / "run", tmp_path / "first")
    push(run)
    assert answers("user/posterior", tmp_path / "clean") == expected
    assert expected[1][0]["tokens"][0]["epistemic"] > 0


def test_a_later_push_removes_what_it_no_longer_has(server: Hub) -> None:
    plain, chat = (
        Sidecars.of(tokenizer) for tokenizer in (tiny_tokenizer(), chat_tokenizer({"default": "a", "b": "c"}))
    )
    replace(draws(3), sidecars=chat).push_to_hub("user/posterior")
    assert "additional_chat_templates/b.jinja" in server.files("user/posterior")
    figures = ("heat_map.png", "evaluation.json", ".eval_results/user-set-default.yaml")  # of the first posterior
    old = {"vocab.txt": b"old", **dict.fromkeys(figures, b"")}
    server.commit("user/posterior", "main", {"notes.txt": b"mine", **old}, [])
    replace(draws(2), sidecars=plain).push_to_hub("user/posterior")
    expected = {*plain.files, "README.md", "manifest.json", "posterior_config.json", "notes.txt"}
    found = server.files("user/posterior")
    assert {name for name in found if not name.startswith("members/")} == expected
    assert len(found) == len(expected) + 2


def test_a_push_to_a_branch_is_loaded_from_there(server: Hub, tmp_path: Path) -> None:
    posterior = replace(draws(2), sidecars=Sidecars.of(chat_tokenizer()))
    posterior.push_to_hub("user/posterior", revision="dev")
    loaded = Posterior.from_pretrained("user/posterior", revision="dev", cache_dir=tmp_path)
    assert equal(loaded, posterior)
    assert loaded.sidecars == posterior.sidecars


def test_a_push_keeps_the_tokenizers_of_other_folders(server: Hub) -> None:
    draws(2).push_to_hub("user/posterior")
    server.commit("user/posterior", "main", {"sub/spiece.model": b"mine", "spiece.model": b"old"}, [])
    draws(2).push_to_hub("user/posterior")
    found = server.files("user/posterior")
    assert "sub/spiece.model" in found
    assert "spiece.model" not in found
