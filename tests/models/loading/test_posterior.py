"""Tests of loading: a directory gives the same numbers in another process, and no other base or tokenizer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.loading.posterior import load_tokenizer
from hf_bayes.models.restoration import unwrapped
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.several_labels import Bernoulli
from tests.posteriors.storage.test_read import as_hub_cache
from tests.runs import label_rows, trainer
from tests.tiny_models import EOS, batch, tiny_bert, tiny_llama, tiny_tokenizer, with_lora

LOAD = """
import sys, torch
from safetensors.torch import load_file
from hf_bayes import BayesianModelForCausalLM
expected = load_file(sys.argv[2])
model = BayesianModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    output = model(input_ids=expected["input_ids"])
for name in ("logits", "total", "epistemic"):
    assert torch.equal(output[name], expected[name]), name
print("equal", model.num_members)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chains of two draws on a base model that has a folder of its own."""
    folder = tmp_path_factory.mktemp("run")
    tiny_llama().save_pretrained(folder / "base")
    model = with_lora(AutoModelForCausalLM.from_pretrained(folder / "base"))
    run = trainer(
        folder / "posterior",
        SGHMCConfig(num_chains=2, draws_per_chain=2),
        model=model,
        processing_class=tiny_tokenizer(),
    )
    run.train()
    run.save_model()
    with torch.no_grad():
        output = run.bayesian.eval()(input_ids=batch()["input_ids"])
    numbers = {name: output[name].contiguous() for name in ("logits", "total", "epistemic")}
    save_file({"input_ids": batch()["input_ids"].contiguous(), **numbers}, folder / "expected.safetensors")
    return folder


def test_a_new_process_predicts_the_same_to_the_bit(saved: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(saved / "posterior"), str(saved / "expected.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.strip() == "equal 4", result.stderr


def test_another_posterior_does_not_predict_the_same(saved: Path) -> None:
    expected = load_file(saved / "expected.safetensors")
    model = BayesianModelForCausalLM.from_pretrained(saved / "posterior", members=2)
    assert not torch.equal(model(input_ids=expected["input_ids"]).logits, expected["logits"])


def test_one_member_is_warned_about(saved: Path) -> None:
    with pytest.warns(UserWarning, match="epistemic uncertainty is 0 by construction"):
        BayesianModelForCausalLM.from_pretrained(saved / "posterior", members=1)


def test_adapters_trained_elsewhere_become_an_ensemble(saved: Path, tmp_path: Path) -> None:
    folders = []
    for seed in range(3):
        model = PeftModel.from_pretrained(tiny_llama(), saved / "posterior", subfolder=f"members/member_00{seed}")
        model.save_pretrained(tmp_path / f"adapter_{seed}")
        folders.append(tmp_path / f"adapter_{seed}")
    Posterior.from_adapters(folders).save_pretrained(tmp_path / "ensemble")
    ids = batch()["input_ids"]
    ensemble = BayesianModelForCausalLM.from_pretrained(tmp_path / "ensemble", base_model=tiny_llama())
    first_three = BayesianModelForCausalLM.from_pretrained(saved / "posterior", members=3)
    with torch.no_grad():
        assert torch.equal(ensemble(input_ids=ids).logits, first_three(input_ids=ids).logits)


def test_a_given_base_model_is_returned_without_the_adapter(saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "base")
    base.lm_head.requires_grad_(False)
    modules, flags = dict(base.named_modules()), {n: p.requires_grad for n, p in base.named_parameters()}
    expected = base(**batch()).logits
    for _ in range(2):  # and can be lent again
        model = BayesianModelForCausalLM.from_pretrained(saved / "posterior", base_model=base)
        assert model.detach() is base
        found = dict(base.named_modules())
        assert found.keys() == modules.keys()
        assert all(found[name] is module for name, module in modules.items())
        assert {n: p.requires_grad for n, p in base.named_parameters()} == flags
        assert torch.equal(base(**batch()).logits, expected)


REFUSED = {
    "no such prediction": ({"prediction": "typo"}, "prediction must be one of"),
    "draws are not linearised": ({"prediction": "linearised"}, "Gaussian"),
    "no student": ({"prediction": "distilled"}, "no distilled student"),
    "likelihood of other tasks": ({"likelihood": Poisson()}, "leave likelihood out"),
    "more members than draws": ({"members": 5}, "5"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_a_refused_load_gives_the_base_back_unchanged(saved: Path, options: dict[str, Any], message: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "base").train()
    base.lm_head.requires_grad_(False)
    modules, flags = dict(base.named_modules()), {n: p.requires_grad for n, p in base.named_parameters()}
    with pytest.raises(ValueError, match=message):
        BayesianModelForCausalLM.from_pretrained(saved / "posterior", base_model=base, **options)
    assert all(module is modules[name] for name, module in base.named_modules())
    assert not any("forward" in vars(module) for module in modules.values())
    assert {n: p.requires_grad for n, p in base.named_parameters()} == flags
    assert all(module.training for module in modules.values())
    BayesianModelForCausalLM.from_pretrained(saved / "posterior", base_model=base)


def test_modules_that_an_adapter_copied_are_the_models_own_again() -> None:
    base = tiny_llama()
    modules = dict(base.named_modules())
    model = with_lora(base, modules_to_save=["lm_head"])
    model.base_model.model.lm_head.modules_to_save["default"].weight.data.zero_()
    assert unwrapped(model) is base
    assert all(module is modules[name] for name, module in base.named_modules())


def test_special_tokens_set_by_a_run_do_not_change_the_base(tmp_path: Path) -> None:
    tiny_llama(eos_token_id=7).save_pretrained(tmp_path / "base")
    model = with_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    run = trainer(tmp_path / "posterior", MAPConfig(), model=model, processing_class=tiny_tokenizer())
    run.train()
    run.save_model()
    assert run.bayesian.core.config.eos_token_id == EOS
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
    assert loaded.core.config.eos_token_id == EOS


def test_a_given_model_of_another_problem_type_is_refused(tmp_path: Path) -> None:
    several = {"problem_type": "multi_label_classification"}
    rows = [
        {"input_ids": row["input_ids"], "labels": [float(row["label"] == 0), float(row["label"] == 1)]}
        for row in label_rows()
    ]
    run = trainer(tmp_path, MAPConfig(), model=with_lora(tiny_bert(num_labels=2, **several)), train=rows)
    run.train()
    run.save_model()
    with pytest.raises(ValueError, match="'single_label_classification', expected 'multi_label_classification'"):
        BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=tiny_bert(num_labels=2))
    right = tiny_bert(num_labels=2, **several)
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=right)
    assert loaded.likelihood == Bernoulli()


@pytest.mark.parametrize("dtype", ["bf16", "int8", "nn", torch.int32, 16], ids=str)
def test_an_impossible_dtype_is_refused_before_the_base_loads(saved: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype must be .* such as torch.bfloat16 or 'bfloat16', got "):
        BayesianModelForCausalLM.from_pretrained(saved / "posterior", dtype=dtype, base_model="nowhere")


def test_a_given_model_is_converted_to_the_requested_dtype(saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved / "base", dtype=torch.bfloat16)
    folder = saved / "posterior"
    model = BayesianModelForCausalLM.from_pretrained(folder, base_model=base, check_base=False, dtype="float32")
    assert model.dtype == torch.float32


@pytest.mark.reliability("F7")
def test_the_tokenizer_beside_a_posterior_is_checked(saved: Path) -> None:
    assert load_tokenizer(saved / "posterior").get_vocab() == tiny_tokenizer().get_vocab()
    posterior = Posterior.from_pretrained(saved / "posterior")
    edited = json.loads(posterior.sidecars.files["tokenizer.json"])
    vocabulary = edited["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = Sidecars({**posterior.sidecars.files, "tokenizer.json": json.dumps(edited).encode()})
    with pytest.raises(ValueError, match="not the one the posterior was made with"):
        load_tokenizer(saved / "posterior", posterior=dataclasses.replace(posterior, sidecars=other))


@pytest.fixture
def alone(saved: Path, tmp_path: Path) -> Path:
    """The posterior as it comes from the Hub, with no tokenizer beside it, of a base model that needs a token."""
    posterior = Posterior.from_pretrained(saved / "posterior")
    base = {**posterior.config.base_model, "name_or_path": "user/gated"}
    config = dataclasses.replace(posterior.config, base_model=base)
    dataclasses.replace(posterior, config=config, sidecars=Sidecars()).save_pretrained(tmp_path)
    return tmp_path


def test_the_base_tokenizer_is_loaded_with_the_token(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "hf_bayes.models.loading.posterior.AutoTokenizer.from_pretrained",
        lambda name, **options: (asked.append((name, options)), tiny_tokenizer())[1],
    )
    load_tokenizer(alone, token="hf_mine")
    assert asked == [("user/gated", {"token": "hf_mine", "trust_remote_code": False, "revision": "main"})]


def test_a_pipeline_takes_the_tokenizer_from_the_given_base(alone: Path, saved: Path) -> None:
    tiny_tokenizer().save_pretrained(saved / "base")
    generate = pipeline("bayesian-text-generation", alone, base_model=saved / "base")
    assert generate.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


def test_posterior_and_base_model_come_from_the_named_cache(
    alone: Path, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny_tokenizer().save_pretrained(saved / "base")
    cache = tmp_path_factory.mktemp("cache")
    as_hub_cache(alone, cache)
    as_hub_cache(saved / "base", cache, "gated")
    generate = pipeline(model="user/posterior", cache_dir=cache, local_files_only=True)
    assert torch.equal(generate.model.theta, Posterior.from_pretrained(alone).sample())
    assert generate.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    with pytest.raises(FileNotFoundError, match="user/posterior is not a directory here"):
        pipeline(model="user/posterior", local_files_only=True)
    with pytest.raises(ValueError, match="cache_dir, local_files_only: the model is loaded already"):
        pipeline(model=generate.model, tokenizer=generate.tokenizer, cache_dir=cache, local_files_only=True)


def test_a_pipeline_reads_its_posterior_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read = storage.read_directory
    monkeypatch.setattr(
        storage, "read_directory", lambda *args, **kwargs: (reads.append(args), read(*args, **kwargs))[1]
    )
    pipeline(model=saved / "posterior")
    assert len(reads) == 1


def test_a_posterior_in_memory_is_put_on_its_base_model(saved: Path) -> None:
    expected = load_file(saved / "expected.safetensors")
    posterior = Posterior.from_pretrained(saved / "posterior")
    model = BayesianModelForCausalLM.from_pretrained(posterior)
    assert torch.equal(model(input_ids=expected["input_ids"]).logits, expected["logits"])
    with pytest.raises(
        ValueError, match=f"{saved}/posterior is a posterior for causal_lm"
    ):  # named after its directory
        BayesianModelForSequenceClassification.from_pretrained(posterior)
    with pytest.raises(ValueError, match="revision: the posterior is in memory already"):
        BayesianModelForCausalLM.from_pretrained(posterior, revision="v2")


def test_a_posterior_that_knows_no_tokenizer_says_so(alone: Path) -> None:
    posterior = Posterior.from_pretrained(alone)
    config = dataclasses.replace(posterior.config, base_model={**posterior.config.base_model, "name_or_path": ""})
    dataclasses.replace(posterior, config=config).save_pretrained(alone)
    with pytest.raises(ValueError, match="holds no tokenizer and does not name its base model"):
        load_tokenizer(alone)
