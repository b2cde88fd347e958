"""The names that the snippets of README and docs use before they define them, each with a small model or data."""

from __future__ import annotations

import re
import runpy
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from torch.utils.data import DataLoader
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
    scale_of,
    start_run,
)
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.posteriors.custom_generate import export_custom_generate
from hf_bayes.training.tuning.candidates import Candidate
from tests import multimodal
from tests.members.subject_models import resnet
from tests.models.test_audio_classification import sound_rows
from tests.models.test_image_classification import image_rows
from tests.models.trained import from_disk
from tests.runs import arguments, label_rows, padding_collator, token_rows, trainer
from tests.tiny_models import batch, tiny_bert, tiny_llama, tiny_tokenizer, tiny_vit, with_lora

Namespace = dict[str, Any]


def saved_base(model: PreTrainedModel) -> PreTrainedModel:
    """The model, loaded from a folder of its own: a posterior finds its base model there."""
    model.save_pretrained("base")
    return type(model).from_pretrained(Path("base").absolute())


def the_hub_of_the_readme() -> Namespace:
    """Folders with the names of the model and the data that the README takes from the Hub: both libraries look there.

    As on the Hub, the weights are in bfloat16, the tokenizer has no token for padding, and some rows are headings.
    """
    model, data = Path("HuggingFaceTB/SmolLM2-135M"), Path("Salesforce/wikitext")
    tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=True, num_hidden_layers=1).save_pretrained(model)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(model)
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = " ".join(" ".join(page.read_text("utf-8") for page in pages).split())
    rows = [{"text": part} for at in range(0, 300 * 480, 300) for part in (" = Heading = ", text[at : at + 300])]
    Dataset.from_list(rows).to_parquet(data / "wikitext-2-raw-v1" / "train-00000-of-00001.parquet")
    files = "[{split: train, path: wikitext-2-raw-v1/train-*}]"
    card = f"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files: {files}\n---\n"
    (data / "README.md").write_text(card, "utf-8")
    return {}


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


def a_method_of_the_page() -> Namespace:
    """The names of the file that the page prints first."""
    page = Path(__file__).parents[1] / "docs" / "add_a_method.md"
    source, *_ = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    Path("shared_noise.py").write_text(source, "utf-8")
    return runpy.run_path("shared_noise.py", run_name="shared_noise")


def the_first_loop() -> Namespace:
    """The names of the first loop of the page."""
    made = a_run()
    method, model = SGHMCConfig(num_chains=4), attach(made["peft_model"])
    scale = scale_of(model, made["train"], made["collate"], rows_per_update=8)
    loader = DataLoader(made["train"], batch_size=8, shuffle=True, drop_last=True, collate_fn=made["collate"])
    tools = {"chain": chain, "islice": islice, "repeat": repeat, "DataLoader": DataLoader, "start_run": start_run}
    return {**made, **tools, "method": method, "model": model, "scale": scale, "loader": loader}


def a_tuning() -> Namespace:
    few = [Candidate("plain fine-tuning", MAPConfig(), 1e-2), Candidate("slow", MAPConfig(), 1e-5)]
    args = BayesianTrainingArguments("tuned", max_steps=60, use_cpu=True, report_to=[], disable_tqdm=True)
    rows = {"train": token_rows(20), "heldout": token_rows(200, seed=1)}
    return {**a_run(), **{name: Dataset.from_list(found) for name, found in rows.items()}, "args": args, "few": few}


def a_language_model(directory: str) -> Namespace:
    """A posterior of it in ``directory``, and inputs."""
    method = SGHMCConfig(num_chains=2) if directory == "my-posterior" else MeanFieldConfig()
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
    chats = Dataset.from_list([{"messages": chat}] * 8)
    return {"chats": chats, "heldout_chats": chats}


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


def a_classifier(directory: str) -> Namespace:
    """A Laplace approximation of it in ``directory``, and inputs."""
    model = with_lora(saved_base(tiny_bert()))
    collate = DataCollatorWithPadding(tiny_tokenizer())
    rows = [{"labels": row.pop("label"), **row} for row in label_rows()]
    posterior = fit_laplace(model, rows, LaplaceConfig(prior_std=0.1), collate=collate, tokenizer=tiny_tokenizer())
    posterior.save_pretrained(directory)
    return {"inputs": batch()}


def a_classifier_to_distil() -> Namespace:
    model = with_lora(saved_base(tiny_bert()))
    run = trainer("my-posterior", EnsembleConfig(num_chains=3, prior_std=1.0), model=model, train=label_rows())
    run.train()
    run.save_model()
    rows, others, collate = label_rows(220), label_rows(20, seed=1), DataCollatorWithPadding(tiny_tokenizer())
    return {"rows": rows, "queries_of_another_kind": others, "collate": collate, "inputs": batch()}


def a_saved_classifier() -> Namespace:
    """A posterior of it in "my-classifier", and the predictions of its members."""
    model = with_lora(saved_base(tiny_bert()))
    method = EnsembleConfig(num_chains=3, prior_std=1.0)
    run = trainer("my-classifier", method, model=model, train=label_rows(), processing_class=tiny_tokenizer())
    run.train()
    run.save_model()
    collate = DataCollatorWithPadding(tiny_tokenizer())
    return {"heldout": label_rows(40, seed=1), "pool": label_rows(20, seed=2), "collate": collate, "model": run.model}


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
    return {"peft_model": with_lora(saved_base(tiny_llama())), "pairs": rows}


def a_posterior_of_counts() -> Namespace:
    """A posterior of counts of texts, in "counts"."""
    rows = [row | {"label": float(row["label"])} for row in label_rows()]
    given = {"likelihood": Poisson(), "tokenizer": tiny_tokenizer()}
    fit_laplace(with_lora(saved_base(tiny_bert(num_labels=1))), rows, **given).save_pretrained("counts")
    return {}


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
