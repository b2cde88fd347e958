"""``distil``: a posterior -> the same posterior with a student, which predicts in one forward pass.

The student is a small head on the last hidden state of one network of the posterior (``uncertainty.student_head``). It
is trained on the posterior's own predictions for unlabelled rows: their probabilities, and their aleatoric and
epistemic uncertainties. docs/distilled.md has measurements.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_bayes.core.rng import require_seed
from hf_bayes.fit.distil_report import predictions_of, report_of
from hf_bayes.fit.distil_targets import MAX_TERMS, InputReader, Reader, Targets, TokenReader, collect
from hf_bayes.fit.distil_training import kl, train
from hf_bayes.fit.finished_models import batches_by_number, check_rows_and_batch_size, require_rows_by_number
from hf_bayes.members.inputs import without_labels
from hf_bayes.models.attaching import MODELS
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.posterior import read
from hf_bayes.models.loading.student_network import network_of
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.prediction_fits import without_fits
from hf_bayes.posteriors.student import DISTILLED, NETWORKS
from hf_bayes.posteriors.tasks import TASKS, Task
from hf_bayes.uncertainty.student_head import StudentHead

HELDOUT_SHARE = 0.1
MIN_ROWS, MIN_TERMS = 10, 200
"""The smallest numbers of rows and of terms. A term is a row, or a token of taggers and language models."""

MAX_WIDTH = 256


def distil(
    posterior: Posterior | str | os.PathLike[str],
    rows: Any,
    *,
    collate: Callable[..., Any] | None = None,
    batch_size: int = 8,
    base_model: Any = None,
    prediction: str | None = None,
    members: int | None = None,
    other: Any = None,
    device: str | torch.device | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Posterior:
    """Return the posterior with a distilled student; ``from_pretrained(..., prediction="distilled")`` predicts by it.

    Args:
        posterior: a posterior, its directory or its repository on the Hub.
        rows: rows as of training; labels are not used. More rows, and rows from more places, make a better student. A
            tenth of them is held out for the report, which stands in the ``student`` entry of the posterior's config.
        collate: rows -> a batch of tensors; None is transformers' default collator.
        batch_size: rows of a forward pass; the result depends on it by rounding only.
        base_model, prediction, members: as in ``from_pretrained``, for the prediction that the student learns.
        other: rows of another kind, never trained on, for the AUROC of the report.
        device: where the model runs; None is where ``from_pretrained`` loads it.
        progress: show a progress bar.
        seed: the seed of the choice of held-out rows, of the tokens of long texts, and of the student's training.
    Raises:
        ValueError: for too few rows, predictions without classes (regressions, several labels), or a posterior whose
            members agree everywhere.
    """
    require_seed(seed)
    check_rows_and_batch_size("distil", "rows", rows, batch_size)
    if other is not None:
        require_rows_by_number("distil", "other", other)
    loaded = without_fits(read(posterior), (DISTILLED,))
    _check_size(len(rows), TASKS[loaded.config.task])
    plain = dataclasses.replace(loaded, student=None, config=dataclasses.replace(loaded.config, student={}))
    kind = MODELS[loaded.config.task]
    with (
        kind.from_pretrained(
            plain, base_model=base_model, prediction=prediction, members=members, calibrated=False
        ) as model,
        torch.no_grad(),
    ):
        if model.likelihood.config is not None:
            raise ValueError(
                f"a student learns the classes of a head, and the likelihood here is {model.likelihood.name}: "
                "predict by the members"
            )
        if device is not None:
            model.to(torch.device(device))  # type: ignore[arg-type]

        def batches(some: Any, title: str | None = None) -> Iterator[dict[str, Any]]:
            return batches_by_number(
                some, range(len(some)), model=model, collate=collate or default_data_collator, batch_size=batch_size,
                progress=title if progress else None,
            )  # fmt: skip

        _check_tokens(batches(rows), TASKS[loaded.config.task])
        description, tensors = _distil(model, plain, rows, other, batches, seed=seed, progress=progress)
    config = dataclasses.replace(loaded.config, student=description)
    return dataclasses.replace(loaded, config=config, student=tensors)


def _distil(
    model: BayesianModel, posterior: Posterior, rows: Any, other: Any, batches: Callable[..., Iterable[Any]], *,
    seed: int, progress: bool,
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """Return the description and the tensors of a student.

    Args:
        batches: (rows, title of a progress bar) -> their batches; without a title no bar is shown.
    """
    networks = [network_of(posterior, name).to(model.theta) for name in NETWORKS]
    names: Sequence[str] = NETWORKS
    if torch.equal(*networks):
        networks, names = networks[:1], names[:1]
    reader = _reader(model, rows, batches, networks[0], seed=seed)
    found = collect(reader, batches(rows, "teacher"), networks)
    _check_disagreement(found[0])
    is_heldout = _heldout(len(rows), seed=seed)[found[0].row]
    untrained = [
        _network_kl(model, reader, network, one.at(is_heldout)) for network, one in zip(networks, found, strict=True)
    ]
    chosen = min(range(len(networks)), key=untrained.__getitem__)
    network, targets = networks[chosen], found[chosen].to(model.device)
    is_heldout = is_heldout.to(model.device)
    heldout = targets.at(is_heldout)
    width = min(MAX_WIDTH, targets.hidden.shape[-1])
    with model.members.bind(network):
        with torch.enable_grad():
            taught = targets.at(~is_heldout)
            head = train(taught, heldout, reader.logits, width=width, seed=seed, progress=progress)
        elsewhere = None
        if other is not None:
            (elsewhere,) = collect(reader, batches(other, "other rows"), [network])
            elsewhere = elsewhere.to(model.device)
        report = report_of(heldout, head, reader.logits, elsewhere) | {"network_kl": untrained[chosen]}
    description = {
        "posterior": posterior.fingerprint,
        "network": names[chosen],
        "output": reader.output,
        "hidden_size": targets.hidden.shape[-1],
        "width": width,
        **model.predicted_by._asdict(),
        "num_terms": int((~is_heldout).sum()),
        "report": report,
    }
    return description, {name: value.cpu().contiguous() for name, value in head.state_dict().items()}


def _reader(
    model: BayesianModel, rows: Any, batches: Callable[..., Iterable[Any]], network: Tensor, *, seed: int
) -> Reader:
    if model.term_kind == "token":
        return TokenReader(model, per_row=max(1, MAX_TERMS // len(rows)), seed=seed)
    return InputReader(model, without_labels(next(iter(batches(rows)))), network)


def _network_kl(model: BayesianModel, reader: Reader, network: Tensor, targets: Targets) -> float:
    """Return the mean KL(mixture || network) in nats."""
    targets = targets.to(model.device)
    untrained = StudentHead(targets.hidden.shape[-1], 1).to(model.device)
    with model.members.bind(network):
        return float(kl(targets, predictions_of(untrained, targets, reader.logits)).mean())


def _heldout(num_rows: int, *, seed: int) -> Tensor:
    """Return [num_rows] bool: True for the rows that are held out, a random tenth."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    return order < max(1, round(HELDOUT_SHARE * num_rows))


def _check_size(num_rows: int, task: Task) -> None:
    if num_rows < (MIN_ROWS if task.unit == "token" else MIN_TERMS):
        raise _too_few(f"{num_rows} rows", task)


def _check_tokens(batches: Iterable[dict[str, Any]], task: Task) -> None:
    """Check that rows have enough tokens, if these are the terms, and read no more rows than that takes."""
    if task.unit != "token":
        return
    count = 0
    for batch in batches:
        mask = batch.get("attention_mask")
        count += batch["input_ids"].numel() if mask is None else int(mask.sum())
        if count >= MIN_TERMS:
            return
    raise _too_few(f"{count} tokens", task)


def _too_few(found: str, task: Task) -> ValueError:
    least = f"{MIN_ROWS} rows with {MIN_TERMS} tokens in all" if task.unit == "token" else f"{MIN_TERMS} rows"
    return ValueError(
        f"a student needs at least {least}, got {found}: labels are not needed, so give more rows of the same kind"
    )


def _check_disagreement(targets: Targets) -> None:
    if not bool((targets.epistemic > 1e-9).any()):
        raise ValueError(
            "the members agree on all rows (epistemic uncertainty 0), so there is nothing to distil: use the model "
            "itself, or a posterior of more than one member"
        )
