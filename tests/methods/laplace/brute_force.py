"""The curvature by its definition: unpadded rows one at a time, one backward pass per output, no shared code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertForTokenClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from hf_bayes.core.layout import Layout, select
from tests import tiny_models as models

LENGTHS = (5, 3, 4)
DECODERS = {"gpt2": GPT2ForSequenceClassification, "llama": LlamaForSequenceClassification}
"""Classifiers that score every token and use the last token of a row."""

NOISE = 0.7


@dataclass
class Problem:
    """A model, its random parameters, and data.

    Attributes:
        task: "lm", "classes", "tokens" (a class for each) or "regression".
        rows: unpadded {"input_ids": [1, t], "labels": ...}.
    """

    model: nn.Module
    subspace: str
    task: str
    rows: list[dict[str, Tensor]]
    head: nn.Module

    @property
    def layout(self) -> Layout:
        return select(self.model, self.subspace)

    def batches(self, size: int) -> Callable[[Sequence[int]], list[dict[str, Tensor]]]:
        """Yield right-padded batches of ``size`` rows, from the rows with these numbers."""
        return lambda numbers: [
            pad([self.rows[number] for number in numbers[start : start + size]])
            for start in range(0, len(numbers), size)
        ]


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(row["input_ids"].shape[1] for row in rows)

    def fill(key: str, value: int) -> Tensor:
        return torch.cat([nn.functional.pad(r[key], (0, longest - r[key].shape[1]), value=value) for r in rows])

    mask = torch.cat([(torch.arange(longest) < row["input_ids"].shape[1]).long()[None] for row in rows])
    labels = fill("labels", -100) if rows[0]["labels"].ndim == 2 else torch.cat([row["labels"] for row in rows])
    return {"input_ids": fill("input_ids", 0), "attention_mask": mask, "labels": labels}


def problem(family: str, part: str, task: str) -> Problem:
    """Return a problem with fewer than 400 random parameters, in float64."""
    size = 8 if part == "lora" else 4
    small: dict[str, Any] = {"vocab_size": 9, "max_position_embeddings": 16}
    model: PreTrainedModel
    if family == "llama":
        small |= {"intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = models.tiny_llama(dtype=torch.float64, hidden_size=size, **small)
    elif family == "gpt2":
        small = {"vocab_size": 9, "n_positions": 16, "tie_word_embeddings": False}
        model = models.tiny_gpt2(dtype=torch.float64, n_embd=size, **small)
    else:
        small |= {"num_labels": 1 if task == "regression" else 3, "intermediate_size": 6}
        model = models.tiny_bert(dtype=torch.float64, hidden_size=size, **small)
        if task == "tokens":
            torch.manual_seed(0)
            model = BertForTokenClassification(model.config).double().eval()
    if family in DECODERS and task == "classes":
        torch.manual_seed(0)
        model.config.num_labels = 3
        model = DECODERS[family](model.config).double().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)  # as models.tiny_gpt2
    core, head = model, model.lm_head if task == "lm" else model.score if family in DECODERS else model.classifier
    if part == "lora":
        modules = {"llama": ["q_proj", "k_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}[family]
        last = {"layers_to_transform": [1]} if family != "bert" else {}
        model = models.with_lora(model, target_modules=modules, r=2, task_type=None, **last)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(3, 9, (1, length), generator=generator)
        if task == "lm":
            labels = ids.clone()
            labels[0, 1] = -100  # a term less, which is no padding
        elif task == "tokens":
            labels = torch.randint(3, (1, length), generator=generator)
            labels[0, 1] = -100
        elif task == "classes":
            labels = torch.randint(3, (1,), generator=generator)
        else:
            labels = torch.randn(1, generator=generator, dtype=torch.float64)
        rows.append({"input_ids": ids, "labels": labels})
    subspace = {"lora": "trainable", "head": "last_layer", "block": "last_block"}[part]
    return Problem(model, subspace, task, rows, core.lm_head if task == "lm" else head)


@dataclass
class Row:
    """One row: the logits of its terms, their Jacobian, the labels, and the inputs of its linear modules.

    Attributes:
        logits: [t, C].
        jacobian: [t, C, d].
        labels: [t] or [t, 1].
        inputs: {weight name: [P, in]}; vjp: cotangent [t, C] -> {weight name: [P, out]}.
    """

    logits: Tensor
    jacobian: Tensor
    labels: Tensor
    inputs: dict[str, Tensor]
    vjp: Callable[[Tensor], dict[str, Tensor]]


@contextmanager
def watched(model: nn.Module, layout: Layout) -> Iterator[tuple[list[Tensor], dict[str, tuple[Tensor, Tensor]]]]:
    """Give gradients to the random parameters alone, and keep the input and output of each random linear module.

    Yields:
        The random parameters, and {weight name: (input, output) of the last forward}.
    """
    named = dict(model.named_parameters())
    parameters = [named[name] for name in layout.names]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if name in layout.names and (type(module) is nn.Linear or isinstance(module, Conv1D)):

            def keep(module: nn.Module, args: tuple, output: Tensor, name: str = name) -> None:
                seen[name] = (args[0], output)

            handles.append(module.register_forward_hook(keep))
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is p for p in parameters))
    try:
        yield parameters, seen
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def evaluate_rows(problem: Problem) -> list[Row]:
    """Run every row separately."""
    with watched(problem.model, problem.layout) as (parameters, seen):
        return [_row(problem, row, parameters, seen) for row in problem.rows]


def _row(problem: Problem, row: dict[str, Tensor], parameters: list[Tensor], seen: dict) -> Row:
    seen.clear()
    logits = problem.model(input_ids=row["input_ids"], attention_mask=torch.ones_like(row["input_ids"])).logits
    labels, kept = row["labels"], slice(None)
    if problem.task == "lm":
        labels = labels[0, 1:]
        kept = (labels != -100).nonzero()[:, 0]
        labels, logits = labels[kept], logits[0, :-1][kept]
    if problem.task == "tokens":
        kept = (labels[0] != -100).nonzero()[:, 0]
        labels, logits = labels[0][kept], logits[0][kept]
    captured = dict(seen)
    head_path = next(path for path, module in problem.model.named_modules() if module is problem.head) + ".weight"

    def gradients(cotangent: Tensor, targets: list[Tensor]) -> list[Tensor]:
        grads = torch.autograd.grad(logits, targets, cotangent, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, targets, strict=True)]

    def at_terms(name: str, value: Tensor) -> Tensor:
        value = value.reshape(-1, value.shape[-1])
        if name != head_path:
            return value
        # of a decoder's classifier the last token's, which alone is read
        return value[:-1][kept] if problem.task == "lm" else value[kept] if problem.task == "tokens" else value[-1:]

    def vjp(cotangent: Tensor) -> dict[str, Tensor]:
        grads = gradients(cotangent, [y for _, y in captured.values()])
        return {name: at_terms(name, g) for name, g in zip(captured, grads, strict=True)}

    unit = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
    rows = [torch.cat([g.flatten() for g in gradients(u, parameters)]) for u in unit]
    jacobian = torch.stack(rows).view(*logits.shape, -1).detach()
    inputs = {name: at_terms(name, x).detach() for name, (x, _) in captured.items()}
    return Row(logits.detach(), jacobian, labels.view(-1, 1) if problem.task == "regression" else labels, inputs, vjp)


def score(problem: Problem, logits: Tensor, labels: Tensor) -> Tensor:
    if problem.task == "regression":
        return (labels - logits) / NOISE**2
    return torch.eye(logits.shape[-1], dtype=logits.dtype)[labels] - logits.softmax(-1)


def fisher(problem: Problem, logits: Tensor) -> Tensor:
    """Return the Fisher information [C, C] of one term."""
    if problem.task == "regression":
        return torch.eye(len(logits), dtype=logits.dtype) / NOISE**2
    p = logits.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)


def log_lik(problem: Problem, rows: list[Row]) -> float:
    if problem.task == "regression":
        value = torch.cat([((row.labels - row.logits) / NOISE).square() for row in rows])
        return float((-0.5 * value - math.log(NOISE) - 0.5 * math.log(2 * math.pi)).sum())
    return float(sum(row.logits.log_softmax(-1).gather(1, row.labels[:, None]).sum() for row in rows))


def cotangents(
    problem: Problem, rows: list[Row], estimator: str, samples: int | None, uniforms: list
) -> list[list[Tensor]]:
    """Return the cotangents [t, C] of each row, one for every VJP."""
    found = []
    for number, row in enumerate(rows):
        t, c = row.logits.shape
        own = [u[number] for u in uniforms]
        if estimator == "ef_sequence":
            found.append([score(problem, row.logits, row.labels)])
        elif estimator == "ef_token" and samples is None:
            whole = score(problem, row.logits, row.labels)
            found.append([whole * (torch.arange(t) == k)[:, None] for k in range(t)])
        elif estimator == "ef_token":
            whole = score(problem, row.logits, row.labels)
            signs = [1 - 2.0 * (u.reshape(t, -1)[:, :1] < 0.5).double() for u in own]
            found.append([whole * s / samples**0.5 for s in signs])
        elif samples is not None:
            found.append([score(problem, row.logits, drawn(problem, row.logits, u)) / samples**0.5 for u in own])
        else:
            cotangents = []
            for k in range(t):
                values, vectors = torch.linalg.eigh(fisher(problem, row.logits[k]))
                for value, vector in zip(values.clamp_min(0), vectors.T, strict=True):
                    cotangents.append(torch.zeros(t, c, dtype=torch.float64))
                    cotangents[-1][k] = value.sqrt() * vector
            found.append(cotangents)
    return found


def drawn(problem: Problem, logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return the model's labels, where its distribution function crosses the uniforms."""
    if problem.task == "regression":
        return logits + NOISE * torch.distributions.Normal(0.0, 1.0).icdf(uniforms.view(-1, 1))
    steps = logits.softmax(-1).cumsum(-1)
    return torch.stack([(row <= u).sum() for row, u in zip(steps, uniforms, strict=True)])


def uniform_streams(rows: list[Row], make: Callable[[int, int], torch.Generator], samples: int) -> list:
    """Return the uniforms of each sample, for every row."""
    return [
        [
            torch.rand(tuple(row.labels.shape), generator=make(sample, number), dtype=torch.float64)
            for number, row in enumerate(rows)
        ]
        for sample in range(samples)
    ]


def outer(rows: list[Row], cotangents: list[list[Tensor]]) -> Tensor:
    """Return the sum [d, d] over rows and cotangents of (J' c)(J' c)'."""
    g = torch.stack(
        [torch.einsum("tcd,tc->d", row.jacobian, c) for row, own in zip(rows, cotangents, strict=True) for c in own]
    )
    return g.T @ g


def factors(
    problem: Problem, name: str, rows: list[Row], cotangents: list[list[Tensor]], sharing: str
) -> tuple[tuple[Tensor, Tensor], tuple[float, float]]:
    """Return the two factors of a matrix, and their traces without cancellation in sums over positions."""
    gs = [row.vjp(c)[name] for row, own in zip(rows, cotangents, strict=True) for c in own]
    xs = [row.inputs[name] for row in rows]
    sizes = tuple(float(sum(part.abs().sum(0).square().sum() for part in parts)) for parts in (gs, xs))
    if sharing == "reduce":
        gs, xs = [g.sum(0, keepdim=True) for g in gs], [x.mean(0, keepdim=True) for x in xs]
    g, x = torch.cat(gs), torch.cat(xs)
    pair = (g.T @ g, x.T @ x / len(x))
    conv1d = any(isinstance(m, Conv1D) and f"{p}.weight" == name for p, m in problem.model.named_modules())
    return (pair[::-1], sizes[::-1]) if conv1d else (pair, sizes)  # type: ignore[return-value]


def kfac(problem: Problem, rows: list[Row], cotangents: list[list[Tensor]], sharing: str) -> Tensor:
    """Return K-FAC [d, d]: Kronecker blocks for matrices, a diagonal for other tensors."""
    diagonal = outer(rows, cotangents).diagonal()
    blocks, start = [], 0
    for name, shape in problem.layout.named_shapes.items():
        size = math.prod(shape)
        if name not in rows[0].inputs:
            blocks.append(torch.diag(diagonal[start : start + size]))
        else:
            blocks.append(torch.kron(*factors(problem, name, rows, cotangents, sharing)[0]))
        start += size
    return torch.block_diag(*blocks)
