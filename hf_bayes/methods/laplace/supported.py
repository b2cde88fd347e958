"""The supported combinations of estimator and structure, and the structures of each kind of module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.likelihood_facts import UNKNOWN, LikelihoodFacts
from hf_bayes.core.requirements import EnergyLimits
from hf_bayes.methods.laplace.accumulators import Accumulator, DiagonalSum, FullSum, Layer, LowRankSum
from hf_bayes.methods.laplace.estimators import ESTIMATORS, Estimator, build_estimator
from hf_bayes.methods.laplace.kronecker import KroneckerSum

MAX_FULL = 8192
"""The largest d of a dense [d, d]."""

MAX_HESSIAN = 2048
"""The largest d of a Hessian, which takes d backward passes per batch."""

MAX_VJPS = 1024
"""The largest number of backward passes per batch for the exact GGN."""

CHEAP_VJPS = 16
"""The largest number of backward passes per batch for which a full matrix is exact, whatever ``num_samples`` says. From
one drawn label of each row it would have rank N, and its inverse be too wide: docs/results/golds.md."""

MAX_FACTORS = 2**26
"""The largest number of elements in all Kronecker factors of a chain, 256 MiB, for which K-FAC is the default. A LoRA
factor [8, 4096] has 32,768 elements, and its own Kronecker factors have 16.8 million."""

STRUCTURES = ("diagonal", "kronecker", "kronecker_corrected", "low_rank", "full")

BIASES = ("diagonal", "factor")

ENERGY_STRUCTURES = ("diagonal", "low_rank", "full")
"""The structures of the Hessian of a user's energy; the first is the default."""

_NO_SUM = "K-FAC is made of outer products of inputs and output gradients, a Hessian is no sum of such"
_UNDEFINED = {
    "kronecker": _NO_SUM,
    "kronecker_corrected": _NO_SUM,
    "low_rank": "a low-rank curvature is a sum of squares, and a Hessian has negative eigenvalues",
}
"""The structures that a Hessian does not have, with the reasons."""

_FACTORED = "K-FAC; the diagonal on a side longer than max_factor"
MODULES = {
    "LoRA A and B": dict.fromkeys(STRUCTURES, "yes") | {"kronecker": _FACTORED, "kronecker_corrected": _FACTORED},
    "Linear, Conv1D": dict.fromkeys(STRUCTURES, "yes") | {"kronecker": _FACTORED, "kronecker_corrected": _FACTORED},
    "classifier and LM heads": dict.fromkeys(STRUCTURES, "yes")
    | {"kronecker": _FACTORED, "kronecker_corrected": _FACTORED},
    "Conv1d, Conv2d, batch normalisation": dict.fromkeys(STRUCTURES, "yes")
    | {"kronecker": "diagonal", "kronecker_corrected": "diagonal"},
    "bias, norm, embedding, tied": dict.fromkeys(STRUCTURES, "yes")
    | {"kronecker": "diagonal", "kronecker_corrected": "diagonal"},
}
"""Kind of module -> structure -> the form of its curvature."""


def default_structure(shapes: Sequence[tuple[int, ...]], most: int, max_factor: int | None = None) -> str:
    """Return "kronecker" if there is a matrix and the Kronecker factors are small enough, and else "diagonal".

    Args:
        shapes: the shapes of the random parameters.
        most: the largest number of elements in all factors, counted as if no two modules shared an input.
        max_factor: longest side of a factor that is not diagonal; None means any.
    """
    sides = [side for shape in shapes if len(shape) == 2 for side in shape if max_factor is None or side <= max_factor]
    return "kronecker" if sides and sum(side * side for side in sides) <= most else "diagonal"


def drawn_or_empirical(lacks: frozenset[str]) -> str:
    """Return "ggn", or for a likelihood that draws no labels the empirical Fisher, which needs only ``log_prob``."""
    return "ef_sequence" if "draw" in lacks else "ggn"


@dataclass(frozen=True, kw_only=True)
class CurvatureSpec:
    """A combination of estimator and structure, with their options.

    Attributes:
        estimator: one of ``ESTIMATORS``.
        structure: one of ``STRUCTURES``; None leaves the choice to ``of_model``.
        num_samples: number of draws of labels or signs; None is exact.
        sharing: "expand" or "reduce": how K-FAC treats positions.
        max_factor: longest side of a Kronecker factor that is not diagonal.
        bias: "diagonal", or "factor": the curvature of a bias is the left Kronecker factor of its module.
        rank: rank of the structure "low_rank".
        share: the share of the rows that the pass sees, drawn at random. Below 1 the result is an estimate.
    """

    estimator: str = "ggn"
    structure: str | None = None
    num_samples: int | None = 1
    sharing: str = "expand"
    max_factor: int = 4096
    bias: str = "diagonal"
    rank: int = 32
    share: float = 1.0

    def check(self) -> None:
        """Check that the combination exists.

        Raises:
            ValueError: if it does not; the message lists the choices.
        """
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {self.estimator!r}")
        if self.structure not in (None, *STRUCTURES):
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {self.structure!r}")
        if self.sharing not in ("expand", "reduce"):
            raise ValueError(f"sharing must be 'expand' or 'reduce', got {self.sharing!r}")
        if self.bias not in BIASES:
            raise ValueError(f"bias must be one of {', '.join(BIASES)}, got {self.bias!r}")
        structure = self.structure or ("diagonal" if self.estimator == "hessian" else "kronecker")
        if self.bias == "factor" and not structure.startswith("kronecker"):
            raise ValueError(
                f"bias='factor' is a Kronecker factor, which structure={structure!r} does not have: leave it out, "
                "or use structure='kronecker'"
            )
        if self.estimator == "hessian" and structure in _UNDEFINED:
            raise ValueError(
                f"there is no structure={structure!r} of estimator='hessian': {_UNDEFINED[structure]}. Use "
                "structure 'full' or 'diagonal', or estimator='ggn'"
            )

    def of_model(self, shapes: Sequence[tuple[int, ...]]) -> CurvatureSpec:
        """Return the combination with a structure that suits random parameters of these shapes, if it has none.

        It is the diagonal of a Hessian, which has no factors, and K-FAC with ``bias="factor"``. Otherwise see
        ``default_structure``.
        """
        if self.structure is not None:
            return self
        if self.estimator == "hessian":
            return replace(self, structure="diagonal")
        if self.bias == "factor":
            return replace(self, structure="kronecker")
        return replace(self, structure=default_structure(shapes, MAX_FACTORS, self.max_factor))

    def check_size(self, dim: int, likelihood: LikelihoodFacts = UNKNOWN) -> None:
        """Check that the curvature does not take too much time or memory.

        Args:
            dim: d.
            likelihood: what is known about the likelihood.
        Raises:
            ValueError: if it would; the message names the limit.
        """
        if self.estimator == "hessian" and dim > MAX_HESSIAN:
            raise ValueError(
                f"estimator='hessian' takes a backward pass for each of {dim} elements; the limit is {MAX_HESSIAN}: "
                "use estimator='ggn', or a smaller subspace"
            )
        if self.structure == "full" and dim > MAX_FULL:
            raise ValueError(
                f"structure='full' holds a matrix of {dim} x {dim}; the limit is {MAX_FULL}: choose a smaller "
                "subspace, or structure 'kronecker', 'low_rank' or 'diagonal'"
            )
        vjps = likelihood.exact_vjps
        if self.estimator == "ggn" and self.num_samples is None and vjps is not None and vjps > MAX_VJPS:
            raise ValueError(
                f"the exact GGN needs {likelihood.root_columns} backward passes for each of {likelihood.most_terms} "
                f"terms of a row, {vjps} > {MAX_VJPS}: set num_samples=1, which draws labels from the model"
            )

    def exact_if_cheap(self, likelihood: LikelihoodFacts) -> CurvatureSpec:
        """Return the exact GGN where it takes few more backward passes than a sampled one; else this combination.

        It takes no more for a row with one term of one output: a number, one of two classes, a preference. For a full
        matrix, ``CHEAP_VJPS`` passes are few.
        """
        if self.estimator != "ggn" or self.num_samples is None or "fisher" in likelihood.lacks:
            return self
        most = max(self.num_samples, CHEAP_VJPS) if self.structure == "full" else self.num_samples
        vjps = likelihood.exact_vjps
        return self if vjps is None or vjps > most else replace(self, num_samples=None)

    @property
    def on_energy(self) -> EnergyLimits:
        """The limits on an energy. Its curvature is the Hessian, for estimator "ggn", too."""
        if self.estimator not in ("ggn", "hessian"):
            return EnergyLimits(
                refusal=f"estimator={self.estimator!r} sums over likelihood terms, which an energy does not have. Its "
                "curvature is its Hessian: leave estimator out"
            )
        if self.bias == "factor":
            return EnergyLimits(
                refusal="bias='factor' is a Kronecker factor of a module, which an energy does not have: leave bias out"
            )
        if self.structure not in (None, *ENERGY_STRUCTURES):
            return EnergyLimits(
                refusal=f"structure={self.structure!r} is made of the inputs and outputs of modules, which an energy "
                f"does not have: choose one of {', '.join(ENERGY_STRUCTURES)}"
            )
        if self.structure == "low_rank":
            return EnergyLimits()
        return EnergyLimits(max_hessian=MAX_FULL, remedy="use structure='low_rank', or fewer parameters")

    def check_likelihood(self, lacks: frozenset[str]) -> None:
        """Check that the likelihood has what the estimator needs.

        Args:
            lacks: what it does not have, of "draw" and "fisher".
        Raises:
            ValueError: naming what is missing.
        """
        if self.estimator != "ggn":
            return
        needed = "fisher" if self.num_samples is None else "draw"
        if needed in lacks:
            other = "num_samples=1 draws labels, " if self.num_samples is None and "draw" not in lacks else ""
            raise ValueError(
                f"estimator='ggn' with num_samples={self.num_samples} needs the likelihood's {needed}, which it does "
                f"not define: {other}estimator='ef_sequence' needs only log_prob, or define {needed} "
                "(docs/likelihoods.md)"
            )

    def build_estimator(self) -> Estimator:
        """Return the estimator of this combination."""
        return build_estimator(self.estimator, self.num_samples)

    def accumulator(self, layout: Layout, like: Tensor, layers: Sequence[Layer]) -> tuple[Accumulator, dict[str, str]]:
        """Return the accumulator of the structure, and {parameter: the reason for a diagonal in its place}."""
        assert self.structure is not None  # ``of_model``
        if self.structure.startswith("kronecker"):
            kronecker = KroneckerSum(
                layout, like, layers, sharing=self.sharing, max_factor=self.max_factor, bias=self.bias
            )
            return kronecker, kronecker.fallbacks
        if self.structure == "low_rank":
            return LowRankSum(layout, like, rank=self.rank), {}
        return (FullSum if self.structure == "full" else DiagonalSum)(layout, like), {}


def table() -> str:
    """Return the supported combinations as a markdown table."""
    lines = [f"| estimator | {' | '.join(STRUCTURES)} |", "|---" * (len(STRUCTURES) + 1) + "|"]
    for estimator in ESTIMATORS:
        cells = ["-" if estimator == "hessian" and s in _UNDEFINED else "yes" for s in STRUCTURES]
        lines.append(f"| {estimator} | {' | '.join(cells)} |")
    lines += ["", f"| module | {' | '.join(STRUCTURES)} |", "|---" * (len(STRUCTURES) + 1) + "|"]
    lines += [f"| {module} | {' | '.join(cells[s] for s in STRUCTURES)} |" for module, cells in MODULES.items()]
    return "\n".join(lines)
