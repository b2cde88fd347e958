"""Every Python snippet of README and docs runs as it is printed, on tiny models and without the hub."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub import CommitInfo, HfApi, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    ViTImageProcessor,
    Wav2Vec2FeatureExtractor,
    default_data_collator,
)

from hf_bayes import (
    BayesianTrainer,
    BayesianTrainingArguments,
    BradleyTerry,
    MAPConfig,
    MeanFieldConfig,
    Poisson,
    Posterior,
    SGHMCConfig,
    attach,
    fit_laplace,
    pipeline,
)
from hf_bayes.cli.main import COMMANDS
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.posteriors import hub
from hf_bayes.posteriors.custom_generate import export_custom_generate
from hf_bayes.training.tuning.candidates import Candidate
from tests import multimodal
from tests.members.subjects import resnet
from tests.models.test_audio_classification import sound_rows
from tests.models.test_image_classification import image_rows
from tests.models.trained import from_disk
from tests.runs import arguments, label_rows, padding_collator, token_rows, trainer
from tests.tiny_models import batch, tiny_bert, tiny_llama, tiny_tokenizer, tiny_vit, with_lora

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))))
ELSEWHERE = {("docs/add_a_method.md", 0): "tests/methods/test_add_a_method.py makes the file and runs its tests"}

Namespace = dict[str, Any]


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


def saved_base(model: PreTrainedModel) -> PreTrainedModel:
    """The model, loaded from a folder of its own: a posterior finds its base model there."""
    model.save_pretrained("base")
    return type(model).from_pretrained(Path("base").absolute())


def a_run() -> Namespace:
    rows = Dataset.from_list(token_rows())
    model = with_lora(saved_base(tiny_llama()))
    names = {
        "peft_model": model,
        "model": model,
        "train": rows,
        "dev": rows,
        "heldout": rows,
        "tokenizer": tiny_tokenizer(),
    }
    halves = {"one": rows.select(range(5)), "two": rows.select(range(5, 10))}
    return {**names, **halves, "collate": padding_collator(), "rows_of_this_hospital": rows}


def short_arguments() -> BayesianTrainingArguments:
    return BayesianTrainingArguments("out", max_steps=20, use_cpu=True, report_to=[], disable_tqdm=True)


def a_tuning() -> Namespace:
    few = [Candidate("plain fine-tuning", MAPConfig(), 1e-2), Candidate("slow", MAPConfig(), 1e-5)]
    args = BayesianTrainingArguments("tuned", max_steps=60, use_cpu=True, report_to=[], disable_tqdm=True)
    rows = {"train": token_rows(20), "heldout": token_rows(200, seed=1)}
    return {**a_run(), **{name: Dataset.from_list(found) for name, found in rows.items()}, "args": args, "few": few}


def a_language_model(directory: str) -> Namespace:
    """A posterior of it in ``directory``, and inputs."""
    method = MeanFieldConfig() if directory == "out" else SGHMCConfig(num_chains=2)
    run = trainer(directory, method, model=with_lora(saved_base(tiny_llama())), processing_class=tiny_tokenizer())
    run.train()
    run.save_model()
    inputs = batch()
    return {"inputs": inputs, **inputs}


def chats_of_a_small_model() -> Namespace:
    """The model that the page names, tiny, in a folder of that name."""
    name, tokenizer = "Qwen/Qwen2.5-0.5B-Instruct", tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m['role'] }}: {{ m['content'] }}</s>{% endgeneration %}{% endfor %}"
    )
    tiny_llama().save_pretrained(name)
    tokenizer.save_pretrained(name)
    chat = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]
    return {"chats": Dataset.from_list([{"messages": chat}] * 8)}


def an_exported_posterior() -> Namespace:
    """A repository with code in "repository", and its base model with a tokenizer in "base"."""
    a_language_model("my-posterior")
    tiny_tokenizer().save_pretrained("base")
    export_custom_generate(Posterior.from_pretrained("my-posterior"), "repository")
    return {}


def one_process_of_a_launch() -> Namespace:
    names = a_language_model("my-posterior")
    store = torch.distributed.FileStore(str(Path("store").absolute()), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return names


def a_classifier() -> Namespace:
    model = with_lora(saved_base(tiny_bert()))
    collate = DataCollatorWithPadding(tiny_tokenizer())
    rows = [{"labels": row.pop("label"), **row} for row in label_rows()]
    fit_laplace(model, rows, LaplaceConfig(prior_std=0.1), collate=collate, tokenizer=tiny_tokenizer()).save_pretrained(
        "out"
    )
    return {"inputs": batch()}


def a_posterior_of_counts() -> Namespace:
    """A posterior of counts of texts, in "counts"."""
    rows = [row | {"label": float(row["label"])} for row in label_rows()]
    given = {"likelihood": Poisson(), "tokenizer": tiny_tokenizer()}
    fit_laplace(with_lora(saved_base(tiny_bert(num_labels=1))), rows, **given).save_pretrained("counts")
    return {}


def a_classifier_to_distil() -> Namespace:
    model = with_lora(saved_base(tiny_bert()))
    run = trainer("my-posterior", EnsembleConfig(num_chains=3, prior_std=1.0), model=model, train=label_rows())
    run.train()
    run.save_model()
    return {"rows": label_rows(220), "queries_of_another_kind": label_rows(20, seed=1), "inputs": batch()}


def a_saved_classifier() -> Namespace:
    """A posterior of it in "my-classifier", and the predictions of its members."""
    model = with_lora(saved_base(tiny_bert()))
    method = EnsembleConfig(num_chains=3, prior_std=1.0)
    run = trainer("my-classifier", method, model=model, train=label_rows(), processing_class=tiny_tokenizer())
    run.train()
    run.save_model()
    return {"heldout": label_rows(40, seed=1), "model": run.model, "pool": label_rows(20, seed=2)}


def class_predictions() -> Namespace:
    model, labels = attach(with_lora(tiny_bert()), num_members=2).eval(), torch.arange(40) % 3
    return {"heldout_logits": torch.randn(40, 3), "heldout_labels": labels, "model": model, "inputs": batch()}


def a_text_generator() -> Namespace:
    names = a_language_model("my-posterior")
    prompts = [f"chain {number}" for number in range(12)]
    generate = pipeline(model="my-posterior")
    read = Posterior.from_pretrained("my-posterior")
    return {**names, "generate": generate, "prompts": prompts * 2, "posterior": read, "is_wrong": lambda text: False}


def labelled_predictions() -> Namespace:
    return {**class_predictions(), "labels": torch.zeros(3, dtype=torch.long), "is_other": [0, 1, 0]}


def a_run_on_a_named_base() -> Namespace:
    """A run, and the model that the page names, tiny, in a folder of that name."""
    names = a_run()
    sizes = {"hidden_size": 64, "intermediate_size": 64}  # bitsandbytes packs 32 rows at a time on CPUs
    tiny_llama(**sizes).save_pretrained("Qwen/Qwen2.5-0.5B")
    return names


def predictions() -> Namespace:
    probabilities = torch.randn(8, 3).softmax(-1)
    rows = {"class_probabilities": probabilities, "labels": torch.arange(8) % 3, "log_probs": probabilities.log()}
    return {**rows, "epistemic": torch.rand(8), "is_ood": torch.arange(8) % 2}


def three_classes() -> Namespace:
    """Return 100 points in the plane, of three classes."""
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()}


def logistic_data() -> Namespace:
    x = torch.randn(70, 3)
    return {"x": x, "y": (x.sum(1) > 0).float(), "d": 3}


def a_resnet() -> Namespace:
    resnet(torch.float32).save_pretrained("my-resnet")
    return {"images": image_rows(12)}


def posteriors_of_images_and_audio() -> Namespace:
    sounds = sound_rows("wav2vec2")
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    for name, base, rows, reader in (
        ("image", tiny_vit(), image_rows(), processor),
        ("audio", multimodal.wav2vec2(), sounds, Wav2Vec2FeatureExtractor()),
    ):
        model = with_lora(from_disk(base, Path(f"{name}-base").absolute()))
        run = trainer(f"my-{name}-posterior", SGHMCConfig(num_chains=2), model=model, train=rows, max_steps=2,
                      processing_class=reader)  # fmt: skip
        run.train()
        run.save_model()
    Image.new("RGB", (8, 8), "red").save("picture.png")
    return {"samples": np.array(sounds[0]["input_values"], dtype=np.float32)}


def rows_with_numbers() -> Namespace:
    """A regression on a tiny encoder, and rows with a number each."""
    model = with_lora(saved_base(tiny_bert(num_labels=1)))
    rows = Dataset.from_list([{"labels": float(row.pop("label")), **row} for row in label_rows()])
    return {"model": model, "rows": rows, "collate": DataCollatorWithPadding(tiny_tokenizer()), "inputs": batch()}


def preferences_of_a_small_model() -> Namespace:
    """The model that the page names, tiny, in a folder of that name."""
    chats_of_a_small_model()
    pairs = [{"chosen": f"a good answer {number}", "rejected": f"no {number}"} for number in range(8)]
    return {"preferences": Dataset.from_list(pairs)}


def a_policy() -> Namespace:
    """A posterior of a language model in "my-policy", and a prompt."""
    names = a_language_model("my-policy")
    return {**names, "prompt": {"input_ids": torch.arange(3, 8)[None]}}


def pairs_of_texts() -> Namespace:
    """A reward model, tokenised pairs and a tokenizer."""
    ids = [token_rows(2, length=6, seed=seed) for seed in range(8)]
    rows = [{"input_ids": [row["input_ids"] for row in pair], "labels": 0} for pair in ids]
    model = with_lora(saved_base(tiny_bert(num_labels=1)))
    return {"model": model, "pairs": Dataset.from_list(rows), "tokenizer": tiny_tokenizer()}


def pairs_of_answers() -> Namespace:
    """A language model, and tokenised pairs of answers to prompts of two tokens."""
    rows = pairs_of_texts()["pairs"].map(
        lambda row: {"attention_mask": [[1] * 6] * 2, "completion_mask": [[0, 0, 1, 1, 1, 1]] * 2}
    )
    return {"model": with_lora(saved_base(tiny_llama())), "pairs": rows}


def a_reward_model() -> Namespace:
    """A posterior of it in "my-rewards", and texts."""
    made = pairs_of_texts()
    run = BayesianTrainer(
        made["model"], EnsembleConfig(num_chains=3, prior_std=1.0), arguments("my-rewards"),
        train_dataset=made["pairs"], likelihood=BradleyTerry(), processing_class=tiny_tokenizer(),
        data_collator=default_data_collator,
    )  # fmt: skip
    run.train()
    run.save_model()
    texts = ["an answer", "another answer"]
    return {"tokenizer": tiny_tokenizer(), "texts": texts, "candidates": texts, "prompts": ["ask"] * 2,
            "completions": texts}  # fmt: skip


SNIPPETS = {
    ("README.md", 0): Snippet(a_run, {"num_train_epochs=3": "max_steps=20"}),
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
    ("docs/laplace.md", 0): Snippet(lambda: {**a_run(), "rows": token_rows()}),
    ("docs/laplace.md", 1): Snippet(lambda: {**a_run(), "rows": token_rows(), "heldout_rows": token_rows(4, seed=1)}),
    ("docs/laplace.md", 2): Snippet(a_classifier),
    ("docs/laplace.md", 3): Snippet(lambda: a_language_model("out")),
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
    ("docs/publish.md", 0): Snippet(lambda: a_language_model("my-posterior")),
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
    ("docs/single_pass.md", 0): Snippet(lambda: a_language_model("out")),
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


@pytest.mark.parametrize("page", ["README.md", "docs/multi_gpu.md", "docs/quickstart.md"])
def test_commands_name_scripts_and_targets_that_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    scripts, targets, names = (
        re.findall(r"\bscripts/\S+\.py", commands),
        re.findall(r"^make (\S+)", commands, flags=re.MULTILINE),
        re.findall(r"(?:hf-bayes|-m hf_bayes) (\w+)", commands),
    )
    assert scripts or targets or names
    assert set(names) <= set(COMMANDS)
    assert all((ROOT / script).is_file() for script in scripts)
    assert all(f"\n{target}: " in (ROOT / "Makefile").read_text() for target in targets)


def rows_of_tables(text: str) -> dict[tuple[str, str], list[str]]:
    """{(first cell of a row, heading of a column): the cells there}, over all tables of a page."""
    cells: dict[tuple[str, str], list[str]] = {}
    for block in re.findall(r"^\|.*?\n(?!\|)", text, flags=re.DOTALL | re.MULTILINE):
        heading, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for name, *row in rows:
            for column, cell in zip(heading[1:], row, strict=True):
                cells.setdefault((name, column), []).append(cell)
    return cells


def part(page: str, begin: str | None = None, end: str | None = None) -> str:
    """Return the text of a page from one mark to another."""
    text = (ROOT / page).read_text("utf-8")
    return text[text.index(begin) if begin else 0 : text.index(end) if end else None]


@pytest.mark.parametrize(
    ("copied", "source"),
    [
        (("README.md",), ("docs/results/encoder_table.md",)),
        (
            ("docs/benchmarks.md", None, "<!-- cpu: begin -->"),
            ("docs/benchmarks.md", "<!-- cpu: begin -->", "<!-- cpu: end -->"),
        ),
    ],
    ids=["README", "benchmarks"],
)
def test_a_table_that_is_copied_equals_its_source(copied: tuple[str, ...], source: tuple[str, ...]) -> None:
    shown, cells = rows_of_tables(part(*copied)), rows_of_tables(part(*source))
    assert shown
    assert {place: cells.get(place) for place in shown} == shown


def rows_by_heading(text: str) -> list[dict[str, str]]:
    """{heading of a column: cell} of every row of every table of a page."""
    rows = []
    for block in re.findall(r"^\|.*?\n(?!\|)", text, flags=re.DOTALL | re.MULTILINE):
        heading, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        rows += [dict(zip(heading, row, strict=True)) for row in cells]
    return rows


def test_the_figures_of_the_chooser_are_those_of_the_results() -> None:
    """Check that each figure is a part of a row of a page that is made from JSON."""
    results = ("recommend", "golds", "encoder_table")
    sources = (*(f"docs/results/{name}.md" for name in results), "docs/benchmarks.md")
    known = [row.items() for page in sources for row in rows_by_heading(part(page))]
    shown = [row for row in rows_by_heading(part("docs/choose.md")) if "you need" not in row]
    assert len(shown) > 20
    assert [row for row in shown if not any(row.items() <= of for of in known)] == []


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
