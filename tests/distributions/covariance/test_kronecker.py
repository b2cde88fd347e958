from __future__ import annotations

import pytest
import torch

from hf_bayes.distributions.covariance import COVARIANCES
from tests.distributions.covariance.structures import LAYOUT, make


def test_an_eigenbasis_of_a_vector_is_refused() -> None:
    tensors = make("kronecker")[0].tensors(LAYOUT)
    tensors["variances.b"] = tensors.pop("stds.b")
    with pytest.raises(ValueError, match=r"variances\.b: b is no matrix \[4\].* expected stds\.b"):
        COVARIANCES["kronecker"].from_tensors(tensors | {"left.b": torch.eye(4), "right.b": torch.eye(4)}, LAYOUT)
