"""Posteriors that must not be read: damaged files, and another base model or prior."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from tests import runs
from tests.bad_input.making import run
from tests.faults.edits import edit_tensors, sign
from tests.tiny_models import tiny_bert, tiny_llama, tiny_tokenizer, with_lora


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("posterior")
    run(out, SGHMCConfig(num_chains=2, draws_per_chain=2), processing_class=tiny_tokenizer()).save_model()
    return out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def rewrite_config(directory: Path, **changes: Any) -> None:
    path = directory / "posterior_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(directory: Path, **changes: Any) -> Any:
    return BayesianModelForCausalLM.from_pretrained(directory, **{"base_model": tiny_llama(), **changes})


def respoil(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    edit_tensors(directory / MEMBER, change)
    sign(directory)


MEMBER = "members/member_001/adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
UNREADABLE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated": (lambda d: (d / MEMBER).write_bytes((d / MEMBER).read_bytes()[:-9]), (MEMBER,)),
    "bit flip": (lambda d: flip(d / MEMBER), (MEMBER, "sha256")),
    "missing member": (lambda d: shutil.rmtree(d / "members/member_002"), ("member_002",)),
    "edited config": (lambda d: rewrite_config(d, num_members=3), ("posterior_config.json",)),
    # whole and signed, but no member of this ensemble
    "wrong shape": (
        lambda d: respoil(d, lambda tensors: tensors.update({FIRST: tensors[FIRST][:1]})),
        (MEMBER, "q_proj.lora_A", "expected shape [2, 16], got [1, 16]"),
    ),
    "missing key": (lambda d: respoil(d, lambda tensors: tensors.pop(FIRST)), (MEMBER, FIRST)),
    "extra key": (lambda d: respoil(d, lambda tensors: tensors.update(extra=torch.ones(2))), (MEMBER, "extra")),
    "other dtype": (
        lambda d: respoil(d, lambda tensors: tensors.update({FIRST: tensors[FIRST].double()})),
        (MEMBER, FIRST, "float64", "float32"),
    ),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), ("manifest.json",)),
}


@pytest.mark.parametrize("fault", UNREADABLE, ids=str)
def test_a_damaged_posterior_is_refused_by_name(saved, tmp_path, fault):
    directory = Path(shutil.copytree(saved, tmp_path / "copy"))
    spoil, words = UNREADABLE[fault]
    spoil(directory)
    with pytest.raises((ValueError, OSError)) as caught:
        load(directory)
    assert all(word in str(caught.value) for word in words), str(caught.value)


OTHER_BASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "other seed": (lambda: tiny_llama(seed=1), ("another base model", "weights")),
    "other depth": (lambda: tiny_llama(num_hidden_layers=3), ("another base model", "configuration")),
    "fewer layers": (lambda: tiny_llama(num_hidden_layers=1), ("layers.1",)),
    "other vocabulary": (lambda: tiny_llama(vocab_size=400), ("another base model",)),
    "other dtype": (lambda: tiny_llama(dtype=torch.bfloat16), ("dtype bfloat16", "float32")),
}


@pytest.mark.reliability("F7")
@pytest.mark.parametrize("other", OTHER_BASES, ids=str)
def test_another_base_model_is_refused_before_any_forward(saved, other):
    build, words = OTHER_BASES[other]
    with pytest.raises(ValueError) as caught:
        load(saved, base_model=build())
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.reliability("F7")
def test_resized_embeddings_are_refused(saved):
    model = tiny_llama()
    model.resize_token_embeddings(336, mean_resizing=False)
    with pytest.raises(ValueError, match="another base model"):
        load(saved, base_model=model)


OTHER_PRIORS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "other base": (lambda: with_lora(tiny_llama(seed=1)), ("another base model", "weights fingerprint", "expected")),
    "other shapes": (lambda: with_lora(tiny_llama(), r=3), ("lora_A", "shape [3, 16] here and shape [2, 16] there")),
}


@pytest.mark.parametrize("other", OTHER_PRIORS, ids=str)
def test_a_prior_of_another_model_is_refused(saved, tmp_path, other):
    build, words = OTHER_PRIORS[other]
    with pytest.raises(ValueError) as caught:
        runs.trainer(tmp_path, MAPConfig(), model=build(), prior=saved)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_members_than_stored_are_refused(saved):
    with pytest.raises(ValueError, match="asked for 50 members, 4 are stored"):
        load(saved, members=50)
    with pytest.raises(ValueError, match="asked for 0 members"):
        load(saved, members=0)


def test_the_class_of_another_task_is_refused(saved):
    with pytest.raises(ValueError, match="is a posterior for causal_lm"):
        BayesianModelForSequenceClassification.from_pretrained(saved, base_model=tiny_bert())


def test_what_was_saved_is_what_is_loaded(saved):
    """The same directory, untouched, is none of the above."""
    assert load(saved).num_members == 4
    assert load(saved, members=2).num_members == 2
