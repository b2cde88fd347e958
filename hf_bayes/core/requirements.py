"""The record of what a method needs from a run, and of the properties of its result.

The trainer, the post-hoc fits and ``sample`` read this record. They never test which method they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Need = Literal["none", "useful", "needed"]
OwnRate = Literal["whitening", "range_test", "from_length", "unused", "given"]
WhiteningStructure = Literal["diagonal", "kronecker", "full"]


@dataclass(frozen=True, kw_only=True)
class EnergyLimits:
    """The limits of a method on an energy of ``sample``, which has no rows of data and no modules.

    Attributes:
        refusal: the error message, if the settings need rows or modules; empty if they need none.
        max_hessian: the largest number of parameters. None: no limit, since the method takes no whole Hessian and no
            diagonal of one.
        remedy: the settings without this limit, as the error message quotes them.
    """

    refusal: str = ""
    max_hessian: int | None = None
    remedy: str = ""

    def check(self, dim: int) -> None:
        """Check that the method can run on an energy of ``dim`` parameters.

        Raises:
            ValueError: naming the setting that needs more than an energy has, or too large a number of parameters.
        """
        if self.refusal:
            raise ValueError(self.refusal)
        if self.max_hessian is not None and dim > self.max_hessian:
            raise ValueError(
                f"the Hessian of an energy takes a backward pass for each of {dim} elements; the limit is "
                f"{self.max_hessian}: {self.remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The needs of a method. The defaults are those of a stochastic-gradient sampler.

    Attributes:
        all_data_in_every_update: every evaluation must see the whole data set, as exact kernels need it.
        batch_order: "epochs": batches are consecutive parts of a permutation of the rows. "independent": each batch is
            a new random sample of rows. "disjoint": each update takes new random rows, and no row occurs twice in it.
        min_batches: the smallest number of batches in an update.
        allows_private_rows: the method also runs where every process holds rows of its own. A batch is then the sum of
            one batch from each process.
        gradient_variance: "needed": an evaluation without ``grad_variance`` is refused. "useful": it is estimated where
            that costs little. "none": it is not estimated.
        gradient_variance_setting: the setting that needs this variance, as error messages quote it.
        tensor_names_setting: the setting that selects tensors by name, as error messages quote it; empty without one.
        tensor_scales_setting: the setting that scales tensors relative to each other, likewise.
        learning_rate: how a run without a learning rate finds one. "whitening": the method finds a step size of its own
            from the curvature, see ``Rule.early_passes``. "range_test": short trials of AdamW at several rates.
            "from_length": 1 / sqrt(n) for n updates. "unused": another setting takes its place. "given": it does not
            find one, so the user has to give one.
        gradients_per_update: the gradients that an update takes on the same rows (``Rule.anchor``), as a mean over
            updates: n updates take ceil(n * gradients_per_update).
        adapts_step: burn-in adapts the step size from any start; a learning rate is only the start of the search.
        rate_falls: a learning rate from a range test falls linearly to 0. False: it stays constant.
        follows_schedule: every update takes the step size of its own learning rate. False: the method sets its step
            sizes itself and reads at most the peak of a schedule, so it refuses one.
        final_pass: the method passes over the data once more after its last update (``Rule.final_pass``).
        all_chains_in_one_pass: the final pass needs the chains of all processes together.
        heldout: "whole": the final pass also uses held-out rows. "split": it fits on one half of them and judges the
            fit on the other half. "none": it uses none.
        heldout_setting: the setting that makes the method need held-out rows, as error messages quote it.
        least_heldout: the smallest number of held-out rows, see ``least_rows``.
        most_heldout: the largest number of them that the method reads, see ``most_rows``. None: it reads all.
        compares_chains: chains are compared with each other during the run, so one process needs all of them.
        mirrored_chains: a run that finds its own step size gives every second chain the opposite noise of the chain
            before it.
        chooses_temperature: held-out rows choose T; ``temperature`` is only the start.
        draws_are_chain_states: the stored draws are states that the chains visited.
        ends_at_map: the first member (or the mean) of the posterior is itself a MAP estimate.
        predicts_linearised: the Gaussian belongs to a linearised model, whose predictions are better than the
            predictions of its members.
        drops_inputs: the method applies dropout masks of its own to the inputs of layers.
        fits_prior: the method replaces the prior by a fitted one, so the energy of its result is another one.
        fits_noise: the final pass also fits the noise of a regression.
        mode_prior_scale: the factor of the default standard deviations in a model with LoRA. A mode is only the peak of
            the posterior, of which a sampler explores the whole: a mode needs a wider prior to fit as well.
        batch_posterior_setting: the field, now true, that asks for a likelihood of as many terms as a batch has; empty
            without one (``registry.with_batch_posterior``).
        whitening: the structure of the curvature in a run with ``learning_rate="whitening"``; None: not given.
        allowed_heating: the share of T that the noise of minibatches may add in such a run.
        on_energy: the limits of the method in ``sample``.
        cooling_advice: how the method comes nearer to a mode, as a warning quotes it. It is of use at T > 0 only.
        spread_advice: the settings that give the Gaussian a more exact width, as a verdict quotes them; empty without
            such settings.
    """

    all_data_in_every_update: bool = False
    batch_order: Literal["epochs", "independent", "disjoint"] = "epochs"
    min_batches: int = 1
    allows_private_rows: bool = False
    gradient_variance: Need = "none"
    gradient_variance_setting: str = ""
    tensor_names_setting: str = ""
    tensor_scales_setting: str = ""
    learning_rate: OwnRate = "given"
    gradients_per_update: int | Fraction = 1
    adapts_step: bool = False
    rate_falls: bool = True
    follows_schedule: bool = True
    final_pass: bool = False
    all_chains_in_one_pass: bool = False
    heldout: Literal["none", "whole", "split"] = "none"
    heldout_setting: str = ""
    least_heldout: int = 2
    most_heldout: int | None = None
    compares_chains: bool = False
    mirrored_chains: bool = False
    chooses_temperature: bool = False
    draws_are_chain_states: bool = True
    ends_at_map: bool = False
    predicts_linearised: bool = False
    drops_inputs: bool = False
    fits_prior: bool = False
    fits_noise: bool = False
    mode_prior_scale: float = 1.0
    batch_posterior_setting: str = ""
    whitening: WhiteningStructure | None = None
    allowed_heating: float = 0.0
    on_energy: EnergyLimits = EnergyLimits()
    cooling_advice: str = "lower the temperature"
    spread_advice: str = ""

    @property
    def ends_in_gaussian(self) -> bool:
        """True if the result is a Gaussian for each chain; False if it is draws.

        A Gaussian comes from all updates together, or from the final pass.
        """
        return self.final_pass or not self.draws_are_chain_states

    def least_rows(self, unit: str) -> int:
        """Return the smallest number of held-out rows.

        A row of tokens has many likelihood terms, so a fifth of the rows is enough. Fewer rows are not enough, because
        the tokens of a row are correlated.

        Args:
            unit: the unit of a likelihood term, "token" or "example".
        """
        return max(2, self.least_heldout // 5) if unit == "token" else self.least_heldout

    def most_rows(self, unit: str) -> int | None:
        """Return the largest number of held-out rows that the method reads, a fifth for rows of tokens; None: all."""
        if self.most_heldout is None or unit != "token":
            return self.most_heldout
        return self.most_heldout // 5


def need_of_gradient_variance(measure: bool | None) -> Need:
    """Return the need for a setting such as ``measure_gradient_noise``; None means to measure where that is cheap."""
    if measure is None:
        return "useful"
    return "needed" if measure else "none"
