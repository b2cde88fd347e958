"""Tests of the places in which a base model is searched for, and of what is refused there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.loading.base_location import cached_commit, locate, revision_of
from hf_bayes.models.loading.checkpoint_weights import load_pretrained
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.faults.posteriors import config, draws
from tests.members.reference import core_of
from tests.models.loading.test_base_model import described
from tests.models.loading.test_lora_layers import saved
from tests.models.prepared import unchanged
from tests.posteriors.storage.test_read import as_hub_cache
from tests.tiny_models import tiny_llama, tiny_tokenizer, with_lora


def naming(name: str, folder: Path) -> Posterior:
    """A posterior whose base model is recorded as ``name``, read from ``folder``."""
    draws(2, task="causal_lm", base_model={**config().base_model, "name_or_path": name}).save_pretrained(folder)
    return Posterior.from_pretrained(folder)


@pytest.mark.parametrize("name", [".", "./", "members", "../posterior", "ABSOLUTE", "../link"])
def test_the_posteriors_own_folder_is_no_base_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "posterior"
    (tmp_path / "link").symlink_to(folder)
    posterior = naming(str(folder) if name == "ABSOLUTE" else name, folder)
    monkeypatch.chdir(folder)
    for loader in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", None)  # nothing is read from there
    with pytest.raises(ValueError, match="which is the posterior's own place: no code or model is taken from there"):
        BayesianModelForCausalLM.from_pretrained(posterior, trust_remote_code=True)
    with pytest.raises(ValueError, match="the posterior's own place"):
        pipeline(model=folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="the posterior's own place"):
        BayesianModelForCausalLM.from_pretrained(posterior, base_model=folder, trust_remote_code=True)


def test_the_posteriors_own_repository_is_no_base_model(tmp_path: Path) -> None:
    naming("User/Posterior", tmp_path / "one")
    as_hub_cache(tmp_path / "one", tmp_path / "cache")
    location: dict[str, Any] = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    posterior = Posterior.from_pretrained("user/posterior", **location)
    snapshots = Path(posterior.folder or "").parent
    for given in (None, snapshots, snapshots / Path(posterior.folder or "").name):
        with pytest.raises(ValueError, match="the posterior's own place"):
            locate(posterior, given, location, True)
    assert locate(posterior, "user/other", location, True)[0] == "user/other"


@pytest.mark.parametrize("name", ["runs/base", "./base", "base", "/nowhere/base", "~/base"])
def test_a_moved_posterior_names_missing_path_and_argument(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    naming(name, tmp_path / "posterior")
    path = name if name.startswith("/") else str(tmp_path / name.removeprefix("./"))
    words = f"records its base model as '{name}', and {path} is no folder here: give the folder, .* as base_model="
    with pytest.raises(OSError, match=words):
        BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
    with pytest.raises(OSError, match=words):
        pipeline(model=tmp_path / "posterior")


def test_a_posterior_that_moved_with_its_base_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    tiny_llama().save_pretrained("runs/base")
    model = with_lora(AutoModelForCausalLM.from_pretrained("runs/base"))
    saved(model, Path("posterior"))
    config = json.loads(Path("posterior/posterior_config.json").read_text())
    assert config["base_model"]["name_or_path"] == "someone/base"
    shutil.move(tmp_path / "here", tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert BayesianModelForCausalLM.from_pretrained("posterior", base_model="runs/base").num_members == 2


@pytest.mark.parametrize("given", ["peft", "inside", 5])
def test_what_is_no_base_model_is_refused_in_words(given: Any, tmp_path: Path) -> None:
    saved(with_lora(tiny_llama()), tmp_path)
    model = with_lora(tiny_llama()) if given != 5 else 5
    words = "base_model must be a name, a folder or a transformers model, got int"
    if given != 5:
        words = r"base_model is a \w+ with an adapter of peft: give the model without it \(peft_model\.unload\(\)"
        model = model if given == "peft" else model.get_base_model()
    with pytest.raises(ValueError, match=words):
        BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=model)


def _from_folder(folder: Path) -> Any:
    """transformers puts the adapter of the folder on the base model that it names."""
    tiny_llama().save_pretrained(folder / "base")
    with_lora(AutoModelForCausalLM.from_pretrained(folder / "base")).save_pretrained(folder / "adapter")
    return AutoModelForCausalLM.from_pretrained(folder / "adapter")


def _added(folder: Path) -> Any:
    """Make the layers that ``add_adapter`` of transformers makes; it may ask for a later peft than there is."""
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), tiny_llama())


def _unwrapped(folder: Path) -> Any:
    return with_lora(tiny_llama()).get_base_model()


@pytest.mark.parametrize("subspace", ["last_layer", r"layers\.1\..*lora_"])
@pytest.mark.parametrize("make", [_from_folder, _added, _unwrapped])
def test_an_adapter_outside_a_peft_model_is_refused(make: Any, subspace: str, tmp_path: Path) -> None:
    model = make(tmp_path)
    words = (
        r"LlamaForCausalLM has an adapter of peft in its layers, first model\.layers\.0\.self_attn\.q_proj, and is not "
        r"a PeftModel: .* Wrap the model: get_peft_model\(model, config\) .* PeftModel\.from_pretrained\(base, folder, "
        r"is_trainable=True\) .* merge it \(merge_and_unload\(\)\), save the merged model"
    )
    with unchanged(model), pytest.raises(ValueError, match=words):
        runs.trainer(tmp_path / "run", EnsembleConfig(num_chains=2), model=model, subspace=subspace)
    with unchanged(model), pytest.raises(ValueError, match=words):
        fit_laplace(model, runs.token_rows(), subspace=subspace)
    assert not (tmp_path / "run").exists()


def test_no_base_is_loaded_from_a_folder_with_an_adapter(tmp_path: Path) -> None:
    saved(with_lora(tiny_llama()), tmp_path / "posterior")
    with_lora(tiny_llama()).save_pretrained(tmp_path / "both")
    tiny_llama().save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match=r"base_model is a LlamaForCausalLM with an adapter of peft: "):
        BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior", base_model=tmp_path / "both")


def test_a_pipeline_hands_on_that_the_base_is_not_checked(tmp_path: Path) -> None:
    posterior = saved(with_lora(tiny_llama()), tmp_path)
    wrong = {**posterior.config.base_model, "fingerprint": dict.fromkeys(("config", "tokenizer")) | {"weights": "ab"}}
    changed = dataclasses.replace(posterior, config=dataclasses.replace(posterior.config, base_model=wrong))
    changed.save_pretrained(tmp_path)
    options: dict[str, Any] = {"model": tmp_path, "tokenizer": tiny_tokenizer(), "base_model": tiny_llama()}
    with pytest.raises(ValueError, match="belongs to another base model"):
        pipeline(**options)
    model = pipeline(**options, check_base=False).model  # the refusal gave the base back without the adapter
    assert model.num_members == 2
    with pytest.raises(ValueError, match="check_base: the model is loaded already"):
        pipeline(model=model, tokenizer=tiny_tokenizer(), check_base=False)


def test_a_base_of_the_hub_is_recorded_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    snapshot = as_hub_cache(tmp_path / "base", tmp_path / "cache", "base")
    base = AutoModelForCausalLM.from_pretrained("user/base", cache_dir=tmp_path / "cache", local_files_only=True)
    found = []
    for cache in ("empty", "cache"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / cache))
        found.append(described(base, "last_block")["revision"])
    assert found == [None, snapshot.name]
    assert cached_commit("") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user/base").mkdir(parents=True)
    assert cached_commit("user/base") is None  # transformers takes a folder before a repository


@pytest.mark.parametrize("told_by", ["peft's config", "our loader"])
def test_a_base_of_another_branch_is_recorded(told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    snapshot = as_hub_cache(tmp_path / "base", tmp_path / "cache", "base")
    other, repository = "1" * 40, snapshot.parents[1]
    shutil.copytree(snapshot, repository / "snapshots" / other, symlinks=True)
    (repository / "refs" / "v2").write_text(other)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"revision": "v2", "cache_dir": tmp_path / "cache", "local_files_only": True}
    if told_by == "our loader":
        model: Any = load_pretrained(AutoModelForCausalLM, "user/base", **settings).model
        assert described(model, "last_block")["revision"] == other
    else:
        base = AutoModelForCausalLM.from_pretrained("user/base", **settings)
        model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]), revision="v2")
    assert cached_commit("user/base", revision_of(model, core_of(model))) == other
    assert cached_commit("user/base", "v3") == "v3"  # not in the cache
