from __future__ import annotations

import copy
import math
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Model, T5Config, T5ForConditionalGeneration, T5ForSequenceClassification

from hf_bayes.core.layout import initial, select
from hf_bayes.distributed import member_sums as spread
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.refusals import COMPILE_LAYERS
from hf_bayes.uncertainty.decomposition import Prediction, predict
from hf_bayes.uncertainty.likelihoods import Normal
from tests import runs
from tests.members.reference import (
    core_of,
    entropies,
    mixture,
    relative_error,
    scattered,
    separate_gradients,
    separate_logits,
)
from tests.members.subjects import CAUSAL, CLASSIFIERS, SUBJECTS, labelled
from tests.tiny_models import (
    CHECKPOINTING,
    EOS,
    VOCABULARY,
    batch,
    inputs_of,
    switch_on_checkpointing,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    with_lora,
)

# float64 but for transformers' Llama, which normalises and rotates in float32
TOLERANCE = 2e-5


def prepared(name: str, num_members: int = 3) -> tuple[nn.Module, Any, Tensor, str]:
    make, subspace, *_ = SUBJECTS[name]
    model = make(torch.float64)
    layout = select(model, subspace)
    return model, layout, scattered(model, layout, num_members), subspace


# -- one ordinary model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["llama-lora", "llama-head", "gpt2-last-block", "bert-lora", "roberta-head", "bert-tagger-lora", "vit-last-block"],
)
def test_logits_are_the_log_mixture_with_its_entropies(name: str) -> None:
    model, layout, theta, subspace = prepared(name)
    inputs = inputs_of(model)
    logits = separate_logits(model, layout, theta, inputs)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        output = bayesian(**inputs)
    assert relative_error(output.logits, mixture(logits)) < 1e-12
    for part, expected in zip((output.total, output.aleatoric, output.epistemic), entropies(logits), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-10)  # the bound for float64
    assert output.total.shape == output.logits.shape[:-1]


def test_mixing_logits_instead_of_probabilities_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_logits(logits: Tensor) -> Prediction:
        return Prediction(logits.mean(0).log_softmax(-1), predict(logits).uncertainty)

    model, layout, theta, subspace = prepared("bert-lora")
    expected = mixture(separate_logits(model, layout, theta, batch()))
    monkeypatch.setattr(spread, "predict", mixed_logits)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        assert relative_error(bayesian(**batch()).logits, expected) > 0.01


@pytest.mark.parametrize("name", ["llama-lora", "bert-lora", "bert-tagger-lora", "llama-tagger-head", "vit-head"])
def test_loss_with_labels_is_the_mixtures_mean_nll(name: str) -> None:
    model, layout, theta, subspace = prepared(name)
    inputs = labelled(name)
    log_probs = mixture(separate_logits(model, layout, theta, {k: v for k, v in inputs.items() if k != "labels"}))
    labels = inputs["labels"]
    if name in CAUSAL:
        log_probs, labels = log_probs[:, :-1], labels[:, 1:]
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        loss = bayesian(**inputs).loss
    expected = F.nll_loss(log_probs.flatten(0, -2), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])], ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_to_keep_are_those_of_the_whole(name: str, keep: int | Tensor) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole, kept = bayesian(**batch()), bayesian(**batch(), logits_to_keep=keep)
    positions = keep if isinstance(keep, Tensor) else slice(-keep, None)
    torch.testing.assert_close(kept.logits, whole.logits[:, positions], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept.epistemic, whole.epistemic[:, positions], rtol=1e-10, atol=1e-12)


WHOLE_TAIL = ("jamba", "granitemoehybrid", "bloom", "mpt", "opt", "bart", "marian")
"""Blocks that call their feed-forward by another name, or hand it the residual: all positions are computed."""


@pytest.mark.parametrize("name", CAUSAL)
def test_last_logits_run_the_last_feed_forward_at_one_position(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole = bayesian(**batch(), use_cache=True)
        positions: list[int] = []
        feed_forward = bayesian.members.last_feed_forward.module or nn.Identity()
        handle = feed_forward.register_forward_pre_hook(lambda module, args: positions.append(args[0].shape[1]))
        kept = bayesian(**batch(), use_cache=True, logits_to_keep=1)
        handle.remove()
    if not name.startswith(WHOLE_TAIL):
        assert set(positions) == {1}
    torch.testing.assert_close(kept.logits, whole.logits[:, -1:], rtol=1e-12, atol=1e-12)
    for a, b in zip(kept.past_key_values.layers, whole.past_key_values.layers, strict=True):
        if hasattr(a, "keys"):
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(a.values, b.values, rtol=1e-12, atol=1e-12)


def test_several_passes_also_compute_only_the_last_position() -> None:
    model, _, theta, subspace = prepared("llama-lora")
    positions: list[int] = []
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian.members_per_pass = 1
        bayesian.members.last_feed_forward.module.register_forward_pre_hook(
            lambda module, args: positions.append(args[0].shape[1])
        )
        first, second = (bayesian(**batch(), logits_to_keep=1).logits for _ in range(2))
    assert positions == [1] * 7  # a look at one token, and three members twice
    assert torch.equal(first, second)


def test_a_last_block_that_runs_twice_is_not_cut() -> None:
    model = tiny_llama(dtype=torch.float64)
    model.model.layers[-2] = model.model.layers[-1]
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=2) as bayesian:
        whole = bayesian(**batch(), use_cache=False)
        for _ in range(2):
            kept = bayesian(**batch(), use_cache=False, logits_to_keep=1)
            torch.testing.assert_close(kept.logits, whole.logits[:, -1:], rtol=1e-12, atol=1e-12)


def test_a_failed_feed_forward_leaves_the_next_forward_whole() -> None:
    model, _, theta, subspace = prepared("llama-lora")
    shorter = {name: value[:, 2:] for name, value in batch().items()}
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        whole = bayesian(**shorter)
        act = bayesian.members.last_feed_forward.module.act_fn
        act.forward = lambda x: (_ for _ in ()).throw(MemoryError)  # between the hooks
        with pytest.raises(MemoryError):
            bayesian(**batch(), logits_to_keep=1)
        del act.forward
        assert torch.equal(bayesian(**shorter).logits, whole.logits)


def test_a_forward_in_passes_returns_a_cache_only_on_request() -> None:
    model, _, theta, subspace = prepared("llama-lora-last-block")
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian.members_per_pass = 1
        assert bayesian(**batch()).past_key_values is None
        cache = bayesian(**batch(), use_cache=True).past_key_values
    assert [layer.keys.shape[0] for layer in cache.layers] == [3, 3, 9]


def test_hidden_states_of_a_mixture_are_refused() -> None:
    with (
        attach(tiny_llama(), subspace="last_block") as bayesian,
        pytest.raises(ValueError, match="from member to member"),
    ):
        bayesian(**batch(), output_hidden_states=True)


def test_shown_members_answer_in_place_of_the_parameter() -> None:
    model, layout, theta, subspace = prepared("llama-lora", num_members=4)
    with torch.no_grad(), attach(model, theta[:2], subspace=subspace) as bayesian:
        bayesian.show(theta[2:])
        found = bayesian(**batch()).logits
        assert bayesian.num_members == 2
        bayesian.show(None)
        other = bayesian(**batch()).logits
    assert relative_error(found, mixture(separate_logits(model, layout, theta[2:], batch()))) < 1e-12
    assert relative_error(other, found) > 0.01


def test_without_theta_all_members_are_the_model_itself() -> None:
    model = tiny_llama()
    expected = model(**batch()).logits.log_softmax(-1)
    with torch.no_grad(), attach(model, subspace="last_block", num_members=3) as bayesian:
        output = bayesian(**batch())
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-5)  # float32
    assert torch.equal(output.epistemic, torch.zeros_like(output.epistemic))


# -- scores of given text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-lora", "llama-head", "gpt2-last-block"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_scores_of_padded_rows_equal_those_of_each_row_alone(name: str, padding: str) -> None:
    model, _, theta, subspace = prepared(name)
    inputs = batch(padding=padding)
    mask = inputs["attention_mask"].bool()
    with attach(model, theta, subspace=subspace) as bayesian:
        together = bayesian.score(**inputs)
        for row in range(len(mask)):
            alone = bayesian.score(inputs["input_ids"][row, mask[row]][None])
            for field, values in together._asdict().items():
                found = values[row][~values[row].isnan()] if values.ndim == 2 else values[row : row + 1]
                expected = getattr(alone, field).flatten()
                torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(together.total.isnan(), ~(mask[:, 1:] & mask[:, :-1]))


@pytest.mark.parametrize("name", ["llama-lora", "llama-head", "gpt2-last-block"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_rows_have_the_likelihood_of_each_row_alone(name: str, padding: str) -> None:
    model, _, theta, subspace = prepared(name)
    inputs = batch(rows=4, padding=padding)
    mask = inputs["attention_mask"].bool()
    together = {**inputs, "labels": inputs["input_ids"].masked_fill(~mask, -100)}
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        found, statistics = bayesian.log_lik(theta, together, folded=False), bayesian.evaluate_batch(together)[0]
        rows = [{"input_ids": ids[None], "labels": ids[None]}
                for ids in (row[kept] for row, kept in zip(inputs["input_ids"], mask, strict=True))]  # fmt: skip
        alone = [bayesian.log_lik(theta, row, folded=False) for row in rows]
        nll = torch.cat([bayesian.evaluate_batch(row)[0]["nll"] for row in rows])
        loss = bayesian(**together).loss
    assert torch.equal(bayesian.terms_per_row(together), torch.tensor([6, 5, 4, 3]))
    assert torch.equal(found.num_terms, torch.full((3,), 18))
    total = sum(one.loss for one in alone)
    torch.testing.assert_close(found.loss, total, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(statistics["nll"], nll, rtol=TOLERANCE, atol=TOLERANCE)
    if name != "gpt2-last-block":  # forward is transformers' own: learnt positions count padding unless told otherwise
        torch.testing.assert_close(loss, nll.mean().to(loss), rtol=TOLERANCE, atol=TOLERANCE)


def test_scores_equal_brute_force_and_begin_where_asked() -> None:
    model, layout, theta, subspace = prepared("gpt2-last-block")
    ids = batch()["input_ids"]
    logits = separate_logits(model, layout, theta, batch())[:, :, 3:-1]
    per_member = logits.log_softmax(-1).gather(-1, ids[:, 4:].expand(3, -1, -1)[..., None])[..., 0]
    with attach(model, theta, subspace=subspace) as bayesian:
        scores = bayesian.score(**batch(), first=4)
    assert scores.total.shape == (3, 3)
    for found, expected in zip(scores[:3], entropies(logits), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    sequence = per_member.sum(-1).logsumexp(0) - math.log(3)
    torch.testing.assert_close(scores.sequence_logprob, sequence, rtol=1e-10, atol=0)
    tokenwise = (per_member.logsumexp(0) - math.log(3)).sum(-1)
    torch.testing.assert_close(scores.sequence_logprob_tokenwise, tokenwise, rtol=1e-10, atol=0)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_texts_have_scores(length: int) -> None:
    with attach(tiny_llama(), subspace="last_block", num_members=2) as bayesian:
        scores = bayesian.score(batch(2, length)["input_ids"])
    assert scores.total.shape == (2, length - 1)
    assert scores.sequence_logprob.isfinite().all()


# -- classifiers and regressors --------------------------------------------------------------------------------------


def _classifier(problem: str, num_labels: int) -> tuple[nn.Module, Any, Tensor, Tensor]:
    model = tiny_bert(dtype=torch.float64, num_labels=num_labels, problem_type=problem)
    layout = select(model, "last_block")
    theta = scattered(model, layout)
    return model, layout, theta, separate_logits(model, layout, theta, batch())


@pytest.mark.parametrize("num_labels", [1, 2])
def test_regression_has_a_normal_likelihood_of_known_noise(num_labels: int) -> None:
    model, _, theta, logits = _classifier("regression", num_labels)
    labels = torch.randn(3) if num_labels == 1 else torch.randn(3, 2)
    normal = torch.distributions.Normal(logits, 0.5).log_prob(labels.double().view(3, num_labels)).sum(-1)
    with torch.no_grad(), attach(model, theta, subspace="last_block", noise_std=0.5) as bayesian:
        result = bayesian(**batch(), labels=labels, theta=theta)
        output = bayesian(**batch(), labels=labels)
        statistics, kept = bayesian.evaluate_batch({**batch(), "labels": labels}, keep_logits=True)
    torch.testing.assert_close(result.loss, -normal.sum(1), rtol=1e-10, atol=0)
    assert result.num_terms.tolist() == [3, 3, 3]
    mixture_nll = math.log(3) - normal.logsumexp(0)
    torch.testing.assert_close(statistics["nll"], mixture_nll, rtol=1e-10, atol=0)
    std = (logits.var(0, unbiased=False) + 0.25).sqrt()
    covered = ((labels.double().view(3, num_labels) - logits.mean(0)).abs() <= std).double().mean(1)
    assert torch.equal(statistics["covered"], covered)
    torch.testing.assert_close(output.loss, mixture_nll.mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(output.logits, logits.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kept, output.logits)
    assert output.total is None


def test_several_labels_have_bernoulli_likelihoods() -> None:
    model, _, theta, logits = _classifier("multi_label_classification", 4)
    labels = (torch.arange(12).view(3, 4) % 3 == 0).double()
    bernoulli = torch.distributions.Bernoulli(logits=logits).log_prob(labels).sum(-1)
    with torch.no_grad(), attach(model, theta, subspace="last_block") as bayesian:
        result = bayesian(**batch(), labels=labels, theta=theta)
        output = bayesian(**batch(), labels=labels)
    torch.testing.assert_close(result.loss, -bernoulli.sum(1), rtol=1e-10, atol=0)
    assert result.num_terms.tolist() == [3, 3, 3]
    torch.testing.assert_close(output.loss, (math.log(3) - bernoulli.logsumexp(0)).mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(output.logits, logits.sigmoid().mean(0).logit(), rtol=1e-8, atol=1e-10)


def test_a_certain_label_keeps_a_finite_logit() -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    with torch.no_grad():
        model.classifier.bias.fill_(100.0)  # its probability rounds to 1
        expected = model(**batch()).logits
    with torch.no_grad(), attach(model, subspace="last_layer", num_members=2) as bayesian:
        torch.testing.assert_close(bayesian(**batch()).logits, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("noise_std", [None, 0.0, -1.0])
def test_regression_without_noise_is_refused_and_changes_nothing(noise_std: float | None) -> None:
    model = tiny_bert(num_labels=1)
    with unchanged(model), pytest.raises(ValueError, match=f"noise_std > 0, .* got {noise_std}"):
        attach(model, subspace="last_block", noise_std=noise_std)


def test_examples_without_a_label_are_no_terms() -> None:
    model, layout, theta, subspace = prepared("bert-lora")
    inputs = labelled("bert-lora")
    inputs["labels"][1] = -100
    losses, _ = separate_gradients(model, layout, theta, [inputs] * 3)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        result = bayesian(**inputs, theta=theta)
        statistics, _ = bayesian.evaluate_batch(inputs)
    torch.testing.assert_close(result.loss, losses, rtol=1e-12, atol=0)
    assert result.num_terms.tolist() == [2, 2, 2]
    assert {len(values) for values in statistics.values()} == {2}


def test_low_precision_logits_are_widened_for_the_likelihood() -> None:
    logits, labels = torch.full((1, 1, 1), 1000.0, dtype=torch.bfloat16), torch.full((1, 1), 1001.0)
    assert Normal(1.0).log_prob(logits, labels).dtype == torch.float32
    expected = -0.5 - 0.5 * math.log(2 * math.pi)  # bfloat16 has no 1001
    assert math.isclose(float(Normal(1.0).log_prob(logits, labels)), expected, rel_tol=1e-5)


@pytest.mark.parametrize("name", ["llama-lora", "gpt2-last-block", "bert-lora", "llama-tagger-last-block", "vit-lora"])
def test_statistics_of_evaluation_are_those_of_the_mixture(name: str) -> None:
    model, layout, theta, subspace = prepared(name)
    inputs = labelled(name)
    logits = separate_logits(model, layout, theta, {k: v for k, v in inputs.items() if k != "labels"})
    labels = inputs["labels"]
    if name in CAUSAL:
        logits, labels = logits[:, :, :-1], labels[:, 1:]
    terms = labels != -100
    logits, labels = logits[:, terms], labels[terms]
    chosen = logits.log_softmax(-1).gather(-1, labels.expand(3, -1)[..., None])[..., 0]
    total, aleatoric, epistemic = entropies(logits)
    confidence, best = mixture(logits).exp().max(-1)
    with attach(model, theta, subspace=subspace) as bayesian:
        statistics, none = bayesian.evaluate_batch(inputs)
        with_logits, kept = bayesian.evaluate_batch(inputs, keep_logits=True)
        expected_logits = bayesian(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    expected = {"nll": math.log(3) - chosen.logsumexp(0), "member_nll": -chosen.mean(0), "total": total,
                "aleatoric": aleatoric, "epistemic": epistemic, "confidence": confidence,
                "correct": (best == labels).double()}  # fmt: skip
    for key, value in expected.items():
        torch.testing.assert_close(statistics[key].double(), value, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(with_logits[key], statistics[key])
    assert none is None
    torch.testing.assert_close(kept, expected_logits)


# -- attach and detach -----------------------------------------------------------------------------------------------


class unchanged:
    """Asserts that a model is, in the end, what it was: values, flags, hooks, attributes, config and answers."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.before = model, self.state(model)

    @staticmethod
    def state(model: nn.Module) -> dict[str, Any]:
        core = core_of(model)
        with torch.no_grad():
            answer = core(**inputs_of(model)).logits
        return {
            "values": {name: value.clone() for name, value in model.state_dict().items()},
            "answer": {"logits": answer},
            "flags": {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)},
            "identities": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
            "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
            "hooks": {
                name: [dict(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and isinstance(v, dict)]
                for name, module in model.named_modules()
            },
            "config": (core.config.to_dict(), core.config._attn_implementation),
        }

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        after = self.state(self.model)
        for part, before in self.before.items():
            if part in ("values", "answer"):
                assert before.keys() == after[part].keys()
                assert all(torch.equal(before[key], after[part][key]) for key in before), part
            else:
                assert after[part] == before, part


def test_an_adapter_that_nobody_could_load_again_is_refused() -> None:
    # as peft leaves a model whose adapter began by a randomised decomposition of its weights
    model = with_lora(tiny_llama())
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"
    with pytest.raises(ValueError, match=r"'pissa_niter_4' takes a random decomposition .* Use 'pissa'"):
        attach(model)


@pytest.mark.parametrize("name", SUBJECTS)
def test_detach_gives_the_model_back_exactly(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with unchanged(model):
        bayesian = attach(model, theta, subspace=subspace)
        bayesian(**labelled(name), theta=theta.clone().requires_grad_()).loss.sum().backward()
        assert bayesian.detach() is model


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-last-block", "bert-lora"])
def test_an_error_in_a_forward_leaves_nothing_behind(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    last = [
        module for module in core_of(model).modules() if type(module).__name__.endswith(("Attention", "SelfOutput"))
    ][-1]

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    with unchanged(model):
        with attach(model, theta, subspace=subspace) as bayesian:
            expected = bayesian(**batch()).logits
            handle = last.register_forward_pre_hook(broken)
            with pytest.raises(RuntimeError, match="broken"):
                bayesian(**batch())
            handle.remove()
            assert torch.equal(bayesian(**batch()).logits, expected)
        with pytest.raises(RuntimeError, match="broken"), attach(model, theta, subspace=subspace):
            broken()


def _unsupported_in_the_middle() -> nn.Module:
    model = tiny_llama()
    gate = nn.Bilinear(2, 2, 2)
    model.model.layers[1].mlp.gate = gate
    return model


@pytest.mark.parametrize(
    ("make", "subspace", "reason"),
    [
        (_unsupported_in_the_middle, ".", r"layers\.1\.mlp\.gate .*Bilinear"),
        (lambda: with_lora(tiny_llama(), use_dora=True), "trainable", "Dora"),
        (lambda: tiny_llama().requires_grad_(False), "trainable", "selects 0 parameters"),
        (tiny_gpt2, "nowhere", "subspace='nowhere' selects 0 parameters"),
    ],
)
def test_a_refused_attach_leaves_the_model_alone(make: Callable[[], nn.Module], subspace: str, reason: str) -> None:
    model = make()
    with unchanged(model), pytest.raises(ValueError, match=reason):
        attach(model, subspace=subspace)


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (5,), (3, 2, 5), "bfloat16"], ids=str)
def test_members_of_another_shape_or_dtype_are_refused(shape: tuple[int, ...] | str) -> None:
    model = tiny_llama()
    own = initial(model, select(model, "last_block"))[None]
    theta = own.bfloat16() if shape == "bfloat16" else torch.zeros(shape)
    with unchanged(model), pytest.raises(ValueError, match=r"theta must be float32 or float64 \[members, \d+\]"):
        attach(model, theta, subspace="last_block")


@pytest.mark.parametrize("change", ["to", "bfloat16", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_members_keep_their_dtype_when_the_base_is_narrowed(change: str, dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    theta = scattered(model, select(model, "last_block"))
    narrow = torch.float16 if change == "half" else torch.bfloat16
    with torch.no_grad(), attach(model, theta, subspace="last_block") as bayesian:
        exact = bayesian(**batch()).logits
        same = bayesian.to(torch.bfloat16) if change == "to" else getattr(bayesian, change)()
        assert same is bayesian
        assert bayesian.theta.dtype == dtype
        assert torch.equal(bayesian.theta, theta)
        assert model.lm_head.weight.dtype == narrow
        found = bayesian(**batch()).logits.exp()
    assert not torch.equal(theta.to(narrow).to(dtype), theta)  # what rounding would have left
    assert 0 < (found - exact.exp()).abs().max() < 0.2  # probabilities of a base in 8 bits


def test_bfloat16_rounding_looks_epistemic_unlike_float32() -> None:
    """docs/uncertainty.md says so, and where: far below 1e-4 nats the floor is all there is, far above it nothing."""

    def epistemic(std: float, dtype: torch.dtype) -> float:
        model = with_lora(tiny_llama(dtype=torch.bfloat16)).to(dtype)
        theta = scattered(model, select(model), 8, std)
        with torch.no_grad(), attach(model, theta) as bayesian:
            return float(bayesian(**batch()).epistemic.mean())

    for std, floor in ((1e-4, True), (0.1, False)):
        rounded, exact = epistemic(std, torch.bfloat16), epistemic(std, torch.float32)
        assert (exact < 1e-6) == floor
        assert (1e-5 < rounded < 1e-3) == floor
        assert floor or abs(rounded / exact - 1) < 0.1  # 8 bits of a base whose layers all differ
    assert epistemic(1e-4, torch.float16) < 0.1 * epistemic(1e-4, torch.bfloat16)  # three bits more, squared: a 64th


def test_members_follow_a_base_that_is_widened() -> None:
    with attach(tiny_llama(), subspace="last_block") as bayesian:
        assert bayesian.double().theta.dtype == torch.float64
        assert bayesian.float().theta.dtype == torch.float64


def test_checkpointing_enabled_while_attached_is_disabled_again() -> None:
    model = with_lora(tiny_llama())
    with unchanged(model), attach(model) as bayesian:
        switch_on_checkpointing(bayesian)
        leaf = bayesian.theta.detach().requires_grad_()
        bayesian.train()(**labelled("llama-lora"), theta=leaf).loss.sum().backward()
        bayesian.eval()


def test_checkpointing_switched_on_before_stays_on() -> None:
    model = tiny_llama()
    switch_on_checkpointing(model)
    with unchanged(model):
        attach(model, subspace="last_block").detach()
    assert getattr(model, f"is_{CHECKPOINTING}")


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-everything", "bert-lora-and-saved-head"])
def test_a_deep_copy_is_a_model_of_its_own(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        expected = bayesian(**batch()).logits
        twin = copy.deepcopy(bayesian)
        twin.theta.data.mul_(2)
        changed = twin(**batch()).logits
        assert torch.equal(bayesian(**batch()).logits, expected)
        assert relative_error(changed, expected) > 0.01
        plain = twin.detach()
        assert torch.equal(bayesian(**batch()).logits, expected)
    with torch.no_grad():
        assert torch.equal(core_of(plain)(**batch()).logits, core_of(model)(**batch()).logits)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in plain.modules())


def test_a_model_attached_again_is_as_good_as_new() -> None:
    model, _, theta, subspace = prepared("llama-lora-last-block")
    answers = []
    for _ in range(2):
        with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
            answers.append(bayesian(**batch()).logits)
    assert torch.equal(*answers)


def test_the_attention_of_the_wrapped_model_stays_its_own() -> None:
    model = tiny_llama(attn_implementation="eager")
    with unchanged(model), attach(model, subspace="last_block") as bayesian:
        assert bayesian.config._attn_implementation == "eager"


def test_a_bayesian_model_is_not_saved_as_a_plain_one(tmp_path: Any) -> None:
    with (
        attach(tiny_llama(), subspace="last_block") as bayesian,
        pytest.raises(ValueError, match="saved as a posterior"),
    ):
        bayesian.save_pretrained(tmp_path)


# -- what is refused -------------------------------------------------------------------------------------------------


def _t5(kind: type) -> nn.Module:
    return kind(
        T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, eos_token_id=EOS)
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: _t5(T5ForConditionalGeneration), "T5ForConditionalGeneration is an encoder-decoder model"),
        (lambda: _t5(T5ForSequenceClassification), "T5ForSequenceClassification is an encoder-decoder model"),
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
        (lambda: _mapped(model="cuda:0", lm_head="cuda:1"), r"spread over \['cuda:0', 'cuda:1'\]: members need it"),
        (lambda: _mapped(model=0, lm_head="disk"), r"spread over \['0', 'disk'\]: members need it on one"),
        (lambda: _head_offloaded(), r"spread over \['cpu', 'meta'\]: members need it on one"),
        (lambda: tiny_llama().to("meta"), r"spread over \['meta'\]: members need it on one"),
    ],
    ids=["t5", "t5 classifier", "plain module", "two GPUs", "disk", "head on no device", "offloaded"],
)
def test_models_of_another_kind_are_refused_by_name(make: Callable[[], nn.Module], reason: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=reason):
        attach(model, subspace=".")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig, PromptEncoderConfig])
@pytest.mark.parametrize("subspace", ["trainable", "last_layer"])
def test_adapters_of_virtual_tokens_are_refused_when_attached(config: type, subspace: str) -> None:
    model = get_peft_model(tiny_llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=2))
    kind = model.peft_config["default"].peft_type.value
    with pytest.raises(ValueError, match=f"peft's {kind} adds virtual tokens .* Use LoRA"):
        attach(model, subspace=subspace)


@pytest.mark.parametrize("name", ["llama-lora", "bert-head"])
def test_compiling_the_whole_is_refused_in_words(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with attach(model, theta, subspace=subspace) as bayesian, torch.no_grad():
        compiled = torch.compile(bayesian, backend="eager")
        with pytest.raises(ValueError, match=r"cannot be compiled as a whole: .* layer.compile\(\)"):
            compiled(**batch())
        bayesian(**batch())


@pytest.mark.parametrize("name", ["llama-lora", "llama-last-block"])
def test_the_line_that_is_advised_finds_the_layers(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    layers = COMPILE_LAYERS.removeprefix("for layer in ").removesuffix(": layer.compile()")
    with attach(model, theta, subspace=subspace) as bayesian:
        assert attrgetter(layers.removeprefix("model."))(bayesian) is core_of(model).model.layers


@pytest.mark.parametrize("name", ["llama-lora", "llama-last-block"])
def test_layers_compiled_one_by_one_change_nothing(name: str) -> None:
    found = []
    for backend in (None, "aot_eager"):
        model, _, theta, subspace = prepared(name)
        leaf = theta.clone().requires_grad_()
        with attach(model, theta, subspace=subspace) as bayesian:
            for layer in core_of(model).model.layers if backend else ():
                layer.compile(backend=backend)
            bayesian.train()(**labelled(name), theta=leaf).loss.sum().backward()
            with torch.no_grad():
                found.append((leaf.grad, bayesian.eval()(**batch()).logits))
    # the operations are the same, but a compiler may order sums anew: rounding of float32 norms, see TOLERANCE
    for eager, compiled in zip(*found, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE


def _mapped(**devices: str | int) -> nn.Module:
    """As accelerate leaves a model that it has dealt to devices."""
    model = tiny_llama()
    model.hf_device_map = devices
    return model


def _head_offloaded() -> nn.Module:
    model = tiny_llama()
    model.lm_head.to("meta")
    return model


def test_a_base_spread_over_devices_is_refused_on_every_way_in(tmp_path: Path) -> None:
    spread_out = r"spread over \['cuda:0', 'cuda:1'\]: members need it on one device"
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), max_steps=2)
    trainer.train()
    trainer.save_model()
    base = _mapped(model="cuda:0", lm_head="cuda:1")
    with pytest.raises(ValueError, match=spread_out):
        BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=base)
    base = with_lora(base)
    with pytest.raises(ValueError, match=spread_out):
        attach(base)
    with pytest.raises(ValueError, match=spread_out):
        runs.trainer(tmp_path, SGHMCConfig(num_chains=2), model=base)
    layout = select(base)
    with pytest.raises(ValueError, match=spread_out):
        BayesianModelForCausalLM(base, layout, scattered(base, layout))
    assert sum(parameter.requires_grad for parameter in base.parameters()) == len(layout.names)


class BareForSequenceClassification(GPT2Model):
    """A class from elsewhere whose name promises a head."""


def test_a_backbone_that_answers_no_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT2Model is loaded by AutoModel"):
        attach(GPT2Model(tiny_gpt2().config), subspace="last_block")
    model = attach(BareForSequenceClassification(tiny_gpt2().config), subspace="last_block")
    with pytest.raises(ValueError, match="BareForSequenceClassification returns no logits"):
        model(**batch())


def test_calling_the_wrapped_model_past_its_members_is_refused() -> None:
    model = tiny_llama()
    with (
        attach(model, subspace="last_layer"),
        pytest.raises(RuntimeError, match=r"lm_head.weight is random: call the Bay"),
    ):
        model(**batch())


def test_a_parameter_that_no_forward_reads_is_named() -> None:
    model = tiny_llama()
    model.model.layers[1].spare = nn.Linear(2, 2)
    with attach(model, subspace=r"layers\.1\.") as bayesian, pytest.raises(ValueError, match=r"first .*spare.bias"):
        bayesian(**labelled("llama-lora"), theta=bayesian.theta)


def test_tied_weights_are_one_random_tensor() -> None:
    model = tiny_gpt2()
    with attach(model, subspace="lm_head|wte", num_members=2) as bayesian:
        assert bayesian.layout.names == ("transformer.wte.weight",)
        assert bayesian.theta.shape == (2, VOCABULARY * 16)


def test_memory_of_a_forward_is_bounded_by_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bayes.members.engine.FOLDED_ROWS", 50)  # 7 positions x 3 rows: two members a pass
    rows: list[int] = []
    model, _, theta, subspace = prepared("llama-lora", num_members=5)
    handle = core_of(model).model.norm.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[0]))
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian(**batch())
    handle.remove()
    assert rows == [6, 6, 3]


def test_both_kinds_of_model_say_what_they_are() -> None:
    for name in ("llama-lora", "bert-lora"):
        model, _, theta, subspace = prepared(name)
        with attach(model, theta, subspace=subspace) as bayesian:
            assert isinstance(bayesian, BayesianModel)
            assert isinstance(bayesian, BayesianModelForCausalLM) == (name not in CLASSIFIERS)
            assert bayesian.num_members == 3
            assert bayesian.core is core_of(model)


def test_members_cannot_be_spread_without_launched_processes() -> None:
    with attach(with_lora(tiny_llama())) as model, pytest.raises(ValueError, match="start it with accelerate launch"):
        model.spread_members()
