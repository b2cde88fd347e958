from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from hf_bayes.members.compat.transformers import CACHE
from tests.members.reference import entropies, separate_logits
from tests.models.written import attached, generate, greedy, looped, prepared
from tests.tiny_models import batch


class OwnCache(DynamicCache):
    """A cache whose rows have an unknown order."""


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": "model"},
        {"prompt_lookup_num_tokens": 2},
        {"custom_generate": "someone/loop"},
        {"penalty_alpha": 0.5, "top_k": 4},
        {"prefill_chunk_size": 2},
        {"inputs_embeds": torch.ones(1, 2, 16)},
        {"guidance_scale": 2.0},
        {"token_healing": True},
        {"use_mtp": True},
        {"assistant_early_exit": 1},
        {"speculation_type": "dflash"},
        {"num_beam_groups": 2, "num_beams": 2},
        {"force_words_ids": [[5]], "num_beams": 2},
        {"constraints": ["a constraint"], "num_beams": 2},
        {"negative_prompt_ids": torch.ones(3, 2, dtype=torch.long)},
        {"custom_generate": lambda model, input_ids, **_: input_ids},
        {"cache_implementation": "paged"},
        {"cache_implementation": "quantized"},
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "offloaded_static"},
        {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())},
        {CACHE: OwnCache()},
        {CACHE: DynamicCache(), "use_cache": False},
        {"generation_config": GenerationConfig(dola_layers="high")},
    ],
    ids=lambda options: ", ".join(options),
)
def test_decoding_that_knows_nothing_of_members_is_refused(options: dict[str, Any]) -> None:
    model, _, theta = prepared("llama-lora")
    options = {key: model if value == "model" else value for key, value in options.items()}
    named = next(iter(options)) if "generation_config" not in options else "dola_layers"
    sentence = rf"generate\({named}=.{{1,60}}\) is not supported for an ensemble: .*\. Supported are greedy search, "
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match=sentence):
        bayesian.generate(**batch(), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"position_ids": torch.arange(7).expand(3, 7) + 5}, "position_ids"),
        ({"attention_mask": torch.ones(3, 9, dtype=torch.long)}, "attention_mask of 9 positions"),
        ({"encoder_hidden_states": torch.zeros(3, 2, 8)}, "encoder_hidden_states"),
    ],
    ids=["positions", "a mask of more than the prompt", "another text"],
)
def test_beams_of_more_than_a_text_and_its_mask_are_refused(options: dict[str, Any], named: str) -> None:
    # beams are scored by reading them once more, and these would be read as other texts
    model, layout, theta = prepared("gpt2-lora")
    inputs = batch() | options
    with attached("gpt2-lora", model, theta) as bayesian:
        with pytest.raises(ValueError, match=rf"generate\(num_beams=2, {named}\) is not .* beams are read once more"):
            generate(bayesian, inputs, num_beams=2)
        if "position_ids" not in options:
            return
        output = generate(bayesian, inputs)  # tokens that are scored while they are drawn are no matter
    first = separate_logits(model, layout, theta, inputs)[:, :, -1]
    torch.testing.assert_close(output.total[:, 0], entropies(first)[0], rtol=1e-11, atol=1e-11)


def test_assisted_decoding_is_refused_with_its_reason() -> None:
    model, _, theta = prepared("llama-lora")
    reason = r"assistant_model=PeftModelForCausalLM\) .* drafted tokens are checked several at a time, and uncertainty"
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match=reason):
        bayesian.generate(**batch(), assistant_model=model)


def test_an_offloaded_cache_is_refused() -> None:
    model, _, theta = prepared("llama-lora")
    cache = DynamicCache()
    cache.offloading = True  # made so, it asks for CUDA
    message = f"{CACHE}=DynamicCache that is offloaded.*not known to keep the rows of members apart"
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match=message):
        bayesian.generate(**batch(), **{CACHE: cache})


def test_continuous_batching_is_refused() -> None:
    model, _, theta = prepared("llama-lora")
    with (
        attached("llama-lora", model, theta) as bayesian,
        pytest.raises(ValueError, match=r"generate\(continuous batching\) is not supported for an ensemble"),
    ):
        bayesian.generate_batch([[3, 4, 5]], max_new_tokens=2)


@pytest.mark.parametrize("options", [{"num_beam_groups": 1}, {"guidance_scale": 1.0}, {"use_mtp": False}], ids=str)
def test_settings_that_ask_for_nothing_are_no_matter(options: dict[str, Any]) -> None:
    model, layout, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch(), **options)
    assert torch.equal(output.sequences, looped(model, layout, theta, batch(), greedy))


def test_refused_decoding_is_found_in_the_models_own_settings() -> None:
    model, _, theta = prepared("llama-lora")
    model.generation_config.prompt_lookup_num_tokens = 2
    with (
        attached("llama-lora", model, theta) as bayesian,
        pytest.raises(ValueError, match="prompt_lookup_num_tokens=2"),
    ):
        bayesian.generate(**batch())
