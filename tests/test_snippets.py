"""Every Python snippet of README and docs runs as it is printed, on tiny models and without the hub."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from datasets import Dataset
from huggingface_hub import CommitInfo, HfApi, RepoUrl
from huggingface_hub.utils import filter_repo_objects

from hf_bayes.cli.main import COMMANDS
from hf_bayes.posteriors import hub
from tests.runs import token_rows
from tests.snippet_names import (
    Namespace,
    a_classifier,
    a_classifier_to_distil,
    a_language_model,
    a_method_of_the_page,
    a_policy,
    a_posterior_of_counts,
    a_resnet,
    a_reward_model,
    a_run,
    a_run_on_a_named_base,
    a_saved_classifier,
    a_text_generator,
    a_tuning,
    an_exported_posterior,
    chats_of_a_small_model,
    class_predictions,
    labelled_predictions,
    logistic_data,
    one_process_of_a_launch,
    pairs_of_answers,
    pairs_of_texts,
    posteriors_of_images_and_audio,
    predictions,
    preferences_of_a_small_model,
    rows_with_numbers,
    short_arguments,
    the_first_loop,
    the_hub_of_the_readme,
    three_classes,
)
from tests.tiny_models import tiny_llama, with_lora

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))))
ELSEWHERE = {
    ("README.md", 0): "test_the_readme_runs_without_a_change, below",
    ("docs/add_a_method.md", 0): "tests/methods/test_add_a_method.py makes the file and runs its tests",
}


class Snippet(NamedTuple):
    """The settings with which a printed snippet is run.

    Attributes:
        names: makes what the text around the snippet presupposes, in the current folder.
        shorter: text that is replaced, so that the run takes a second and not an hour, but has a burn-in.
        needs: a package that the snippet imports and that is no dependency.
    """

    names: Callable[[], Namespace]
    shorter: dict[str, str] = {}  # noqa: RUF012 - of a NamedTuple
    needs: str | None = None


SNIPPETS = {
    ("docs/add_a_method.md", 1): Snippet(a_method_of_the_page, {"num_steps=2000": "num_steps=201"}),
    ("docs/automatic.md", 0): Snippet(a_run, {"max_steps=500": "max_steps=20"}),
    ("docs/automatic.md", 1): Snippet(a_tuning, {"data_collator=collate)": "data_collator=collate, candidates=few)"}),
    ("docs/README.md", 0): Snippet(lambda: a_language_model("out")),
    ("docs/continual.md", 0): Snippet(a_run),
    ("docs/decide.md", 0): Snippet(a_saved_classifier, {"error_rate=0.05": "error_rate=0.95, failure_rate=0.2"}),
    ("docs/decide.md", 1): Snippet(a_text_generator, {"error_rate=0.2": "error_rate=0.6", 'tokens": 20': 'tokens": 2'}),
    ("docs/decide.md", 2): Snippet(class_predictions),
    ("docs/decide.md", 3): Snippet(a_text_generator),
    ("docs/decide.md", 4): Snippet(a_saved_classifier),
    ("docs/diagnostics.md", 0): Snippet(lambda: a_language_model("out")),
    ("docs/distilled.md", 0): Snippet(a_classifier_to_distil),
    ("docs/curvature.md", 0): Snippet(three_classes),
    ("docs/curvature.md", 1): Snippet(lambda: {**a_run(), "rows": token_rows()}),
    ("docs/export.md", 0): Snippet(an_exported_posterior, {'"gpt2"': '"base"', '"user/posterior"': '"repository"'}),
    ("docs/evaluate.md", 0): Snippet(labelled_predictions),
    ("docs/harnesses.md", 0): Snippet(lambda: a_language_model("my-posterior")),
    ("docs/harnesses.md", 1): Snippet(lambda: a_language_model("my-posterior")),
    ("docs/laplace.md", 0): Snippet(lambda: {**a_run(), "rows": token_rows(), "heldout_rows": token_rows(9, seed=1)}),
    ("docs/laplace.md", 1): Snippet(lambda: {**a_run(), "rows": token_rows(), "heldout_rows": token_rows(4, seed=1)}),
    ("docs/laplace.md", 2): Snippet(lambda: a_classifier("my-classifier")),
    ("docs/laplace.md", 3): Snippet(lambda: a_language_model("my-language-model")),
    ("docs/likelihoods.md", 0): Snippet(rows_with_numbers, {"num_train_epochs=3": "max_steps=20"}),
    ("docs/likelihoods.md", 1): Snippet(a_posterior_of_counts),
    ("docs/dpo.md", 0): Snippet(preferences_of_a_small_model, {"num_train_epochs=1": "max_steps=60"}, "trl"),
    ("docs/dpo.md", 1): Snippet(a_policy),
    ("docs/dpo.md", 2): Snippet(pairs_of_answers, {"num_train_epochs=1": "max_steps=20"}),
    ("docs/rewards.md", 0): Snippet(preferences_of_a_small_model, {"num_train_epochs=1": "max_steps=60"}, "trl"),
    ("docs/rewards.md", 1): Snippet(pairs_of_texts),
    ("docs/rewards.md", 2): Snippet(a_reward_model),
    ("docs/models.md", 0): Snippet(lambda: {**a_language_model("my-posterior"), "peft_model": with_lora(tiny_llama())}),
    ("docs/models.md", 1): Snippet(a_resnet, {"max_steps=500": "max_steps=4"}),
    ("docs/multi_gpu.md", 0): Snippet(one_process_of_a_launch),
    ("docs/multi_gpu.md", 1): Snippet(a_run, {"max_steps=5000": "max_steps=2", "_size=16": "_size=1"}),
    ("docs/own_loop.md", 0): Snippet(a_run, {"num_steps=500": "num_steps=4", "batches, 500": "batches, 4"}),
    ("docs/own_loop.md", 1): Snippet(
        the_first_loop, {"num_steps=500": "num_steps=40", "updates(), 500": "updates(), 40"}
    ),
    ("docs/publish.md", 0): Snippet(lambda: a_language_model("my-posterior")),
    ("docs/publish.md", 1): Snippet(lambda: a_language_model("my-posterior")),
    # bitsandbytes repacks 4-bit weights at the first prediction on some CPUs (docs/models.md), 8-bit weights nowhere
    ("docs/quantised.md", 0): Snippet(
        a_run_on_a_named_base,
        {"num_train_epochs=3": "max_steps=20", 'load_in_4bit=True, bnb_4bit_quant_type="nf4"': "load_in_8bit=True"},
        "bitsandbytes",
    ),
    ("docs/reliability.md", 0): Snippet(lambda: a_language_model("my-posterior")),
    ("docs/sample.md", 0): Snippet(three_classes),
    ("docs/sample.md", 1): Snippet(dict),
    ("docs/scale.md", 0): Snippet(dict, {"num_steps=2_000": "num_steps=60"}),
    ("docs/scale.md", 1): Snippet(logistic_data, {"num_steps=20_000": "num_steps=60"}, "pyro"),
    ("docs/training_free.md", 0): Snippet(lambda: {**a_run(), "heldout": Dataset.from_list(token_rows(40, seed=1))}),
    ("docs/trl.md", 0): Snippet(
        chats_of_a_small_model, {"assistant_only_loss": "max_steps=20, assistant_only_loss"}, "trl"
    ),
    ("docs/trl.md", 1): Snippet(chats_of_a_small_model, {"num_train_epochs=3": "max_steps=4"}, "trl"),
    ("docs/single_pass.md", 0): Snippet(lambda: a_classifier("my-classifier")),
    ("docs/single_pass.md", 1): Snippet(lambda: a_language_model("my-language-model")),
    ("docs/uncertainty.md", 0): Snippet(dict),
    ("docs/uncertainty.md", 1): Snippet(posteriors_of_images_and_audio),
    ("docs/uncertainty.md", 2): Snippet(predictions),
    ("docs/uncertainty.md", 3): Snippet(dict),
    ("docs/variational.md", 0): Snippet(dict, {"num_steps=2_000": "num_steps=60"}),
    ("docs/variational.md", 1): Snippet(lambda: {**a_run(), "args": short_arguments()}),
    ("docs/variational.md", 2): Snippet(a_run),
}


def printed(page: str) -> list[str]:
    """The Python snippets of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder_as_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which repositories are folders; the user's name is "user"."""
    root = tmp_path / "hub"

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> RepoUrl:
        return RepoUrl(f"https://huggingface.co/user/{repo_id.split('/')[-1]}")

    def upload_folder(self: HfApi, *, repo_id: str, folder_path: str, allow_patterns: list[str], **options: Any) -> Any:
        files = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        for name in filter_repo_objects(files, allow_patterns=allow_patterns):
            (root / repo_id / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder_path) / name, root / repo_id / name)
        return CommitInfo(
            commit_url="https://huggingface.co/user/x/commit/1", commit_message="", commit_description="", oid="1"
        )

    def list_repo_files(self: HfApi, repo_id: str, **options: Any) -> list[str]:
        return [path.relative_to(root / repo_id).as_posix() for path in (root / repo_id).rglob("*") if path.is_file()]

    monkeypatch.setattr(HfApi, "list_repo_files", list_repo_files)
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda repo_id, **options: str(root / repo_id))
    return root


def test_every_snippet_is_listed() -> None:
    found = {(page, index) for page in PAGES for index in range(len(printed(page)))}
    assert found == set(SNIPPETS) | set(ELSEWHERE)


@pytest.mark.parametrize(("page", "index"), SNIPPETS, ids=lambda value: str(value))
def test_a_snippet_runs_as_printed(page, index, tmp_path, folder_as_hub, monkeypatch) -> None:
    snippet, source = SNIPPETS[page, index], printed(page)[index]
    if snippet.needs is not None:
        pytest.importorskip(snippet.needs, reason=f"{page} uses {snippet.needs}, which is no dependency")
    for long, short in snippet.shorter.items():
        assert source.count(long) == 1
        source = source.replace(long, short)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny runs deserve their warnings
        names = snippet.names()
        try:
            exec(compile(source, f"{page}, snippet {index}", "exec"), names)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def test_the_readme_runs_without_a_change(tmp_path, monkeypatch) -> None:
    """Not a word is replaced, and nothing but the Hub is given: a run with nothing set samples, from a ladder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = the_hub_of_the_readme()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(printed("README.md")[0], "README.md", "exec"), names)
    posterior, (first, *_) = names["trainer"].posterior, names["record"]["tokens"]
    assert posterior.config.method["name"] == "sghmc"
    assert len(posterior.config.diagnostics["ladder_temperature"]) == 4
    assert {"token", "logprob", "total", "aleatoric", "epistemic"} <= first.keys()


def test_the_readme_has_at_most_120_lines_of_100_characters() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", ["README.md", "docs/multi_gpu.md", "docs/quickstart.md"])
def test_commands_name_scripts_and_targets_that_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    scripts, targets, names = (
        re.findall(r"\bscripts/\S+\.py", commands),
        re.findall(r"^make (\S+)", commands, flags=re.MULTILINE),
        re.findall(r"(?:hf-bayes|-m hf_bayes\.cli) (\w+)", commands),
    )
    assert scripts or targets or names
    assert set(names) <= set(COMMANDS)
    assert all((ROOT / script).is_file() for script in scripts)
    assert all(f"\n{target}: " in (ROOT / "Makefile").read_text() for target in targets)


NEW_FILE = "shared_noise.py"
"""The example of CONTRIBUTING.md, which the reader makes."""


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_paths_and_links_of_a_page_lead_somewhere(page: str) -> None:
    text = re.sub(r"<!-- \w+: begin -->.*?<!-- \w+: end -->", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    named = {name for name in re.findall(r"`([\w/]+\.py)`", text) if "/" in name and not name.endswith(NEW_FILE)}
    assert not {name for name in named if not any((ROOT / top / name).is_file() for top in ("", "hf_bayes"))}
    for target in re.findall(r"\]\((?!http)([^)]*)\)", text):
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target
