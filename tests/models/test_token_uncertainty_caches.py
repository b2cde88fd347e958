"""Caches of keys and values: which they hold, and what a caller may do with his own."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_bayes.members.compat.transformers import CACHE
from tests.members.reference import mixture
from tests.models.written import FIELDS, attached, generate, greedy, looped, member_logits, prepared, require_scores
from tests.tiny_models import batch


def test_static_caches_do_not_compile_the_forward() -> None:
    # generate does so on GPUs, or by an option
    compiling = CompileConfig()
    compiling._compile_all_devices = True
    model, layout, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch(), cache_implementation="static", compile_config=compiling)
    assert torch.equal(output.sequences, looped(model, layout, theta, batch(), greedy))


@pytest.mark.parametrize("members_per_pass", [None, 1])
@pytest.mark.parametrize(
    ("name", "trunk"), [("llama-lora-last-block", 2), ("llama-head", 3), ("llama-lora", 0), ("mistral-last-block", 2)]
)
def test_cache_holds_the_trunk_once(name: str, trunk: int, members_per_pass: int | None) -> None:
    model, _, theta = prepared(name)
    with attached(name, model, theta) as bayesian:
        bayesian.members_per_pass = members_per_pass
        cache = generate(bayesian, batch(2)).past_key_values
    assert [layer.keys.shape[0] for layer in cache.layers] == [2] * trunk + [6] * (3 - trunk)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_a_cache_of_the_callers_own_is_used_and_grown(argument: str) -> None:
    model, layout, theta = prepared("llama-lora-last-block")
    inputs = batch()
    cache = DynamicCache(config=model.get_base_model().config)
    with torch.no_grad(), attached("llama-lora-last-block", model, theta) as bayesian:
        prefix = bayesian(inputs["input_ids"][:, :4], **{argument: cache}, use_cache=True)
        rest = bayesian(inputs["input_ids"][:, 4:], **{argument: prefix[CACHE]}, use_cache=True)
    assert rest[CACHE] is cache
    assert cache.get_seq_length() == 7
    expected = mixture(
        member_logits(model, layout, theta, **{"ids": inputs["input_ids"], "mask": inputs["attention_mask"]})
    )
    torch.testing.assert_close(rest.logits, expected[:, 4:], rtol=1e-5, atol=1e-5)  # float32 inside Llama


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-lora", "mistral-last-block"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("change", ["beams", "rows", "members"])
def test_a_cache_of_other_rows_is_refused(name: str, kind: str, change: str) -> None:
    model, _, theta = prepared(name)
    inputs = {key: value[:1] for key, value in batch().items()}
    longer = {key: torch.cat([value, value], 1) for key, value in inputs.items()}
    with attached(name, model, theta) as bayesian:
        config = bayesian.config
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
        generate(bayesian, inputs, past_key_values=cache)
        if change == "members":
            bayesian.show(theta[:2])
        if change == "rows":
            longer = {key: value.repeat(3, 1) for key, value in longer.items()}
        num_beams = 2 if change == "beams" else 1
        with pytest.raises(ValueError, match=r"layer \d of the cache has [13] rows, expected [2-9]"):
            generate(bayesian, longer, past_key_values=cache, num_beams=num_beams)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_generate_goes_on_with_a_cache_of_the_callers_own(argument: str) -> None:
    model, _, theta = prepared("llama-lora-last-block")
    with attached("llama-lora-last-block", model, theta) as bayesian:
        begun = generate(bayesian, batch(), max_new_tokens=2)
        held = begun[CACHE].get_seq_length()
        ids = begun.sequences
        rest = generate(
            bayesian, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **{argument: begun[CACHE]},
            max_new_tokens=3,
        )  # fmt: skip
        whole = generate(bayesian, batch())
    assert rest[CACHE] is begun[CACHE]
    assert rest[CACHE].get_seq_length() == held + 3
    assert torch.equal(rest.sequences, whole.sequences)
    torch.testing.assert_close(rest.epistemic, whole.epistemic[:, 2:], rtol=0, atol=0)


@pytest.mark.skipif(CACHE != "cache", reason="Mamba needs transformers 5.24")
def test_generate_does_not_go_on_with_states_alone() -> None:
    model, _, theta = prepared("mamba-lora")
    with attached("mamba-lora", model, theta) as bayesian:
        begun = generate(bayesian, batch(), max_new_tokens=2)
        with pytest.raises(ValueError, match=r"of states without keys.*does not say how many tokens it has read"):
            generate(bayesian, {"input_ids": begun.sequences}, cache=begun[CACHE])


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-lora", "llama-head"])
def test_a_cache_whose_rows_are_repeated_serves_beams(name: str) -> None:
    model, _, theta = prepared(name)
    inputs = batch(padding="left")
    with attached(name, model, theta) as bayesian:
        prefix = generate(bayesian, {key: value[:, :4] for key, value in inputs.items()}, max_new_tokens=1)
        prefix = prefix.past_key_values
        prefix.batch_repeat_interleave(2)
        output = generate(bayesian, inputs, past_key_values=prefix, num_beams=2)
        expected = generate(bayesian, inputs, num_beams=2)
    assert torch.equal(output.sequences, expected.sequences)
    require_scores(output, {field: expected[field] for field in FIELDS}, 0.0)
