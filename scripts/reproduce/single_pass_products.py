"""The matrix products of a single pass by ``"backward"``, and the least number that its backward passes take.

This module is not a command: ``single_pass_accuracy`` imports it. The counts depend on no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_bayes.core.layout import Layout, select
from hf_bayes.distributions.covariance import Diagonal, DiagonalBlock, Kronecker, KroneckerBlock
from scripts.reproduce.report import table
from scripts.reproduce.small_models import attached

WIDTH, BLOCKS = 384, 6
ROWS, LENGTH = 8, 32
RANDOM = {"last two": 2, "all": BLOCKS}
"""The blocks with a random LoRA -> their number."""

RANKS = 1, 2


def diagonal(layout: Layout) -> Diagonal:
    """Return independent weights of one variance."""
    return Diagonal(torch.full((layout.dim,), 1e-2))


def kronecker(layout: Layout) -> Kronecker:
    """Return the covariance of K-FAC with random eigenvectors, which rotate the gradients of each matrix."""
    generator = torch.Generator().manual_seed(0)
    blocks: list[KroneckerBlock | DiagonalBlock] = []
    for shape in layout.shapes:
        if len(shape) != 2:
            blocks.append(DiagonalBlock(torch.full(shape, 1e-2)))
            continue
        left, right = (torch.linalg.qr(torch.randn(side, side, generator=generator))[0] for side in shape)
        blocks.append(KroneckerBlock(left, right, torch.full(shape, 1e-4)))
    return Kronecker(tuple(blocks))


COVARIANCES: dict[str, Callable[[Layout], Any]] = {"diagonal": diagonal, "K-FAC": kronecker}


@torch.no_grad()
def products(
    classifier: Callable[[int, int, str], tuple[Any, Any]], words: Callable[[int, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the products of a pass over those of a plain forward, by blocks, covariance and number of directions.

    Args:
        classifier: (width, number of blocks, random blocks) -> the plain model, and the model with a random LoRA.
        words: (rows, length) -> a batch.
    """
    inputs, found = words(ROWS, LENGTH), []
    for random, number in RANDOM.items():
        for kind, make in COVARIANCES.items():
            plain, model = classifier(WIDTH, BLOCKS, random)
            unit = counted(plain, inputs)
            row: dict[str, Any] = {"random": random, "covariance": kind}
            with attached(model, "trainable", covariance=make(select(model, "trainable"))) as bayesian:
                for rank in RANKS:
                    bayesian.single_pass(structure="backward", rank=rank)
                    bayesian(**inputs)  # the first call of a setting checks rules
                    row[f"counted, {rank}"] = round(counted(bayesian, inputs) / unit, 3)
                    row[f"bound, {rank}"] = round(1 + rank * backward_share(number), 3)
            found.append(row)
    return found


def counted(model: Callable[..., Any], inputs: Mapping[str, Any]) -> int:
    """Return the floating-point operations of the matrix products of linear layers and of the covariance in a call."""
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


def backward_share(random_blocks: int) -> float:
    """Return the least share of a plain forward's products that the backward pass of one direction takes.

    In units of (width)^2 per position, a block of BERT has 12 products: queries, keys, values, the output of attention,
    and 8 of the feed-forward layers. The head reads the first position. So the gradient of the last block passes keys
    and values at all positions, and the 10 other products at one. The first random block has its gradient at queries
    and values, and the gradient passes no further than 9 of its products.
    """
    last, first = 2 + 10 / LENGTH, 9
    return (last + 12 * (random_blocks - 2) + first) / (12 * BLOCKS)


def products_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page."""
    heads = [f"{what}, {rank}" for rank in RANKS for what in ("bound", "counted")]
    return table(
        ["random blocks", "covariance", *heads],
        [[row["random"], row["covariance"], *(f"{row[head]:.2f}" for head in heads)] for row in rows],
    )
