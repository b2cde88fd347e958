"""The student in a posterior's directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bayes import Posterior
from hf_bayes.posteriors.student import STUDENT, check_description, check_student, student_shapes
from hf_bayes.uncertainty.student_head import StudentHead
from tests.fit.distilled import distilled

DESCRIPTION = {
    "posterior": "abc", "network": "mean", "output": "classifier", "hidden_size": 4, "width": 3,
    "prediction": "members", "num_members": 8, "num_terms": 100, "report": {"kl": 0.1},
}  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    return dict(StudentHead(4, 3).state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {"network": "first"}, {"hidden_size": 0}, {"width": 2.0}, {"prediction": "distilled"}, {"report": {"kl": "a"}},
        {"num_members": -1}, {"output": "a\nb"}, {"posterior": None}, {"report": {"kl": float("nan")}},
        {"network": ["mean"]}, {"width": 1 << 40},
    ],
)  # fmt: skip
def test_a_wrong_description_is_refused(changes: dict) -> None:
    check_description(DESCRIPTION)
    (name,) = changes
    with pytest.raises(ValueError, match=f"student.{name} is not valid"):
        check_description(DESCRIPTION | changes)


def test_unknown_and_missing_keys_are_refused() -> None:
    for wrong in (DESCRIPTION | {"more": 1}, {"width": 3}):
        with pytest.raises(ValueError, match="student must have the keys"):
            check_description(wrong)


def test_a_student_belongs_to_its_posterior() -> None:
    check_student(tensors(), DESCRIPTION, "abc")
    with pytest.raises(ValueError, match="distilled from other members"):
        check_student(tensors(), DESCRIPTION, "abd")


def test_tensors_and_description_belong_together() -> None:
    assert student_shapes(DESCRIPTION) == {name: tuple(value.shape) for name, value in tensors().items()}
    with pytest.raises(ValueError, match="a student, and there are no tensors of it"):
        check_student(None, DESCRIPTION, "abc")
    with pytest.raises(ValueError, match="no student, and there are tensors of one"):
        check_student(tensors(), {}, "abc")
    with pytest.raises(ValueError, match="distil the posterior again"):
        check_student(tensors() | {"more": torch.zeros(1)}, DESCRIPTION, "abc")


def test_a_saved_student_comes_back_bit_for_bit(tmp_path: Path) -> None:
    distilled("classes").save_pretrained(tmp_path)
    found = Posterior.from_pretrained(tmp_path)
    assert found.config.student == distilled("classes").config.student
    assert all(torch.equal(value, distilled("classes").student[name]) for name, value in found.student.items())
    assert STUDENT in (tmp_path / "manifest.json").read_text()


def test_a_flipped_bit_of_a_student_is_refused(tmp_path: Path) -> None:
    distilled("classes").save_pretrained(tmp_path)
    data = bytearray((tmp_path / STUDENT).read_bytes())
    data[-1] ^= 1
    (tmp_path / STUDENT).write_bytes(data)
    with pytest.raises(ValueError, match=STUDENT):
        Posterior.from_pretrained(tmp_path)
