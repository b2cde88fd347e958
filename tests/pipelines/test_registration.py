"""``transformers.pipeline`` with our tasks: models, directories, in any order of imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig
from transformers.pipelines import PIPELINE_REGISTRY

from hf_bayes.pipelines.factory import pipeline
from hf_bayes.pipelines.registration import PosteriorToLoad, register_when_loaded
from hf_bayes.posteriors.tasks import TASKS
from tests.models.trained import from_disk, run
from tests.runs import label_rows, token_rows
from tests.tiny_models import TEXTS, tiny_bert, tiny_llama, tiny_tokenizer, with_lora

GREEDY = {"max_new_tokens": 3, "do_sample": False}
CHAT = [{"role": "user", "content": "A chain"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Posteriors of adapters and of a head, whose tokenizer has a chat template that the base's has not."""
    tokenizer = tiny_tokenizer()
    found = {}
    for name, make, rows, subspace in (
        ("adapter", tiny_llama, token_rows(4), "trainable"),
        ("head", tiny_llama, token_rows(4), "last_layer"),
        ("classifier", tiny_bert, label_rows(4), "trainable"),
    ):
        root = tmp_path_factory.mktemp(name)
        base = from_disk(make(), root / "base")
        tokenizer.chat_template = None
        tokenizer.save_pretrained(root / "base")
        tokenizer.chat_template = "{% for m in messages %}Langevin: {{ m['content'] }}{% endfor %}"
        model = base if subspace == "last_layer" else with_lora(base)
        trainer = run(root, model, rows, rows, subspace=subspace, processing_class=tokenizer)
        trainer.train()
        trainer.save_model()
        found[name] = root / "posterior"
    return found


@pytest.mark.parametrize("name", ["adapter", "head"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_directory_answers_as_our_own_pipeline_does(saved: dict[str, Path], name: str, kind: type) -> None:
    stock = transformers.pipeline("bayesian-text-generation", kind(saved[name]))
    ours = pipeline("bayesian-text-generation", saved[name])
    assert type(stock) is type(ours)
    for prompt in (TEXTS[0], CHAT):  # the chat template is the posterior's, and not the base model's
        assert stock(prompt, **GREEDY) == ours(prompt, **GREEDY)
    assert stock.model.num_members == ours.model.num_members == 4


def test_a_classifiers_directory_answers_as_our_own_pipeline(saved: dict[str, Path]) -> None:
    stock = transformers.pipeline("bayesian-text-classification", model=str(saved["classifier"]), top_k=2)
    assert stock(TEXTS[0]) == pipeline(model=saved["classifier"], top_k=2)(TEXTS[0])
    assert stock(TEXTS[0])[0][0]["uncertainty"]["epistemic"] > 0


def test_arguments_of_loading_reach_the_posterior(saved: dict[str, Path]) -> None:
    directory = str(saved["adapter"])
    fewer = transformers.pipeline("bayesian-text-generation", directory, members=2, local_files_only=True)
    assert fewer.model.num_members == 2
    base = saved["adapter"].parent / "base"
    assert transformers.pipeline("bayesian-text-generation", directory, base_model=base)(TEXTS[0], **GREEDY)
    other = tiny_tokenizer(["entirely other words, many of them"])
    with pytest.raises(ValueError, match="is not the one the posterior was made with"):
        transformers.pipeline("bayesian-text-generation", directory, tokenizer=other)


def test_what_is_no_posterior_is_refused_in_our_words(saved: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a posterior for causal_lm, not sequence_classification"):
        transformers.pipeline("bayesian-text-classification", str(saved["head"]))
    with pytest.raises((OSError, ValueError), match=r"manifest"):
        transformers.pipeline("bayesian-text-generation", str(tmp_path))


def test_every_task_is_registered_once_and_others_left_alone(saved: dict[str, Path]) -> None:
    known = dict(PIPELINE_REGISTRY.supported_tasks)
    register_when_loaded()
    assert PIPELINE_REGISTRY.supported_tasks == known
    assert {task.pipeline for task in TASKS.values()} <= set(known)
    plain = transformers.pipeline("text-generation", str(saved["adapter"]))  # one member, as a plain adapter
    assert type(plain) is transformers.TextGenerationPipeline
    assert issubclass(transformers.pipelines.AutoConfig, AutoConfig)
    assert transformers.pipelines.AutoConfig.from_pretrained(saved["adapter"].parent / "base").model_type == "llama"


def test_a_revision_keeps_the_name_that_was_given() -> None:
    class Resolved(str):
        """A revision as transformers passes it on, resolved in the repository of the base model."""

        commit = "0123456"

    given: dict[str, Any] = {"revision": Resolved("v2"), "token": None, "config": object(), "_from_pipeline": "x"}
    found = PosteriorToLoad.from_pretrained("user/posterior", **given)
    assert found.settings == {"revision": "v2"}
    assert type(found.settings["revision"]) is str


@pytest.mark.parametrize(
    "lines",
    [
        "import hf_bayes; assert 'torch' not in sys.modules; import transformers.pipelines",
        "import transformers.pipelines, hf_bayes",
        "import transformers, hf_bayes",
        "from transformers import pipeline; import hf_bayes",
    ],
)
def test_pipelines_are_known_in_any_order_of_imports(lines: str) -> None:
    check = "from transformers.pipelines import check_task; print(check_task('bayesian-text-generation')[0])"
    ran = subprocess.run([sys.executable, "-c", f"import sys; {lines}; {check}"], capture_output=True, text=True)
    assert ran.stdout.strip() == "bayesian-text-generation", ran.stderr
