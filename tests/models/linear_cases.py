"""Classifiers in float64 for linearised predictions, and a random covariance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import BertForTokenClassification

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import (
    Covariance,
    Diagonal,
    DiagonalBlock,
    Full,
    Kronecker,
    KroneckerBlock,
    LowRank,
)
from tests.tiny_models import tiny_bert, with_lora


def lora_bert() -> nn.Module:
    return with_lora(tiny_bert(dtype=torch.float64, hidden_size=4, intermediate_size=6))


def last_layer_bert() -> nn.Module:
    return tiny_bert(dtype=torch.float64, hidden_size=4, intermediate_size=6)


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return BertForTokenClassification(last_layer_bert().config).double().eval()


def random_covariance(kind: str, layout: Layout, seed: int = 0) -> Covariance:
    """Return a covariance of a structure, in which no two numbers are equal and none is zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "diagonal":
        return Diagonal(normal(layout.dim).exp())
    if kind == "low_rank":
        return LowRank(normal(layout.dim).exp(), torch.linalg.qr(normal(layout.dim, 3))[0], normal(3).exp())
    if kind == "full":
        root = normal(layout.dim, layout.dim)
        return Full(torch.linalg.cholesky(root @ root.mT + torch.eye(layout.dim)))
    blocks: list[KroneckerBlock | DiagonalBlock] = []
    for shape in layout.shapes:
        if len(shape) == 1 and len(blocks) % 2:  # as LaplaceConfig(bias="factor") makes
            dense = torch.linalg.qr(normal(*shape, *shape))[0]
            blocks.append(KroneckerBlock(dense, None, normal(*shape, 1).exp()))
            continue
        if len(shape) != 2:
            blocks.append(DiagonalBlock(normal(math.prod(shape)).exp()))
            continue
        left, right = (torch.linalg.qr(normal(side, side))[0] for side in shape)
        blocks.append(KroneckerBlock(left, None if len(blocks) == 2 else right, normal(*shape).exp()))
    return Kronecker(tuple(blocks))
