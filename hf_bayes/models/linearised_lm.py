"""Language models linearised in their random parameters.

A language model has a word for each output at every position, and neither J nor J V J' fits anywhere. Its outputs are
drawn in place: f(x, mean) + J (theta_s - mean) of each draw theta_s is one Jacobian-vector product (``tangents``), in
forward mode and for all draws at once, since the members' engine carries tangents along. Of a head alone there is the
closed form (``ClosedHead``), while the pairs of words of one position can be held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_bayes.distributed.member_sums import LocalMembers
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import moved
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.module_hooks import Taps
from hf_bayes.members.quantised import foreign_linears
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_members import CausalMembers
from hf_bayes.models.linearised import (
    JACOBIAN_BUDGET,
    Linearisation,
    Outputs,
    head_covariance,
    linear_head,
    linearisation_of,
)
from hf_bayes.uncertainty.gaussian_links import LINKS, GaussianPrediction
from hf_bayes.uncertainty.likelihoods import widened

DIFFERENTIABLE_ATTENTION = ("eager", "sdpa")
"""Implementations of attention that PyTorch can differentiate forwards."""


@contextmanager
def tangents(means: Tensor, theta: Tensor) -> Iterator[Tensor]:
    """Until the end of the block, ``theta`` [M, d] as draws of a linearised model: its means, moving towards each draw.

    Whatever is computed from what the block is given carries the derivative in that direction along: of the logits,
    f(x, mean) and J (theta_s - mean), which ``drawn`` adds up. Attention takes PyTorch's own composition of products,
    the one that has a derivative forwards on every device.

    Args:
        means: [M, d], of each draw that of the Gaussian it was drawn from.
    """
    theta = theta.detach()
    with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        mean = means.to(theta, copy=True)
        yield forward_ad.make_dual(mean, theta.clone() - mean)


def drawn(logits: Tensor) -> Tensor:
    """f(x, mean) + J (theta_s - mean), of logits that were computed within ``tangents``; as they are elsewhere."""
    value, tangent = forward_ad.unpack_dual(logits)  # outside of every level there is none
    return value if tangent is None else widened(value) + widened(tangent)


def refuse_backwards_only(model: BayesianModel, run: Any) -> None:
    """Raise where PyTorch cannot differentiate a language model forwards, or a layer of few bits does not say so.

    Args:
        run: a forward within ``tangents``.
    """
    attention = getattr(model.core.config, "_attn_implementation", None)
    if attention not in (None, *DIFFERENTIABLE_ATTENTION):
        raise ValueError(
            f"linearised predictions differentiate attention forwards, which {' and '.join(DIFFERENTIABLE_ATTENTION)} "
            f"allow, got attn_implementation={attention!r}: load the base model with attn_implementation='sdpa', or "
            "predict by members"
        )
    hooks = [module.register_forward_hook(_Moving(path)) for path, module in foreign_linears(model.model)]
    try:
        run()
    except RuntimeError as error:  # of an operation, or of an autograd function, without a derivative forwards
        if isinstance(error, NotImplementedError) or "jvp" in str(error):
            raise ValueError(
                f"linearised predictions differentiate {type(model.core).__name__} forwards, and one of its operations "
                f"cannot be ({str(error).splitlines()[0]:.200}): predict by members"
            ) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


class _Moving:
    """Of a linear layer: what comes out moves where what went in does."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        if len(args) != 1 or not all(isinstance(value, Tensor) for value in (*args, output)):
            return
        given, found = (forward_ad.unpack_dual(value).tangent for value in (args[0], output))
        if given is not None and bool(given.any()) and (found is None or not bool(found.any())):
            raise ValueError(
                f"{self.path} ({type(module).__module__}.{type(module).__name__}) cannot be differentiated forwards: a "
                "linearised model would not see what is random below it. Quantise the base in another way "
                "(docs/models.md), or predict by members"
            )


class ClosedHead:
    """J V J' of a language model whose one random module is its head, position by position.

    Raises:
        ValueError: if other parameters are random, or the pairs of words of a position are too many to be held.
    """

    def __init__(self, model: BayesianModel, head: ChunkedHead, link: str) -> None:
        self.head, self.layout = head, model.layout
        self.module: Any = model.core.get_output_embeddings()
        taps = Taps(model.model, model.layout.names)
        tap = linear_head(taps, model.layout)
        instead = (
            f"{link} needs a covariance of all words at a position: take link='monte_carlo', whose draws need none"
        )
        if tap is None or tap.module is not self.module:
            raise ValueError(
                f"link {link!r} has a closed form for a language model whose linear head alone is random, got "
                f"{len(model.layout.names)} random tensors, first {model.layout.names[0]}: {instead}"
            )
        self.weight = tap.names["weight"]
        self.num_words = model.layout.named_shapes[self.weight][0]
        if self.num_words**2 > JACOBIAN_BUDGET:
            raise ValueError(
                f"{self.num_words} words have {self.num_words**2} pairs at each position, more than the "
                f"{JACOBIAN_BUDGET} numbers that are held at once: {instead}"
            )

    def outputs(
        self, gaussian: Gaussian, hidden: Tensor, output: Any, num_rows: int, positions: Tensor
    ) -> Iterator[tuple[Tensor, Outputs]]:
        """Chunk by chunk, (indices [n], the outputs [K, n, V] there).

        Args:
            hidden, output, num_rows, positions: as of ``ChunkedHead.stream``; hidden states [B, T, h].
        Raises:
            ValueError: if the model's logits are not what its head gives.
        """
        flat, means = self.head.per_member(hidden, num_rows), gaussian.means
        for index in positions.split(self._chunk_size(gaussian)):
            with self.head.members.bind(means):
                logits, features = self._logits_and_features(flat[:, index], output)
            spread = [
                head_covariance(covariance, self.layout, features.to(means.dtype), weight=self.weight)
                for covariance in gaussian.covariances
            ]
            yield index, Outputs(widened(logits).to(means.dtype), torch.stack(spread))

    def _chunk_size(self, gaussian: Gaussian) -> int:
        # of a full covariance the Jacobian of a position is written out: V x d numbers, fewer than the d x d of V
        width = self.layout.dim if gaussian.covariances[0].kind == "full" else self.num_words
        return max(1, JACOBIAN_BUDGET // (len(gaussian.means) * self.num_words * width))

    def _logits_and_features(self, hidden: Tensor, output: Any) -> tuple[Tensor, Tensor]:
        """[K, n, V] and the [n, h] that the head was given."""
        seen: list[tuple[Tensor, Tensor]] = []
        with self.module.register_forward_hook(lambda module, args, answer: seen.append((args[0], answer))):
            logits = self.head.logits(hidden, output)
        (features, answer), *more = seen
        if more or not torch.equal(answer.reshape(logits.shape), logits):
            raise ValueError(
                f"{type(self.head.members.core).__name__} changes what its head gives (by a scale, or soft-capping), "
                "so that its logits are not linear in the head: take link='monte_carlo'"
            )
        return logits, features.reshape(hidden.shape[1], features.shape[-1])


class LinearisedCausalLM(CausalMembers):
    """Members of a causal language model that can be linear in their random parameters."""

    _linearised: Linearisation | None = None
    _closed: ClosedHead | None = None

    def linearise(self, link: str | None = "monte_carlo") -> Self:
        """From now on predict by logits that are linear in theta, f(x, mean) + J (theta - mean), theta ~ N(mean, V).

        With ``monte_carlo`` the members that the model holds are the draws of theta: ``members`` of ``from_pretrained``
        says how many, and what is predicted from their linear logits is what would be from their own. ``probit`` and
        ``bridge`` have a closed form, f(x, mean) and J V J', where the head alone is random and its words are few; they
        know no draws, so that texts are neither scored nor generated by them.

        Args:
            link: from logits to probabilities, of ``predictive.LINKS``. None goes back to members.
        Raises:
            ValueError: for another link, a posterior that is no Gaussian, a closed form that does not exist or does not
                fit, or a model that cannot be differentiated forwards.
        """
        before, self._linearised, self._closed = (self._linearised, self._closed), None, None
        if link is None:
            return self
        try:
            linearised = linearisation_of(self, link)
            closed = None if link == "monte_carlo" else ClosedHead(self, self.head, link)
            linearised.gaussian = moved(linearised.gaussian, self.theta)
            self._linearised, self._closed = linearised, closed
            if closed is None:
                if self._shown is not None:
                    self._refuse_unpaired()
                refuse_backwards_only(self, self._try_tangents)
        except ValueError:
            self._linearised, self._closed = before
            raise
        return self

    def show(self, theta: Tensor | None, spread: LocalMembers | None = None) -> None:
        """As of every model; of a linearised mixture the members that it holds are the only ones.

        Raises:
            ValueError: for other members while they would have to be told apart by the components they are draws of.
        """
        if theta is not None:
            self._refuse_unpaired()
        super().show(theta, spread)

    def _refuse_unpaired(self) -> None:
        """Raise where shown members would be linear around one of several means, and nothing tells around which.

        The components of those that the model holds are known by their order, that of ``Gaussian.sample``.
        """
        if self._linearised is None or self._closed is not None or len(self._linearised.gaussian.means) == 1:
            return
        raise ValueError(
            f"the posterior is a mixture of {len(self._linearised.gaussian.means)} Gaussians, and a linearised member "
            "belongs to the one it was drawn from, which members that are shown do not tell: predict by those that the "
            "model was loaded with (show(None)), or by members themselves (linearise(None))"
        )

    @property
    def _num_held(self) -> int:
        """Of a linearised member its hidden states and their tangent."""
        return super()._num_held * (1 if self._linearised is None or self.head.alike else 2)

    def _logits(self, hidden: Tensor, output: Any, rows: int, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for index, logits in super()._logits(hidden, output, rows, positions):
            yield index, drawn(logits)

    def _try_tangents(self) -> None:
        """A forward of two words."""
        with evaluating(self), self._tangents():
            words = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            self._hidden({"input_ids": words, "use_cache": False}, None)

    @contextmanager
    def _tangents(self) -> Iterator[None]:
        """While open, a linearised model's members are means that move towards its draws; nothing of other models."""
        if self._linearised is None or self._closed is not None:
            yield
            return
        means = self._linearised.gaussian_at(self.theta).means
        before, spread = (self._shown, self._spread_of_shown), self.spread
        # as Gaussian.sample deals draws to components, and spread_members deals draws to processes
        numbers = spread.rank * self.num_members + torch.arange(self.num_members, device=means.device)
        with tangents(means[numbers % len(means)], self.current) as theta:
            super().show(theta, spread)
            try:
                yield
            finally:
                self._shown, self._spread_of_shown = before

    def _closed_predictions(
        self, closed: ClosedHead, hidden: Tensor, output: Any, rows: int, positions: Tensor
    ) -> Iterator[tuple[Tensor, GaussianPrediction]]:
        """As ``_logits``: which, and what is predicted there, of a linearised model whose link has a closed form."""
        assert self._linearised is not None
        gaussian, link = self._linearised.gaussian_at(self.theta), LINKS[self._linearised.link]
        for index, outputs in closed.outputs(gaussian, hidden, output, rows, positions):
            yield index, link(*outputs)

    @property
    def is_closed_form(self) -> bool:
        """True if predictions integrate over the Gaussian in closed form, so that no number of members enters."""
        return self._closed is not None

    def _refuse_closed(self, what: str) -> None:
        if self._closed is not None and self._linearised is not None:
            raise ValueError(
                f"{what} tells the log-probability of a whole text, a mean over draws, of which link "
                f"{self._linearised.link!r} has none: linearise('monte_carlo'), or evaluate single words"
            )
