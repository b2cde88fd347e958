from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.core.layout import select
from hf_bayes.posteriors.file_formats import ADAPTER_CONFIG
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from tests.faults import posteriors
from tests.faults.edits import edit_json
from tests.faults.posteriors import config, draws, equal
from tests.posteriors.lora_posteriors import lora_models
from tests.tiny_models import tiny_tokenizer


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    posterior = draws(2, adapter=True)
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        posterior.export_member(number, folder)
    return folders


@pytest.mark.parametrize("kind", lora_models())
def test_adapters_become_an_ensemble_with_the_model_s_own_names(kind: str, tmp_path: Path) -> None:
    peft_models = [lora_models()[kind](seed) for seed in range(3)]
    for number, model in enumerate(peft_models):
        model.save_pretrained(tmp_path / str(number))
    ensemble = Posterior.from_adapters([tmp_path / str(number) for number in range(3)])
    expected = select(peft_models[0])
    assert ensemble.layout.named_shapes == expected.named_shapes
    for row, model in zip(ensemble.approximation.theta, peft_models, strict=True):
        parameters = dict(model.named_parameters())
        assert all(torch.equal(value, parameters[name]) for name, value in ensemble.layout.unflatten(row).items())
    ensemble.save_pretrained(tmp_path / "posterior")
    assert equal(Posterior.from_pretrained(tmp_path / "posterior"), ensemble)
    assert ensemble.config.method["name"] == "ensemble"
    assert ensemble.config.member_chains == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model_name_or_path": "other/base"}, "different base models: base_model_name_or_path is 'someone/base'"),
        ({"revision": "abc"}, "different base models: revision is None in .*one, 'abc' in .*two"),
        ({"r": 4}, "different adapters: r is 2 in .*one, 4 in .*two"),
        ({"lora_alpha": 8}, "different adapters: lora_alpha is 4"),
        ({"target_modules": ["k_proj"]}, "different adapters: target_modules"),
        ({"use_rslora": True}, "different adapters: use_rslora"),
        ({"use_dora": True}, "DoRA adapter"),
        ({"peft_type": "IA3"}, "IA3 adapter"),
        ({"trainable_token_indices": [3, 5]}, r"trainable_token_indices=\[3, 5\] beside its LoRA on layers"),
        ({"target_parameters": ["experts.weight"]}, "target_parameters=.* factors of layers and modules_to_save only"),
    ],
)
def test_adapters_that_differ_are_no_ensemble(adapters: list[Path], change: dict[str, Any], message: str) -> None:
    edit_json(adapters[1] / ADAPTER_CONFIG, lambda values: values.update(change))
    with pytest.raises(ValueError, match=message):
        Posterior.from_adapters(adapters)


def test_one_path_is_no_list_of_adapters(adapters: list[Path]) -> None:
    for path in (adapters[0], str(adapters[0])):  # the letters of a text would be taken for ids of the Hub
        with pytest.raises(ValueError, match=r"from_adapters takes a list of adapters, got one path: \['"):
            Posterior.from_adapters(path)  # type: ignore[arg-type]


def test_adapters_may_differ_in_fields_outside_the_forward_pass(adapters: list[Path]) -> None:
    change = {"lora_dropout": 0.1, "init_lora_weights": False, "target_modules": ["q_proj"], "use_dora": False}
    edit_json(adapters[1] / ADAPTER_CONFIG, lambda values: values.update(change))
    assert Posterior.from_adapters(adapters).config.num_members == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("base_model.model.score.weight"), "lacks the tensors"),
        (lambda t: t.update(extra=torch.zeros(1)), "adds"),
        (
            lambda t: t.update({k: v.half() for k, v in t.items()}),
            "dtype torch.float32 in .*one, torch.float16 in .*two",
        ),
        (
            lambda t: t.update({"base_model.model.score.weight": torch.zeros(4, 6)}),
            r"score.*: shape \[3, 6\] in .*one, \[4, 6\] in .*two",
        ),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
def test_adapters_with_other_tensors_are_no_ensemble(
    adapters: list[Path], change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    from tests.faults.edits import edit_tensors

    edit_tensors(adapters[1] / "adapter_model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        Posterior.from_adapters(adapters)


def test_members_with_different_bases_form_no_ensemble(tmp_path: Path) -> None:
    base = config().base_model
    for name, weights in (("one", "1111"), ("two", "2222")):
        fingerprint = {**base["fingerprint"], "weights": weights}
        draws(1, adapter=True, seed=int(weights), base_model={**base, "fingerprint": fingerprint}).save_pretrained(
            tmp_path / name
        )
    with pytest.raises(ValueError, match=r"different base models: .*1111.*2222"):
        Posterior.from_adapters([tmp_path / "one", tmp_path / "two" / "members" / "member_000"])
    assert Posterior.from_adapters([tmp_path / "one"]).config.base_model["fingerprint"]["weights"] == "1111"


def test_the_same_adapter_twice_is_no_ensemble(adapters: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"members 0 and 2 \(chains 0 and 2\) are equal"):
        Posterior.from_adapters([*adapters, adapters[0]])


@pytest.mark.parametrize("key", [*posteriors.ADAPTER_CONFIG, "rank_pattern"])
def test_adapter_configs_of_any_type_never_crash(adapters: list[Path], key: str) -> None:
    for value in (None, True, -1, 0.5, "x", [], [[]], [1], {}, {"x": [{}]}):
        for folder in adapters:
            edit_json(folder / ADAPTER_CONFIG, lambda values, value=value: values.update({key: value}))
        with contextlib.suppress(ValueError):
            Posterior.from_adapters(adapters)


def test_no_adapter_is_no_ensemble(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 0 directories"):
        Posterior.from_adapters([])
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors: .*Pickled adapters .* are not read"):
        Posterior.from_adapters([tmp_path])


def test_half_precision_adapters_are_read_in_float32(adapters: list[Path]) -> None:
    from tests.faults.edits import edit_tensors

    for folder in adapters:
        edit_tensors(folder / "adapter_model.safetensors", lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    assert Posterior.from_adapters(adapters).approximation.theta.dtype == torch.float32


def test_a_tokenizer_that_all_adapters_have_is_kept(adapters: list[Path]) -> None:
    for adapter in adapters:
        tiny_tokenizer().save_pretrained(adapter)
    assert Posterior.from_adapters(adapters).sidecars == Sidecars.of(tiny_tokenizer())
    tiny_tokenizer(padding_side="left").save_pretrained(adapters[0])
    assert not Posterior.from_adapters(adapters).sidecars
    assert Posterior.from_adapters(adapters[:1]).sidecars


def test_a_start_that_changes_the_base_does_not_mix(adapters: list[Path]) -> None:
    edit_json(adapters[1] / ADAPTER_CONFIG, lambda values: values.update(init_lora_weights="pissa"))
    with pytest.raises(ValueError, match=r"init_lora_weights is True in .*one, 'pissa' in .*two\. .* expected in all"):
        Posterior.from_adapters(adapters)


def test_bases_are_compared_with_the_first_known_one(adapters: list[Path], tmp_path: Path) -> None:
    base = config().base_model
    for name, weights in (("b", "1111"), ("c", "2222")):
        known = {**base, "fingerprint": {**base["fingerprint"], "weights": weights}}
        draws(1, adapter=True, seed=int(weights), base_model=known).save_pretrained(tmp_path / name)
    found = Posterior.from_adapters([adapters[0], tmp_path / "b"])
    assert found.config.base_model["fingerprint"]["weights"] == "1111"
    with pytest.raises(ValueError, match=r"different base models: .*1111.*2222"):
        Posterior.from_adapters([adapters[0], tmp_path / "b", tmp_path / "c"])


def test_biases_that_peft_stores_twice_are_read_once(adapters: list[Path]) -> None:
    from tests.faults.edits import edit_tensors

    expected = Posterior.from_adapters(adapters).layout
    copies = {
        f"base_model.model.score.{kind}.weight": torch.zeros(3, 6) for kind in ("modules_to_save", "original_module")
    }
    for folder in adapters:
        edit_tensors(folder / "adapter_model.safetensors", lambda tensors: tensors.update(copies))
    assert Posterior.from_adapters(adapters).layout == expected
