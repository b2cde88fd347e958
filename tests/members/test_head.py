from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MarianConfig, MarianForCausalLM, OPTConfig, OPTForCausalLM

from hf_bayes.core.layout import select
from hf_bayes.members import head as head_module
from hf_bayes.models.attaching import attach
from tests.members.reference import mixture, relative_error, scattered, separate_gradients, separate_logits
from tests.members.subject_models import gemma2
from tests.members.subjects import SUBJECTS, labelled
from tests.tiny_models import PAD, VOCABULARY, _build, batch, tiny_gpt2, tiny_llama, with_lora


class Allocations(TorchDispatchMode):
    """A mode that records the largest tensor that any operation returns, and if one has a given size."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result


MEMBERS, ROWS, LENGTH, VOCAB = 4, 2, 64, 2048


@pytest.mark.parametrize("subspace", ["trainable", "last_layer"])
@pytest.mark.parametrize("work", ["log_lik", "gradient", "forward", "score", "evaluate"])
def test_no_tensor_of_all_members_positions_and_words_exists(
    work: str, subspace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(head_module.CHUNK_BYTES, "cpu", 4 * MEMBERS * VOCAB * 8)  # 8 positions at a time
    model = tiny_llama(vocab_size=VOCAB)
    model = with_lora(model) if subspace == "trainable" else model
    inputs = {"input_ids": torch.randint(3, VOCAB, (ROWS, LENGTH))}
    with attach(model, num_members=MEMBERS, subspace=subspace) as bayesian, Allocations() as seen:
        theta = bayesian.theta.detach().requires_grad_(work == "gradient")
        with torch.set_grad_enabled(work == "gradient"):
            if work == "score":
                bayesian.score(**inputs)
            elif work == "forward":
                bayesian(**inputs)
            elif work == "evaluate":
                bayesian.evaluate_batch({**inputs, "labels": inputs["input_ids"]})
            else:
                loss = bayesian(**inputs, labels=inputs["input_ids"], theta=theta).loss
            if work == "gradient":
                loss.sum().backward()
    whole = MEMBERS * ROWS * LENGTH * VOCAB
    weights = MEMBERS * model.get_output_embeddings().weight.numel() * 2  # theta and its gradient in one piece
    answer = ROWS * LENGTH * VOCAB if work == "forward" else 0  # the result: the logits of the mixture
    assert seen.largest <= max(MEMBERS * VOCAB * 8 * 2, weights, answer)
    assert seen.largest < whole / 3


def test_holding_all_logits_would_be_noticed() -> None:
    model = tiny_llama(vocab_size=VOCAB)
    inputs = {"input_ids": torch.randint(3, VOCAB, (ROWS, LENGTH))}
    layout = select(model, "last_layer")
    bayesian = attach(model, num_members=MEMBERS, subspace="last_layer")
    with Allocations() as seen, torch.no_grad(), bayesian.members.bind(bayesian.theta):
        bayesian.members.forward(inputs)
    assert layout.dim * MEMBERS < seen.largest
    assert seen.largest >= MEMBERS * ROWS * LENGTH * VOCAB


@pytest.mark.parametrize("name", ["llama-lora", "llama-lora-on-head", "llama-tied-head", "llama-head", "phi-head"])
@pytest.mark.parametrize("positions", [1, 5, 1000])
def test_size_of_chunks_changes_no_gradient(name: str, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    model = subject.make(torch.float64)
    layout = select(model, subject.subspace)
    theta, inputs = scattered(model, layout), labelled(name)
    losses, expected = separate_gradients(model, layout, theta, [inputs] * 3)
    monkeypatch.setitem(head_module.CHUNK_BYTES, "cpu", 4 * 3 * VOCABULARY * positions)
    leaf, factors = theta.clone().requires_grad_(), torch.tensor([1.0, 2.0, 4.0])
    with attach(model, theta, subspace=subject.subspace) as bayesian:
        loss = bayesian(**inputs, theta=leaf).loss
        # members stay separate: each row has its own factor (powers of 2, which are exact in Llama's float32 norms)
        (loss * factors).sum().backward()
        with torch.no_grad():
            assert relative_error(bayesian(**inputs, theta=theta).loss, losses) < 1e-12
    assert relative_error(loss.detach(), losses) < 1e-12
    assert relative_error(leaf.grad, expected * factors[:, None]) < 1e-12


@pytest.mark.parametrize("name", ["llama-lora", "llama-head", "bert-lora"])
def test_a_batch_without_terms_has_loss_zero_and_gradient_zero(name: str) -> None:
    subject = SUBJECTS[name]
    inputs = labelled(name)
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    with attach(subject.make(torch.float32), subspace=subject.subspace, num_members=2) as bayesian:
        leaf = bayesian.theta.detach().requires_grad_()
        result = bayesian(**inputs, theta=leaf)
        result.loss.sum().backward()
        with torch.no_grad():
            assert bayesian(**inputs, theta=leaf).loss.tolist() == [0, 0]
        statistics, _ = bayesian.evaluate_batch(inputs)
    assert result.loss.tolist() == [0, 0]
    assert result.num_terms.tolist() == [0, 0]
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    assert {len(values) for values in statistics.values()} == {0}


@pytest.mark.parametrize(
    ("config", "model"), [(OPTConfig, OPTForCausalLM), (MarianConfig, MarianForCausalLM)], ids=["opt", "marian"]
)
def test_decoder_heads_past_the_backbone_equal_separate_models(config: type, model: type) -> None:
    fields = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "dropout": 0.0}
    fields |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
    fields |= {"word_embed_proj_dim": 16} if config is OPTConfig else {}
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": PAD}
    core = _build(lambda: model(config(**sizes, **fields)), 0, torch.float64)
    layout = select(core, r"layers\.1\.fc1")
    theta, inputs = scattered(core, layout), labelled("llama-head")
    expected = separate_logits(core, layout, theta, batch())
    _, gradients = separate_gradients(core, layout, theta, [inputs] * 3)
    leaf = theta.clone().requires_grad_()
    with attach(core, theta, subspace=r"layers\.1\.fc1") as bayesian:
        with torch.no_grad():
            found = bayesian(**batch()).logits
        bayesian(**inputs, theta=leaf).loss.sum().backward()
    assert relative_error(found, mixture(expected)) < 1e-12
    assert relative_error(leaf.grad, gradients) < 1e-12


def test_soft_capping_after_the_head_is_the_models_own() -> None:
    model = gemma2(torch.float64)
    layout = select(model, "last_block")
    theta, inputs = scattered(model, layout), labelled("gemma", padding=None)
    _, expected = separate_gradients(model, layout, theta, [inputs] * 3)
    logits = separate_logits(model, layout, theta, batch())
    assert logits.abs().max() < 2
    leaf = theta.clone().requires_grad_()
    with attach(model, theta, subspace="last_block") as bayesian:
        bayesian(**inputs, theta=leaf).loss.sum().backward()
        found = bayesian(**batch()).logits
    assert relative_error(leaf.grad, expected) < 1e-12
    assert relative_error(found, mixture(logits)) < 1e-12


def test_the_backbone_answers_again_after_an_error_in_the_head() -> None:
    model = tiny_gpt2()
    before = vars(model.transformer).copy()

    def broken(*_: Any) -> None:
        raise RuntimeError("broken head")

    with attach(model, subspace="last_block") as bayesian:
        handle = model.lm_head.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken head"):
            bayesian(**batch())
        handle.remove()
        bayesian(**batch())
    assert vars(model.transformer).keys() == before.keys()


def test_a_backbone_without_head_is_refused_and_left_alone() -> None:
    class Headless(type(tiny_llama())):
        def get_output_embeddings(self) -> nn.Module | None:
            return None

    model = Headless(tiny_llama().config)
    with pytest.raises(ValueError, match="Headless is not a causal language model with a head of its own"):
        attach(model, subspace="last_block")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
