from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.layout import Layout, select
from hf_bayes.members import Members
from hf_bayes.members import engine as engine_module
from hf_bayes.members.checkpointing import Checkpointing
from hf_bayes.members.context import Context
from hf_bayes.members.last_feed_forward import LastFeedForward
from hf_bayes.members.small_batches import BlockedLinears
from hf_bayes.members.stacked import StackedLora
from hf_bayes.members.trunk import Trunk
from hf_bayes.members.weight_methods import WeightMethods
from hf_bayes.models.attaching import attach
from tests.members.reference import (
    core_of,
    mixture,
    padded_behind,
    prepared,
    relative_error,
    separate_gradients,
    separate_logits,
)
from tests.members.subjects import CAUSAL, SUBJECTS, labelled
from tests.tiny_models import PAD, batch, inputs_of, tiny_llama, with_lora

# A tiny model adds up a few hundred products per number: rounding of float32 (6e-8) and float64 (1e-16), times 100.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def tolerance(name: str, dtype: torch.dtype) -> float:
    return TOLERANCE[torch.float32 if SUBJECTS[name].rounds else dtype]


def folded_logits(model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Any], **options: Any) -> Tensor:
    """Return the logits [M, B, ...] by the engine alone; ``folded`` inputs are [M * B, ...]."""
    folded = options.pop("folded", False)
    engine = Members(model, core_of(model), layout, **options)
    engine.install()
    try:
        with torch.no_grad(), engine.bind(theta):
            return engine.forward(dict(inputs), folded=folded).logits.unflatten(0, (len(theta), -1))
    finally:
        engine.remove()


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_folded_members_equal_separate_models(name: str, dtype: torch.dtype) -> None:
    model, layout, theta = prepared(name, dtype)
    sides = ("left" if dtype == torch.float32 else SUBJECTS[name].padding, "right", None)
    for padding in sides:
        inputs = inputs_of(model, padding=padding)
        expected = separate_logits(model, layout, theta, inputs)
        found = folded_logits(model, layout, theta, inputs)
        kept = inputs["attention_mask"].bool() if found.ndim == 4 else slice(None)  # logits at padding are not compared
        assert relative_error(found[:, kept], expected[:, kept]) < tolerance(name, dtype)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("trunk", [True, False], ids=["trunk", "no trunk"])
def test_folded_gradients_equal_those_of_separate_models(name: str, trunk: bool) -> None:
    model, layout, theta = prepared(name, torch.float64)
    inputs = labelled(name, padding=SUBJECTS[name].padding)
    losses, expected = separate_gradients(model, layout, theta, [inputs] * 3)
    with attach(model, theta, subspace=SUBJECTS[name].subspace, trunk=trunk) as bayesian:
        leaf = theta.clone().requires_grad_()
        loss = bayesian(**inputs, theta=leaf).loss
        loss.sum().backward()
    # see TOLERANCE; gradients pass through twice as many sums
    limit = TOLERANCE[torch.float32] if SUBJECTS[name].rounds else 1e-12
    assert relative_error(loss.detach(), losses) < limit
    assert relative_error(leaf.grad, expected) < limit


@pytest.mark.parametrize("name", ["llama-lora", "llama-head", "gpt2-everything", "bert-lora-and-saved-head"])
def test_gradients_in_float32_equal_those_of_separate_models(name: str) -> None:
    model, layout, theta = prepared(name)
    inputs = labelled(name)
    _, expected = separate_gradients(model, layout, theta, [inputs] * 3)
    with attach(model, theta, subspace=SUBJECTS[name].subspace) as bayesian:
        leaf = theta.clone().requires_grad_()
        bayesian(**inputs, theta=leaf).loss.sum().backward()
    assert relative_error(leaf.grad, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "name",
    ["llama-lora-last-block", "llama-head", "gpt2-last-block", "bert-head", "bert-tagger-last-block", "vit-last-block"],
)
def test_members_with_rows_of_their_own_equal_separate_models(name: str) -> None:
    model, layout, theta = prepared(name, torch.float64)
    batches = [labelled(name, seed=seed, padding=padding) for seed, padding in enumerate(("left", "right", None))]
    losses, expected = separate_gradients(model, layout, theta, batches)
    rows = {key: torch.cat([item[key] for item in batches]) for key in batches[0]}
    with attach(model, theta, subspace=SUBJECTS[name].subspace) as bayesian:
        leaf = theta.clone().requires_grad_()
        result = bayesian(**rows, theta=leaf, folded=True)
        result.loss.sum().backward()
    assert relative_error(result.loss.detach(), losses) < 1e-12
    assert relative_error(leaf.grad, expected) < 1e-12
    assert result.num_terms.tolist() == [_num_terms(name, item["labels"]) for item in batches]


def _num_terms(name: str, labels: Tensor) -> int:
    return int((labels[:, 1:] if name in CAUSAL else labels).ne(-100).sum())


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("members_per_pass", [1, 3])
def test_chunks_of_members_equal_one_pass(name: str, members_per_pass: int) -> None:
    model, layout, theta = prepared(name, torch.float64, num_members=4)
    inputs = padded_behind(core_of(model), inputs_of(model, padding=SUBJECTS[name].padding))
    separate = mixture(separate_logits(model, layout, theta, inputs))
    with torch.no_grad(), attach(model, theta, subspace=SUBJECTS[name].subspace) as bayesian:
        expected = bayesian(**inputs)
        bayesian.members_per_pass = members_per_pass
        found = bayesian(**inputs)
    kept = inputs["attention_mask"].bool() if separate.ndim == 3 else slice(None)
    assert relative_error(expected.logits[kept], separate[kept]) < tolerance(name, torch.float64)
    assert relative_error(found.logits, expected.logits) < tolerance(name, torch.float64)
    assert relative_error(found.epistemic, expected.epistemic) < (1e-5 if SUBJECTS[name].rounds else 1e-10)


@pytest.mark.parametrize("name", ["llama-lora", "llama-everything", "gpt2-everything", "gemma-everything"])
def test_low_precision_loses_no_more_by_folding(name: str) -> None:
    model, layout, theta = prepared(name, torch.bfloat16)
    for path, parameter in model.named_parameters():
        if "lora_" in path:  # peft keeps adapters in float32
            parameter.data = parameter.data.float()
    inputs = batch(padding="left")
    kept = inputs["attention_mask"].bool()
    found = folded_logits(model, layout, theta, inputs)[:, kept]
    separate = separate_logits(model, layout, theta, inputs)[:, kept]
    exact = separate_logits(model.double(), layout, theta.double(), inputs)[:, kept]

    def error(logits: Tensor) -> float:
        return float((logits.double() - exact).square().mean().sqrt())

    assert error(separate) > 0.01  # bfloat16 rounds here
    # both round equally often in different places: their errors have one distribution; 18,000 logits fix its scale
    assert error(found) < 1.25 * error(separate)


@pytest.mark.parametrize("name", ["llama-lora", "llama-last-block", "gpt2-everything", "bert-everything"])
def test_autocast_loses_no_more_by_folding(name: str) -> None:
    model, layout, theta = prepared(name)
    inputs = batch()
    exact = separate_logits(model, layout, theta, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, separate = folded_logits(model, layout, theta, inputs), separate_logits(model, layout, theta, inputs)
    errors = [(logits.float() - exact).square().mean().sqrt() for logits in (found, separate)]
    assert errors[1] > 0.001 * exact.abs().max()
    assert (
        errors[0] < (1.25 if found.ndim == 4 else 3) * errors[1]
    )  # 27 logits of a classifier do not determine the scale well


def test_embedding_of_padding_keeps_its_gradient() -> None:
    model, layout, theta = prepared("bert-everything", torch.float64)
    inputs = labelled("bert-everything", padding=None)
    inputs["input_ids"][:, 0] = PAD  # BERT reads the first token
    with attach(model, theta, subspace=".") as bayesian:
        leaf = theta.clone().requires_grad_()
        bayesian(**inputs, theta=leaf).loss.sum().backward()
    table = layout.unflatten(leaf.grad)["bert.embeddings.word_embeddings.weight"]
    assert (table[:, PAD].abs().amax(-1) > 0).all()


# -- broken twins: the tests above must catch them ------------------------------------------------------------------


def test_row_major_fold_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def row_major(inputs: dict[str, Any], num_rows: int, num_members: int) -> dict[str, Any]:
        return {key: value.repeat_interleave(num_members, 0) for key, value in inputs.items()}

    model, layout, theta = prepared("llama-lora")
    expected = separate_logits(model, layout, theta, batch())
    monkeypatch.setattr(engine_module, "repeat_rows", row_major)
    assert relative_error(folded_logits(model, layout, theta, batch()), expected) > 0.1


def test_trunk_for_rows_that_differ_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Members.run

    def always_cut(self: Members, module: nn.Module, *args: Any, trunk: bool = False) -> Any:
        return run(self, module, *args, trunk=True)

    model, layout, theta = prepared("llama-lora-last-block")
    batches = [batch(seed=seed) for seed in range(3)]
    expected = torch.cat([separate_logits(model, layout, theta[m : m + 1], batches[m]) for m in range(3)])
    rows = {key: torch.cat([item[key] for item in batches]) for key in batches[0]}
    assert relative_error(folded_logits(model, layout, theta, rows, folded=True), expected) < 1e-5
    monkeypatch.setattr(Members, "run", always_cut)
    assert relative_error(folded_logits(model, layout, theta, rows, folded=True), expected) > 0.1


def test_rows_wrongly_taken_for_copies_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout, theta = prepared("llama-lora")
    expected = separate_logits(model, layout, theta, batch())
    monkeypatch.setattr(Context, "single", lambda self, x: x[: self.num_rows])
    assert relative_error(folded_logits(model, layout, theta, batch()), expected) > 0.1


def test_member_views_are_built_once_and_show_current_values(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    own = Layout.unflatten

    def counted(self: Layout, theta: Tensor) -> dict[str, Tensor]:
        made.append(len(theta))
        return own(self, theta)

    with attach(with_lora(tiny_llama())) as bayesian, torch.no_grad():
        bayesian.theta.data = bayesian.theta.detach().repeat(3, 1)
        monkeypatch.setattr(Layout, "unflatten", counted)
        before = bayesian.eval()(**batch()).logits
        for _ in range(3):  # as in decoding, token by token
            bayesian(**batch())
        assert made == [3]
        bayesian.theta.add_(0.1)
        assert not torch.equal(bayesian(**batch()).logits, before)
        assert made == [3]
        bayesian.theta.data = bayesian.theta.detach()[:2].clone()
        assert bayesian(**batch()).logits.shape == before.shape
        assert made == [3, 2]


def test_a_copy_lays_its_members_out_anew() -> None:
    with attach(with_lora(tiny_llama())) as bayesian, torch.no_grad():
        fresh = len(pickle.dumps(bayesian))
        bayesian.eval()(**batch())
        # a copied view would hold the whole theta, and the cache is identified by the address of the original theta
        assert len(pickle.dumps(bayesian)) == pytest.approx(fresh, rel=0.01)
        copied = copy.deepcopy(bayesian)
        copied.theta.data = torch.zeros_like(copied.theta)
        assert not torch.equal(copied(**batch()).logits, bayesian(**batch()).logits)
        assert copied.members._viewed[0] is copied.theta


def hooks_of(model: nn.Module) -> list[tuple[bool, int, int]]:
    """Return whether each module has a forward of its own, and its numbers of hooks."""
    return [
        ("forward" in vars(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]


@pytest.mark.parametrize("kind", [Checkpointing, StackedLora, Trunk, LastFeedForward, BlockedLinears, WeightMethods])
def test_an_error_while_members_are_installed_leaves_no_trace(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: Any) -> None:
        install(part)
        raise RuntimeError("broken")

    install = kind.install
    monkeypatch.setattr(kind, "install", fail)
    model = with_lora(tiny_llama(num_hidden_layers=3, intermediate_size=32))
    model.save_pretrained = own = model.push_to_hub
    engine, before = Members(model, core_of(model), select(model)), hooks_of(model)
    with pytest.raises(RuntimeError, match="broken"):
        engine.install()
    assert hooks_of(model) == before
    assert vars(model)["save_pretrained"] is own
    with pytest.raises(ValueError, match="this BayesianModel was detached"):
        engine.require_attached()
