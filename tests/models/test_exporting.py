from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from hf_bayes.core.layout import select
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.exporting import export_adapter, export_model, network_of_draw, network_of_mean
from hf_bayes.models.image_classification import BayesianModelForImageClassification
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.posteriors.storage import disk
from tests.members.reference import scattered
from tests.models.test_statistics import digits, trained
from tests.posteriors.exported import posterior_of
from tests.tiny_models import batch


def log_probs_of(posterior: Posterior, network: torch.Tensor, base: Path) -> torch.Tensor:
    model = BayesianModelForCausalLM.from_pretrained(posterior, base_model=str(base))
    with torch.no_grad(), model.showing(network[None]):
        return model(**batch()).logits


@pytest.mark.parametrize(
    "kind", ["lora-of-several-ranks", "lora-and-whole-modules", "lora-of-a-tied-head", "tied-last-layer", "all-weights"]
)
def test_a_merged_member_is_that_member(kind: str, tmp_path: Path) -> None:
    posterior = posterior_of(kind, tmp_path / "base")
    network = network_of_draw(posterior, 1)
    export_model(posterior, network, tmp_path / "out", base_model=str(tmp_path / "base"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = plain(**batch()).logits.log_softmax(-1)
    # float32: a merged weight is rounded once more than a sum of two products
    torch.testing.assert_close(found, log_probs_of(posterior, network, tmp_path / "base"), rtol=0, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"


def test_an_untied_head_stays_its_own_tensor(tmp_path: Path) -> None:
    posterior = posterior_of("lora-and-whole-head-of-gpt2", tmp_path / "base")
    network = network_of_draw(posterior, 0)
    export_model(posterior, network, tmp_path / "out", base_model=str(tmp_path / "base"))
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**batch()).logits.log_softmax(-1)
    torch.testing.assert_close(found, log_probs_of(posterior, network, tmp_path / "base"), rtol=0, atol=1e-4)


def test_a_member_keeps_its_own_batch_statistics(tmp_path: Path) -> None:
    posterior = trained(tmp_path, SGHMCConfig(num_chains=2), max_steps=2).posterior
    network = network_of_draw(posterior, 1)
    export_model(posterior, network, tmp_path / "out")
    pixels, _ = digits(320, 330)
    model = BayesianModelForImageClassification.from_pretrained(posterior)
    with torch.no_grad(), model.showing(network[None]):
        found = AutoModelForImageClassification.from_pretrained(tmp_path / "out")(pixel_values=pixels)
        torch.testing.assert_close(found.logits.log_softmax(-1), model(pixel_values=pixels).logits, rtol=0, atol=1e-5)


def test_an_adapter_is_merged_without_token_embeddings(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=3)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "base")
    core = ResNetForImageClassification.from_pretrained(tmp_path / "base")
    model = get_peft_model(core, LoraConfig(r=2, target_modules="all-linear"))
    theta = scattered(model, select(model), 2)
    with attach(model, theta) as bayesian:
        posterior = to_posterior(
            bayesian, Draws(theta, torch.arange(2)), SGHMCConfig(), subspace="trainable", num_data=10.0,
            data_unit="example", tokenizer=None, seed=3, diagnostics={},
        )  # fmt: skip
    export_model(posterior, network_of_draw(posterior, 1), tmp_path / "out")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), attach(model, theta[1:]) as bayesian:
        found = ResNetForImageClassification.from_pretrained(tmp_path / "out")(pixel_values=pixels)
        torch.testing.assert_close(found.logits.log_softmax(-1), bayesian(pixel_values=pixels).logits)


def test_a_tokenizer_with_code_from_elsewhere_is_refused(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    for source, works in (("somebody/code", False), (str(tmp_path / "base"), True)):
        data = json.dumps({"auto_map": {"AutoTokenizer": [None, f"{source}--own.Own"]}}).encode()
        named = dataclasses.replace(posterior, sidecars=posterior.sidecars | Sidecars({"tokenizer_config.json": data}))
        expected = pytest.raises(ValueError, match=r"tokenizer_config\.json names code of 'somebody/code'")
        with contextlib.nullcontext() if works else expected:
            export_model(named, named.representative, tmp_path / "out", base_model=str(tmp_path / "base"))
        assert (tmp_path / "out").exists() == works


def test_an_adapter_of_the_mean_needs_peft_alone(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base", gaussian=True)
    export_adapter(posterior, network_of_mean(posterior), tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, tmp_path / "out")(**batch()).logits.log_softmax(-1)
    expected = log_probs_of(posterior, posterior.representative, tmp_path / "base")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # float32


def test_networks_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    posterior = posterior_of("last-layer", tmp_path / "base")
    with pytest.raises(ValueError, match="has no member 3, expected 0 to 2"):
        network_of_draw(posterior, 3)
    with pytest.raises(ValueError, match="holds draws: the mean of networks that were trained apart"):
        network_of_mean(posterior)
    with pytest.raises(ValueError, match=r"\(last_layer\) are no adapter: export a model"):
        export_adapter(posterior, posterior.representative, tmp_path / "out")
    gaussian = posterior_of("last-layer", tmp_path / "base", gaussian=True)
    with pytest.raises(ValueError, match="is a Gaussian and stores no draws"):
        network_of_draw(gaussian, 0)
    means = gaussian.representative.expand(2, -1)
    two = dataclasses.replace(gaussian, approximation=Gaussian.diagonal(means, means.abs() + 1))
    with pytest.raises(ValueError, match="is a mixture of several Gaussians"):
        network_of_mean(two)


def test_a_quantised_base_and_a_full_directory_are_refused(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    with pytest.raises(ValueError, match="is not empty"):
        export_model(posterior, posterior.representative, tmp_path / "base")
    config = dataclasses.replace(posterior.config, head={"quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(ValueError, match="is quantised, and an adapter cannot be merged"):
        export_model(dataclasses.replace(posterior, config=config), posterior.representative, tmp_path / "out")


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_full_disk_leaves_no_part_of_a_model(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    write = disk.write

    def full_model(_: PreTrainedModel, folder: Path) -> None:
        write(folder / "model.safetensors", b"a part")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def full_tokenizer(path: Path, data: bytes) -> None:
        if path.name == "tokenizer.json" and path.parent.parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, data)

    if part == "model":
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", full_model)
    else:
        monkeypatch.setattr(disk, "write", full_tokenizer)
    with pytest.raises(OSError, match=f"cannot save to {tmp_path / 'out'}: No space left on device") as caught:
        export_model(posterior, posterior.representative, tmp_path / "out", base_model=str(tmp_path / "base"))
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    monkeypatch.undo()
    export_model(posterior, posterior.representative, tmp_path / "out", base_model=str(tmp_path / "base"))
