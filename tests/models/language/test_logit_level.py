from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.language.logit_level import AtLevelOfLogits, at_level_of_logits
from hf_bayes.models.language.token_uncertainty import GenerationTrace
from hf_bayes.uncertainty.decomposition import predict
from tests.members.ranks import Ranks
from tests.members.reference import showing
from tests.models.written import attached, generate, prepared
from tests.tiny_models import batch

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 5},
    {"repetition_penalty": 1.3, "do_sample": True},
]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_penalty_acts_on_one_member_as_on_its_model(options: dict[str, Any], num_beams: int) -> None:
    model, layout, theta = prepared("gpt2-last-block")
    theta = theta[:1]
    inputs = batch(padding="left")
    options = {**options, "num_beams": num_beams, "output_scores": True}
    with attached("gpt2-last-block", model, theta) as bayesian:
        torch.manual_seed(0)
        found = generate(bayesian, inputs, **options)
    with showing(model, layout, theta[0]):
        torch.manual_seed(0)
        expected = generate(model, inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        # generate works in float32, where logits of this size have an error of 1e-6
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", PENALTIES[:2], ids=str)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_penalty_acts_alike_with_members_on_two_processes(
    options: dict[str, Any], num_beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, theta = prepared("gpt2-last-block", num_members=4)
    inputs, options = batch(padding="left"), {**options, "num_beams": num_beams, "output_scores": True}
    with attached("gpt2-last-block", model, theta) as bayesian:
        expected = generate(bayesian, inputs, **options)
    parts = [attached("gpt2-last-block", prepared("gpt2-last-block")[0], part) for part in theta.chunk(2)]

    def write(members: LocalMembers, rank: int) -> Any:
        parts[rank].current_members.own_group = members
        return generate(parts[rank], inputs, **options)

    for found in Ranks(monkeypatch).run(write):
        assert torch.equal(found.sequences, expected.sequences)
        for one, other in zip(found.scores, expected.scores, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # float32, as above


def trace_of(*logits: Tensor) -> GenerationTrace:
    trace = GenerationTrace(LocalMembers())
    for chunk in logits:
        trace.observe(predict(chunk), chunk)
    return trace


def test_the_level_is_the_mean_of_the_members() -> None:
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = predict(logits / 0.5).log_probs
    trace = trace_of(logits[:, :3], logits[:, 3:])  # rows arrive in chunks
    expected = scores + (logits / 0.5).logsumexp(-1).mean(0)[:, None]
    found = AtLevelOfLogits(trace, 0.5)(torch.zeros(4, 1), scores)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - scores).abs().min() > 0.1


def test_only_what_multiplies_scores_needs_their_level() -> None:
    trace = trace_of()
    plain = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    assert at_level_of_logits(plain, trace, 1.0) is plain
    both = at_level_of_logits(LogitsProcessorList([*plain, RepetitionPenaltyLogitsProcessor(1.3)]), trace, 1.0)
    assert [type(processor).__name__ for processor in both] == [
        "AtLevelOfLogits", "TemperatureLogitsWarper", "RepetitionPenaltyLogitsProcessor"
    ]  # fmt: skip
