"""The exact linearised variance in the few directions of the outputs that matter: one backward pass for each.

Let p be the probabilities at the mean, F = diag(p) - p p', and S = J V J' the covariance of the linearised outputs. To
second order the epistemic uncertainty is

    I(y; z) = tr(F S) / 2 = sum_k l_k u_k' S u_k / 2,    F = sum_k l_k u_k u_k'.

F has few large eigenvalues l_k: where two classes compete, one. For K of them, a backward pass along u_k gives J' u_k
of each row, and u_k' J V J' u_l follows from the inputs and the output gradients of layers (``layer_covariance``). No
draw is involved, and no covariance between units, tokens or layers is dropped. In the other directions S is taken to be
the mean of the variances along u_k, without covariance.

Numbers and several labels have no F that chooses: all outputs count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_count
from hf_bayes.distributions.covariance import Diagonal, Kronecker
from hf_bayes.members.module_hooks import LayerHooks
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.linearised.outputs import Directions, Outputs, gaussian_outputs, moved_to, owner_of, spread_along
from hf_bayes.models.loading.base_model import num_labels_of
from hf_bayes.models.prediction.inputs import member_outputs
from hf_bayes.models.predictives import custom as custom_predictives
from hf_bayes.models.predictors import PredictedBy, Predictive
from hf_bayes.models.single_pass.drawn import LEADING, rank_for
from hf_bayes.models.single_pass.predictors import SinglePassPredictor, factors_of, gaussian_of
from hf_bayes.uncertainty.gaussian_links import LINKS, SINGLE_PASS
from hf_bayes.uncertainty.likelihoods import widened

TAGGER = "token_classification"

RANK = 2
"""The number of directions. One has most of the epistemic uncertainty, and a second one where three classes compete."""


MOST_CLASSES = 16
"""The largest number of classes, the most probable ones, whose F is decomposed."""


def input_predictor(model: BayesianModel, structure: str | None = None, **options: Any) -> Any:
    """Return the single pass of a classifier, a regression or a tagger.

    Args:
        model: the model.
        structure: "backward", or one of ``driver.STRUCTURES``. None means "low_rank" for taggers and for posteriors
            with leading columns (SWAG), else "backward".
        options: the settings of the structure.
    Raises:
        ValueError: for a setting that the structure does not have, and as the predictors.
    """
    if structure is None:
        leading = all(rank_for(covariance) == LEADING for covariance in gaussian_of(model).covariances)
        structure = "low_rank" if leading or model.task == TAGGER else "backward"
    if structure != "backward":
        return SinglePassPredictor(model, structure=structure, **options)
    if unknown := sorted(set(options) - {"link", "rank"}):
        raise ValueError(
            f"structure='backward' has the settings link and rank, got {', '.join(unknown)}: choose 'low_rank'"
        )
    return BackwardPredictor(model, **options)


def leading_directions(logits: Tensor, number: int) -> Tensor:
    """Return [B, C, K], the eigenvectors of F = diag(p) - p p' with the K largest eigenvalues, p = softmax(logits).

    Of many classes, only the most probable ones take part.
    """
    values, classes = widened(logits).softmax(-1).topk(min(max(MOST_CLASSES, number), logits.shape[-1]))
    fisher = torch.diag_embed(values) - values[..., None] * values[..., None, :]
    vectors = torch.linalg.eigh(fisher).eigenvectors[..., -number:]
    index = classes[..., None].expand_as(vectors)
    return vectors.new_zeros(*logits.shape, number).scatter(-2, index, vectors)  # type: ignore[no-any-return]


class BackwardPredictor:
    """Predict from Gaussian outputs of one forward pass and few backward passes, for each component of the posterior.

    Args:
        link: from Gaussian logits to probabilities; regressions need none.
        rank: the number of directions; as many as there are outputs give the linearised model.
    Raises:
        ValueError: for an unknown link or rank, a posterior that is not Gaussian, or a tagger.
    """

    prediction = SINGLE_PASS
    averages_members = False
    mixes_networks = False
    imitates: PredictedBy | None = None

    def __init__(self, model: BayesianModel, link: str = "bridge", rank: int = RANK) -> None:
        if link not in LINKS:
            raise ValueError(f"link must be one of {', '.join(LINKS)}, got {link!r}")
        if not is_count(rank):
            raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}")
        if model.task == TAGGER:
            raise ValueError(
                "structure='backward' takes backward passes for each token of a tagger: choose 'low_rank', which has "
                "the variances of all tokens from one pass"
            )
        self.link: str | None = link
        self.gaussian = gaussian_of(model)
        self.rank = rank
        layers = LayerHooks(model.model, model.layout.names).layers
        self.paths = list(dict.fromkeys(owner_of(layer.path) for layer in layers))
        self._parts: dict[tuple[int, ...], tuple[Tensor, Tensor]] | None = None
        self._groups: Sequence[Sequence[str]] = ()
        self.set_factors(factors_of(model))

    def set_factors(self, factors: Mapping[str, float]) -> None:
        """Set the calibration factors of layers; layers that are not named get 1.

        Raises:
            ValueError: for a layer without random weights.
        """
        if unknown := sorted(set(factors) - set(self.paths)):
            raise ValueError(f"calibration factors of layers that are not random: {unknown}. Calibrate again")
        self.factors = dict(factors)

    def check_shown(self) -> None:
        """Accept any members, since predictions do not read them."""

    def drawn_outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return the outputs of the members, which a single pass does not read."""
        return member_outputs(model, inputs)

    def outputs(self, model: BayesianModel, inputs: dict[str, Any]) -> Outputs:
        """Return the means [K, B, C] and the covariances [K, B, C, C] of the outputs."""
        found = self._read(model, inputs, self.factors) if self._parts is None else self._combined(model, inputs)
        if not bool(found.covariance.isfinite().all()):
            raise ValueError(
                "variances of the outputs are not finite in a single pass: the model or its posterior has diverged, or "
                "the posterior is too wide for float32. Predict by members, or fit a smaller posterior (a larger prior "
                "precision)"
            )
        return found

    def predict(self, model: BayesianModel, inputs: dict[str, Any]) -> Predictive:
        """Return the prediction by Gaussian outputs."""
        assert self.link is not None
        outputs = self.outputs(model, inputs)
        return custom_predictives.of_gaussian(*outputs, model.likelihood, self.link, model.mixture_temperature)

    @contextmanager
    def reusing_passes(self, groups: Sequence[Sequence[str]]) -> Iterator[None]:
        """Within the block, read a batch once for each group of layers, whatever the factors are later.

        The covariance of the outputs is S = sum_l f_l S_l, with a factor f_l for each group of layers, if V has no
        covariance between groups. If it has one, each call reads the batch.

        Args:
            groups: the paths of layers that always have the same factor. A batch is recognised by its tensors, which
                must live until the end of the block.
        """
        separate = all(isinstance(covariance, (Diagonal, Kronecker)) for covariance in self.gaussian.covariances)
        if separate or len(groups) == 1:
            self._parts, self._groups = {}, groups
        try:
            yield
        finally:
            self._parts = None

    def _combined(self, model: BayesianModel, inputs: dict[str, Any]) -> Outputs:
        """Return the outputs from what the first call for a batch finds: S of a single group, or U' S_l U of each."""
        assert self._parts is not None
        key, choose = tuple(map(id, inputs.values())), self._directions(model, {}).choose
        if key not in self._parts:
            each = [
                self._read(model, inputs, {path: float(path in group) for path in self.paths}) for group in self._groups
            ]
            mean = each[0].mean
            if len(each) == 1:  # S has the shape of the mean if the outputs are independent, as those of a head may be
                self._parts[key] = mean, each[0].covariance[None]
            else:
                chosen = torch.stack([choose(one) for one in mean]).to(each[0].covariance)
                self._parts[key] = mean, torch.stack([chosen.mT @ found.covariance @ chosen for found in each])
        mean, parts = self._parts[key]
        factors = torch.tensor([self.factors.get(group[0], 1.0) for group in self._groups]).to(parts)
        total = (factors.view(-1, *[1] * (parts.ndim - 1)) * parts).sum(0)
        if len(self._groups) == 1:
            return Outputs(mean, total)
        return Outputs(
            mean, torch.stack([spread_along(choose(one), own) for one, own in zip(mean, total, strict=True)])
        )

    def _read(self, model: BayesianModel, inputs: dict[str, Any], factors: Mapping[str, float]) -> Outputs:
        self.gaussian = moved_to(model.theta, self.gaussian)
        return gaussian_outputs(model, self.gaussian, inputs, self._directions(model, factors))

    def _directions(self, model: BayesianModel, factors: Mapping[str, float]) -> Directions:
        size = num_labels_of(model.config)
        if model.likelihood.predicts_classes and self.rank < size:
            return Directions(lambda logits: leading_directions(logits, self.rank), self.rank, factors)
        return Directions(lambda logits: torch.eye(size).to(logits).expand(len(logits), -1, -1), size, factors)
