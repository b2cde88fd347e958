from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.models.language.kept_positions import LogitsToKeep
from tests.members.reference import mixture, separate_logits
from tests.members.subjects import CAUSAL
from tests.models import written
from tests.models.prepared import prepared
from tests.tiny_models import batch, tiny_llama

OTHERS: list[LogitsToKeep] = [-2, slice(1, -1), torch.tensor([-1, -7]), torch.arange(7) == 5]


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        *itertools.product(CAUSAL, [1, 3, torch.tensor([0, 4])]),
        *itertools.product(["llama-lora", "gpt2-last-block"], OTHERS),
    ],
    ids=str,
)
def test_logits_to_keep_are_those_of_the_whole(name: str, keep: LogitsToKeep) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole, kept = bayesian(**batch()), bayesian(**batch(), logits_to_keep=keep)
    positions = slice(-keep, None) if isinstance(keep, int) else keep
    torch.testing.assert_close(kept.logits, whole.logits[:, positions], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept.epistemic, whole.epistemic[:, positions], rtol=1e-10, atol=1e-12)


def test_a_forward_in_passes_returns_a_cache_only_on_request() -> None:
    model, _, theta, subspace = prepared("llama-lora-last-block")
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian.members_per_pass = 1
        assert bayesian(**batch()).past_key_values is None
        cache = bayesian(**batch(), use_cache=True).past_key_values
    assert [layer.keys.shape[0] for layer in cache.layers] == [3, 3, 9]


def test_without_return_dict_the_output_is_a_tuple() -> None:
    model, _, theta, subspace = prepared("llama-lora-last-block")
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        inputs = {**batch(), "use_cache": False}
        found, output = (bayesian(**inputs, return_dict=value) for value in (False, True))
    assert isinstance(found, tuple)
    assert [torch.equal(value, expected) for value, expected in zip(found, output.to_tuple(), strict=True)] == [
        True
    ] * 4


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_layers_are_refused(name: str) -> None:
    with attach(tiny_llama(), subspace="last_layer") as bayesian, pytest.raises(ValueError, match=f"^{name}: hidden"):
        bayesian(**batch(), **{name: True})


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}], ids=str)
def test_generate_takes_token_types_as_separate_models_do(options: dict[str, Any]) -> None:
    model, layout, theta = written.prepared("gpt2-last-block")
    prompt = batch(padding="left")
    types = torch.arange(1, 8).expand(3, -1)  # the embeddings of these tokens
    with written.attached("gpt2-last-block", model, theta) as bayesian:
        output = written.generate(bayesian, prompt | {"token_type_ids": types}, **options)
    sequences = output.sequences
    new = sequences.shape[1] - 7
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, new), value=1)
    text = {"input_ids": sequences, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "token_type_ids": torch.nn.functional.pad(types, (0, new), value=7)}  # fmt: skip
    mixed = mixture(separate_logits(model, layout, theta, text))[:, 6:-1]
    expected = mixed.gather(-1, sequences[:, 7:, None])[..., 0]
    # float32 probabilities of the mixture
    torch.testing.assert_close(output.logprobs.double(), expected.double(), rtol=1e-5, atol=1e-5)
    if "num_beams" not in options:
        assert torch.equal(sequences[:, 7:], mixed.argmax(-1))
