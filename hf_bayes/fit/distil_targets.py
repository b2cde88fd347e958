"""The training data of a student: hidden states of one network, and the teacher's predictions at the same terms.

A term is a row of a classifier, a token of a tagger, or a position of a text. The teacher is the posterior's own
prediction. Of its probabilities the ``MAX_CLASSES`` largest of each term are kept, so that memory does not grow with
the vocabulary; the rest counts as one more class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.inputs import without_labels
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.prediction.output_layer import OutputLayer, find_output_layer
from hf_bayes.models.predictors import Predictive

MAX_CLASSES = 256
MAX_TERMS = 1 << 15
"""The largest number of terms that are kept, evenly drawn from the positions of each text."""


class Targets(NamedTuple):
    """n terms.

    Attributes:
        hidden: [n, h] of the network.
        classes: [n, k] the most probable classes of the teacher.
        log_probs: [n, k] their log-probabilities.
        aleatoric, epistemic: [n] nats, of the teacher.
        row: [n] the number of the row that a term belongs to.
    """

    hidden: Tensor
    classes: Tensor
    log_probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    row: Tensor

    def at(self, index: Tensor) -> Targets:
        """Return the terms at ``index``, numbers [m] or a mask [n]."""
        return Targets(*(value[index] for value in self))

    def to(self, device: Any) -> Targets:
        """Return the terms on a device."""
        return Targets(*(value.to(device) for value in self))


class Reader(Protocol):
    """The way to read hidden states and predictions of a task.

    Attributes:
        output: the name of the output layer; empty for language models, whose head is known.
    """

    output: str

    def read(self, inputs: dict[str, Any], networks: Sequence[Tensor]) -> list[Targets]:
        """Return the terms of a batch without labels, with the hidden states of each network [1, d]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, C] of hidden states [n, h]; a network must be bound."""
        ...


class InputReader:
    """Read the rows, or the tokens, of a classifier."""

    def __init__(self, model: BayesianModel, inputs: dict[str, Any], network: Tensor) -> None:
        self.model = model
        with model.members.bind(network):
            self.output = find_output_layer(model, inputs)
        self.layer = OutputLayer(model, self.output)

    def read(self, inputs: dict[str, Any], networks: Sequence[Tensor]) -> list[Targets]:
        model: Any = self.model
        found = model.predictor.predict(model, inputs)
        wanted = torch.ones(found.logits.shape[:-1], dtype=torch.bool, device=found.logits.device)
        if wanted.ndim == 2 and inputs.get("attention_mask") is not None:
            wanted &= inputs["attention_mask"].bool()
        row = wanted.nonzero()[:, 0]
        kept = _kept(found, row, wanted)
        terms = []
        for network in networks:
            with model.members.bind(network):
                terms.append(kept._replace(hidden=self.layer.hidden(model, inputs)[wanted]))
        return terms

    def logits(self, hidden: Tensor) -> Tensor:
        return self.layer.logits(self.model, hidden)


class TokenReader:
    """Read positions of texts.

    Args:
        per_row: the largest number of positions of a text.
        seed: the seed of the choice of these positions.
    """

    output = ""

    def __init__(self, model: BayesianModel, per_row: int, *, seed: int) -> None:
        self.model, self.per_row = model, per_row
        self.generator = torch.Generator().manual_seed(seed)
        self.kind: Any = None

    def read(self, inputs: dict[str, Any], networks: Sequence[Tensor]) -> list[Targets]:
        model: Any = self.model
        inputs = model.numbered({**inputs, "use_cache": False})
        length = inputs["input_ids"].shape[1]
        positions = self._drawn(inputs)
        with model.predictor.open(model):
            states = model.causal.hidden(model, inputs)
            pieces = [_kept(p, index // length) for index, p in model.predictor.predict(model, states, positions)]
        kept = joined(pieces)
        terms = []
        for network in networks:
            with model.members.bind(network):
                hidden, output = model.head.hidden(inputs)
            self.kind = type(output)()
            terms.append(kept._replace(hidden=hidden.flatten(0, 1)[positions]))
        return terms

    def logits(self, hidden: Tensor) -> Tensor:
        model: Any = self.model
        found: Tensor = model.head.logits(hidden[None], self.kind)[0]
        return found

    def _drawn(self, inputs: dict[str, Any]) -> Tensor:
        """Return flat positions of tokens that are not padding, at most ``per_row`` of each text."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        order = torch.rand(ids.shape, generator=self.generator).to(ids.device)
        if mask is not None:
            order = order.masked_fill(mask == 0, 2.0)
        last = order.sort(1).values[:, min(self.per_row, ids.shape[1]) - 1, None].clamp_max(1.0)
        return (order <= last).flatten().nonzero()[:, 0]


def collect(reader: Reader, batches: Iterable[dict[str, Any]], networks: Sequence[Tensor]) -> list[Targets]:
    """Return all terms of batches, once with the hidden states of each network."""
    found: list[list[Targets]] = [[] for _ in networks]
    first_row = 0
    for batch in batches:
        inputs = without_labels(batch)
        terms = reader.read(inputs, networks)
        for pieces, piece in zip(found, terms, strict=True):
            pieces.append(piece._replace(row=piece.row + first_row).to("cpu"))
        first_row += len(next(iter(tensors_in(inputs).values())))
    return [joined(pieces) for pieces in found]


def joined(pieces: Sequence[Targets]) -> Targets:
    """Return the terms of all pieces."""
    return Targets(*(torch.cat(values) for values in zip(*pieces, strict=True)))


def _kept(found: Predictive, row: Tensor, wanted: Tensor | None = None) -> Targets:
    """Return the terms of a prediction, without hidden states.

    Raises:
        ValueError: if the prediction has no epistemic uncertainty.
    """
    if "epistemic" not in found.parts:
        raise ValueError(
            "a student learns the total, aleatoric and epistemic uncertainty of classes, and this prediction has "
            f"{', '.join(found.parts) or 'none'}: distil a classifier of one class for each label or a language model, "
            "by 'members', 'linearised' or 'linearised_bridge'"
        )
    choose: Callable[[Tensor], Tensor] = (lambda value: value) if wanted is None else (lambda value: value[wanted])
    log_probs, classes = choose(found.logits).float().topk(min(MAX_CLASSES, found.logits.shape[-1]), -1)
    parts = {name: choose(found.parts[name]).float() for name in ("aleatoric", "epistemic")}
    return Targets(hidden=log_probs[:, :0], classes=classes, log_probs=log_probs, row=row, **parts)
