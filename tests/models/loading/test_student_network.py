"""The network that a distilled student reads."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.models.loading.student_network import network_of, student_network
from tests.fit.distilled import distilled, ensemble


def test_a_student_reads_one_network_of_its_posterior() -> None:
    posterior = distilled("classes")
    rows = posterior.approximation.rows
    assert torch.equal(network_of(posterior, "mean"), rows.mean(0, keepdim=True))
    assert torch.equal(network_of(posterior, "representative"), rows[:1])
    assert torch.equal(student_network(posterior), network_of(posterior, posterior.config.student["network"]))


def test_a_student_network_needs_a_student_and_no_members() -> None:
    with pytest.raises(ValueError, match="has no distilled student"):
        student_network(ensemble("classes"))
    with pytest.raises(ValueError, match="members=2 with prediction='distilled'"):
        student_network(distilled("classes"), 2)
