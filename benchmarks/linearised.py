"""Evaluation and generation by linear logits of M draws against the same draws as members."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness import Line, Settings, Work, compare, interleave, timed
from benchmarks.models import WHERE, tokens
from hf_bayes import BayesianModelForCausalLM, LaplaceConfig, fit_laplace

ROWS, LENGTH = 2, 128
PROMPT, NEW = 16, 16
HEAD = "the head"
NAMES = {where: f"LoRA on {where}" for where in WHERE[:2]} | {HEAD: "the head alone"}


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    lines = []
    for where, name in NAMES.items():
        model = loaded(settings, where)
        seconds = interleave(both(model, evaluation(settings, model)), settings.rounds)
        lines.append(line(settings, f"linearised evaluation {ROWS} x {LENGTH}, {name}", seconds))
        if where == HEAD:  # what generation costs without a cache is seen of the others
            continue
        seconds = interleave(both(model, generation(settings, model)), settings.rounds)
        lines.append(line(settings, f"linearised generation, {NEW} new tokens after {PROMPT}, {name}", seconds))
    return lines


def line(settings: Settings, work: str, seconds: dict[str, list[float]]) -> Line:
    """Return a line from the seconds of ``both``."""
    work = f"{work}, M={settings.num_members}"
    return compare("linearised", work, seconds, ours="linearised", single="members", unit="x members")


def loaded(settings: Settings, where: str) -> BayesianModelForCausalLM:
    """M draws of a Laplace posterior around weights as they come."""
    subject = settings.subject
    model, subspace = (subject.plain(), "last_layer") if where == HEAD else (subject.trainable(where), "trainable")
    rows = [{"input_ids": row, "labels": row} for row in tokens(model, ROWS, LENGTH).tolist()]
    method = LaplaceConfig(structure="diagonal", estimator="ef_sequence", prior_std=0.02, check_gradient=False)
    with TemporaryDirectory() as directory:
        fit_laplace(model, rows, method, subspace=subspace).save_pretrained(directory)
        return BayesianModelForCausalLM.from_pretrained(
            directory, base_model=subject.plain(), members=settings.num_members
        )


def both(model: BayesianModelForCausalLM, work: Callable[[], float]) -> dict[str, Work]:
    """``work`` by members and linearised; what it takes to change from one to the other is not timed."""

    def by(link: str | None) -> Work:
        def prepared() -> float:
            model.linearise(link)
            return work()

        return prepared

    return {"members": by(None), "linearised": by("monte_carlo")}


def evaluation(settings: Settings, model: Any) -> Work:
    """Return the evaluation of all tokens of a batch."""
    ids = tokens(model, ROWS, LENGTH)

    @torch.no_grad()
    def work() -> float:
        return timed(lambda: model.evaluate_batch({"input_ids": ids, "labels": ids}), settings.device)

    return work


def generation(settings: Settings, model: Any) -> Work:
    """Greedy, after a prompt: members have a cache, linear logits none."""
    prompt = tokens(model, 1, PROMPT)
    length = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return lambda: timed(lambda: model.generate(prompt, **length), settings.device)
