"""Tiny reward models and policies on pairs of texts, with brute-force curvatures: one unpadded text at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes import BradleyTerry, DirectPreferences
from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.models.preferences import BayesianModelForPreferences
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import DECODERS, Row
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, with_lora

BETA = 0.7
LENGTHS = ((5, 3), (4, 6), (3, 4), (6, 6))
"""The numbers of tokens of the two texts of each pair."""
PROMPT = 2
"""The number of tokens before an answer."""


@dataclass
class PairProblem:
    """A model, its random parameters, and pairs; the fields ``model``, ``layout`` and ``task`` are for ``brute_force``.

    Attributes:
        kind: "rewards" or "dpo".
        texts: the unpadded ids [1, t] of both texts of each pair.
        labels: [N] the preferred text of each pair.
        head: the module that makes the outputs.
    """

    model: nn.Module
    subspace: str
    kind: str
    texts: list[tuple[Tensor, Tensor]]
    labels: Tensor
    head: nn.Module
    task: str = "classes"

    @property
    def layout(self) -> Layout:
        return select(self.model, self.subspace)

    def reference(self) -> Tensor:
        """Return the weights of the reference model [d], which are not those of the model."""
        start = initial(self.model, self.layout)
        return start + 0.1 * torch.randn(len(start), generator=generator(5, "reference"), dtype=start.dtype)

    def batches(self, size: int) -> Callable[[Sequence[int]], Iterator[dict[str, Tensor]]]:
        """Yield right-padded batches of ``size`` pairs, from the pairs with these numbers."""

        def of_rows(numbers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
            for start in range(0, len(numbers), size):
                yield self.collate(list(numbers[start : start + size]))

        return of_rows

    def collate(self, numbers: list[int]) -> dict[str, Tensor]:
        longest = max(text.shape[1] for number in numbers for text in self.texts[number])
        ids = torch.stack([
            torch.cat([nn.functional.pad(text, (0, longest - text.shape[1])) for text in self.texts[number]])
            for number in numbers
        ])  # fmt: skip
        lengths = torch.tensor([[text.shape[1] for text in self.texts[number]] for number in numbers])
        mask = (torch.arange(longest) < lengths[..., None]).long()
        found = {"input_ids": ids, "attention_mask": mask, "labels": self.labels[numbers]}
        if self.kind == "dpo":
            found["completion_mask"] = mask * (torch.arange(longest) >= PROMPT)
        return found


def pair_problem(family: str, part: str, kind: str) -> PairProblem:
    """Return a problem with at most a few hundred random parameters, in float64."""
    size = 8 if part == "lora" else 4
    small: dict[str, Any] = {"vocab_size": 9, "max_position_embeddings": 16}
    model: Any
    if family == "llama":
        small |= {"intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = tiny_llama(dtype=torch.float64, hidden_size=size, **small)
    elif family == "gpt2":
        small = {"vocab_size": 9, "n_positions": 16, "tie_word_embeddings": False}
        model = tiny_gpt2(dtype=torch.float64, n_embd=size, **small)
    else:
        model = tiny_bert(dtype=torch.float64, hidden_size=size, num_labels=1, intermediate_size=6, **small)
    if family in DECODERS and kind == "rewards":
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = DECODERS[family](model.config).double().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    head = model.lm_head if kind == "dpo" else model.score if family in DECODERS else model.classifier
    if part == "lora":
        modules = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}[family]
        last = {"layers_to_transform": [1]} if family != "bert" else {}
        model = with_lora(model, target_modules=modules, r=2, task_type=None, **last)
    random = torch.Generator().manual_seed(1)
    texts = [
        (torch.randint(3, 9, (1, first), generator=random), torch.randint(3, 9, (1, second), generator=random))
        for first, second in LENGTHS
    ]
    subspaces = {"lora": "trainable", "head": "last_layer", "block": "last_block", "embeddings": "wte|wpe|ln_f"}
    return PairProblem(model, subspaces[part], kind, texts, torch.tensor([0, 1, 0, 0]), head)


def attached(made: PairProblem) -> Any:
    """Return the Bayesian model of a problem."""
    if made.kind == "rewards":
        return attach(made.model, subspace=made.subspace, likelihood=BradleyTerry())
    reference = made.reference()  # attached parameters do not count as trainable
    found = attach(made.model, subspace=made.subspace, likelihood=DirectPreferences(beta=BETA))
    assert isinstance(found, BayesianModelForPreferences)
    found.reference = reference
    return found


def run(made: PairProblem, *, batch: int = 4, **changes: Any) -> CurvaturePassResult:
    options = {k: changes.pop(k) for k in ("scale", "gradient", "seed") if k in changes}
    with attached(made) as model:
        theta, spec = model.theta[0].detach(), CurvatureSpec(**changes)
        return run_curvature_pass(model, theta, made.batches(batch), len(made.texts), spec, **options)


# -- brute force ------------------------------------------------------------------------------------------------------


def outputs_of(made: PairProblem, theta: Tensor, number: int) -> Tensor:
    """Return the rewards [2] of a pair under weights [d], by ordinary forwards without padding."""
    found = [reward(made, theta, ids) for ids in made.texts[number]]
    if made.kind == "dpo":
        with torch.no_grad():
            reference = [reward(made, made.reference(), ids) for ids in made.texts[number]]
        return BETA * (torch.stack(found) - torch.stack(reference))
    return torch.stack(found)


def reward(made: PairProblem, theta: Tensor, ids: Tensor) -> Tensor:
    """Return the reward of a text, or the log-probability of its answer."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits = torch.func.functional_call(made.model, made.layout.unflatten(theta), (), inputs).logits
    return summed(made, logits, ids)


def summed(made: PairProblem, logits: Tensor, ids: Tensor) -> Tensor:
    if made.kind == "rewards":
        return logits[0, 0]
    return logits[0, PROMPT - 1 : -1].log_softmax(-1).gather(1, ids[0, PROMPT:, None]).sum()


def evaluate_pairs(made: PairProblem) -> list[Row]:
    """Return the outputs [1, 2] of each pair, their Jacobian, and the inputs and VJPs of its linear modules."""
    return [_joined(made, number, evaluate_texts(made, number)) for number in range(len(made.texts))]


def evaluate_texts(made: PairProblem, number: int) -> list[Row]:
    """Return the two texts of a pair: ``vjp`` takes the cotangent of a text's own reward [1, 1]."""
    found = []
    with brute_force.watched(made.model, made.layout) as (parameters, seen):
        outputs = outputs_of(made, initial(made.model, made.layout), number)
        for place, ids in enumerate(made.texts[number]):
            seen.clear()
            logits = made.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            scale = BETA if made.kind == "dpo" else 1.0
            value = scale * summed(made, logits, ids)
            found.append(_text(made, value, parameters, dict(seen), outputs[place], ids))
    return found


def _text(
    made: PairProblem, value: Tensor, parameters: list[Tensor], seen: dict[str, Any], output: Tensor, ids: Tensor
) -> Row:
    head_path = next(path for path, module in made.model.named_modules() if module is made.head) + ".weight"

    def gradients(targets: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(value, targets, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(found, targets, strict=True)]

    def at_terms(name: str, x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        if name != head_path:
            return x
        return x[PROMPT - 1 : -1] if made.kind == "dpo" else x[-1:]

    grads = {name: at_terms(name, gradients([y])[0]) for name, (_, y) in seen.items()}
    jacobian = torch.cat([g.flatten() for g in gradients(parameters)]).view(1, 1, -1)
    inputs = {name: at_terms(name, x).detach() for name, (x, _) in seen.items()}

    def vjp(cotangent: Tensor) -> dict[str, Tensor]:
        return {name: cotangent.sum() * g for name, g in grads.items()}

    return Row(output.detach().view(1, 1), jacobian, ids, inputs, vjp)


def _joined(made: PairProblem, number: int, texts: list[Row]) -> Row:
    first, second = texts

    def vjp(cotangent: Tensor) -> dict[str, Tensor]:
        parts = [text.vjp(cotangent[:, place]) for place, text in enumerate(texts)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return Row(
        torch.cat([first.logits, second.logits], 1),
        torch.cat([first.jacobian, second.jacobian], 1),
        made.labels[number][None],
        {name: torch.cat([first.inputs[name], second.inputs[name]]) for name in first.inputs},
        vjp,
    )


def cotangents(made: PairProblem, rows: list[Row], estimator: str, samples: int | None) -> list[list[Tensor]]:
    streams = brute_force.uniform_streams(rows, lambda s, row: generator(0, "labels", s, row), samples or 0)
    return brute_force.cotangents(made, rows, estimator, samples, streams)  # type: ignore[arg-type]


def kfac(made: PairProblem, rows: list[Row], own: list[list[Tensor]], sharing: str) -> Tensor:
    """Return K-FAC [d, d]. With "reduce" the texts of a pair are reduced one by one."""
    if sharing == "expand":
        return brute_force.kfac(made, rows, own, sharing)  # type: ignore[arg-type]
    texts, cotangents_of_texts = [], []
    for number, cs in enumerate(own):
        for place, text in enumerate(evaluate_texts(made, number)):
            texts.append(text)
            cotangents_of_texts.append([c[:, place] for c in cs])
    diagonal, blocks, start = brute_force.outer(rows, own).diagonal(), [], 0
    for name, shape in made.layout.named_shapes.items():
        size = math.prod(shape)
        if name in rows[0].inputs:
            both, _ = brute_force.factors(made, name, texts, cotangents_of_texts, sharing)  # type: ignore[arg-type]
            blocks.append(torch.kron(*both))
        else:
            blocks.append(torch.diag(diagonal[start : start + size]))
        start += size
    return torch.block_diag(*blocks)


def log_lik(rows: list[Row]) -> float:
    return float(sum(row.logits.log_softmax(-1)[0, int(row.labels)] for row in rows))
