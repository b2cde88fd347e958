"""Generation by a loop over separate models, and its scores by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.core.layout import Layout, select
from hf_bayes.members.compat.transformers import CACHE
from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from tests.members import subject_models
from tests.members.reference import entropies, mixture, scattered, separate_logits
from tests.tiny_models import PAD, VOCABULARY, tiny_gpt2, tiny_llama, with_lora

STEPS = 5

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama-lora": (lambda: with_lora(_llama()), "trainable"),
    "llama-lora-last-block": (
        lambda: with_lora(_llama(), target_modules=["q_proj"], layers_to_transform=[2]),
        "trainable",
    ),
    "llama-head": (lambda: _llama(), "last_layer"),
    "gpt2-lora": (lambda: with_lora(_gpt2()), "trainable"),
    "gpt2-last-block": (lambda: _gpt2(), "last_block"),
    "gpt2-tied-head": (lambda: _gpt2(), "last_layer"),
    "mistral-lora": (lambda: with_lora(_endless(subject_models.mistral)), "trainable"),
    "mistral-last-block": (lambda: _endless(subject_models.mistral), "last_block"),
    "qwen3-query-and-key-norms": (lambda: _endless(subject_models.qwen3), r"[qk]_norm"),
    "gemma2-last-block": (lambda: _endless(subject_models.gemma2, torch.float32), "last_block"),  # see there
    "gemma3-last-block": (lambda: _endless(subject_models.gemma3), "last_block"),
    "gemma3-everything": (lambda: _endless(subject_models.gemma3), "."),
    "lfm2-last-block": (lambda: _endless(subject_models.lfm2), "last_block"),
    "jamba-lora": (lambda: _endless(subject_models.jamba, targets=["q_proj"]), "trainable"),
    "bamba-lora": (lambda: _endless(subject_models.bamba, targets=["q_proj"]), "trainable"),
    "granitemoehybrid-lora": (lambda: _endless(subject_models.granite_hybrid, targets=["q_proj"]), "trainable"),
    "falcon_h1-lora": (lambda: _endless(subject_models.falcon_h1, targets=["q_proj"]), "trainable"),
    "qwen3_next-lora": (lambda: _endless(subject_models.qwen3_next, targets=["q_proj"]), "trainable"),
    "opt-last-block": (lambda: _endless(subject_models.opt), "last_block"),
}
if CACHE == "cache":  # transformers 5.24 gave the states of models without attention the name of keys and values
    SUBJECTS |= {
        "mamba-lora": (lambda: _endless(subject_models.mamba, targets=["in_proj", "x_proj"]), "trainable"),
        "mamba2-lora": (lambda: _endless(subject_models.mamba2, targets=["in_proj"]), "trainable"),
        "falcon_mamba-lora": (lambda: _endless(subject_models.falcon_mamba, targets=["in_proj"]), "trainable"),
        "xlstm-lora": (lambda: _endless(subject_models.xlstm, targets=["q", "v"]), "trainable"),
    }


def _llama() -> nn.Module:
    return tiny_llama(dtype=torch.float64, num_hidden_layers=3, eos_token_id=None)


def _endless(
    make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype = torch.float64, targets: list[str] | None = None
) -> nn.Module:
    model = make(dtype)
    model.generation_config.eos_token_id = None
    return model if targets is None else with_lora(model, target_modules=targets)


def _gpt2() -> nn.Module:
    return tiny_gpt2(dtype=torch.float64, n_layer=3, eos_token_id=None)


def prepared(name: str, num_members: int = 3) -> tuple[nn.Module, Layout, Tensor]:
    make, subspace = SUBJECTS[name]
    model = make()
    layout = select(model, subspace)
    return model, layout, scattered(model, layout, num_members)


def attached(name: str, model: nn.Module, theta: Tensor, **options: Any) -> BayesianModelForCausalLM:
    bayesian = attach(model, theta, subspace=SUBJECTS[name][1], **options).eval()
    assert isinstance(bayesian, BayesianModelForCausalLM)
    return bayesian


def member_logits(model: nn.Module, layout: Layout, theta: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """[M, rows, T, V]"""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return separate_logits(model, layout, theta, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def looped(
    model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Tensor], choose: Callable[[Tensor], Tensor],
    eos: int | None = None,
) -> Tensor:  # fmt: skip
    """Token by token, the next one by ``choose`` from the mixture's log-probabilities [rows, V] in float32."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(STEPS):
        token = choose(mixture(member_logits(model, layout, theta, ids, mask)[:, :, -1]).float())
        token = torch.where(ended, PAD, token)
        ended = ended | (token == eos)
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if ended.all():
            break
    return ids


def greedy(log_probs: Tensor) -> Tensor:
    return log_probs.argmax(-1)


def beams(
    model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Tensor], width: int
) -> tuple[Tensor, Tensor]:
    """The ``width`` best continuations of each row, best first, no end tokens: [B * width, T], and their scores."""
    kept_ids, kept_scores = [], []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        ids, mask, scores = ids[None], mask[None], torch.zeros(1, dtype=torch.float64)
        for _ in range(STEPS):
            step = mixture(member_logits(model, layout, theta, ids, mask)[:, :, -1])
            scores, best = (scores[:, None] + step).flatten().topk(width)
            row, token = best // VOCABULARY, best % VOCABULARY
            ids = torch.cat([ids[row], token[:, None]], 1)
            mask = torch.cat([mask[row], torch.ones_like(token)[:, None]], 1)
        kept_ids.append(ids)
        kept_scores.append(scores)
    return torch.cat(kept_ids), torch.cat(kept_scores)


def generate(bayesian: BayesianModelForCausalLM, inputs: dict[str, Tensor], **options: Any) -> Any:
    options = {"max_new_tokens": STEPS, "do_sample": False, "top_k": 0, "pad_token_id": PAD} | options
    return bayesian.generate(**inputs, return_dict_in_generate=True, **options)


FIELDS = ("total", "aleatoric", "epistemic", "logprobs", "sequence_logprob", "sequence_logprob_tokenwise")

# The models are float64, but transformers' Llama normalises and rotates in float32 (6e-8), and sums amplify that.
# So do the others', and Gemma-2, float32 itself, caps attention and logits.
TOLERANCE = {"gpt2": 1e-11, "gemma2": 1e-4} | dict.fromkeys(("llama", "mistral", "qwen3", "gemma3", "lfm2"), 2e-5)


def brute_force_scores(
    model: nn.Module, layout: Layout, theta: Tensor, sequences: Tensor, prompt_mask: Tensor, lengths: list[int]
) -> dict[str, Tensor]:
    """All fields of ``Scores`` from one teacher-forced pass of every member."""
    start = prompt_mask.shape[1]
    new = sequences.shape[1] - start
    written = torch.arange(new) < torch.tensor(lengths)[:, None]
    mask = torch.cat([prompt_mask, written.long()], 1)
    logits = member_logits(model, layout, theta, sequences, mask)[:, :, start - 1 : -1]
    tokens = sequences[:, start:]
    per_member = logits.log_softmax(-1).gather(-1, tokens.expand(len(theta), -1, -1)[..., None])[..., 0]
    chosen = mixture(logits).gather(-1, tokens[..., None])[..., 0]
    nan = torch.where(written, 0.0, math.nan)
    total, aleatoric, epistemic = (part + nan for part in entropies(logits))
    return {
        "total": total, "aleatoric": aleatoric, "epistemic": epistemic, "logprobs": chosen + nan,
        "sequence_logprob": (per_member * written).sum(-1).logsumexp(0) - math.log(len(theta)),
        "sequence_logprob_tokenwise": (chosen * written).sum(-1),
    }  # fmt: skip


def require_scores(output: Any, expected: dict[str, Tensor], tolerance: float) -> None:
    for field in FIELDS:
        torch.testing.assert_close(
            output[field].double(),
            expected[field].double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, f=field: f"{f}: {m}",
        )
