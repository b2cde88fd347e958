"""How the model of a trainer predicts: by its chains in a run, and afterwards as a model loaded from the posterior."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hf_bayes.models.base import BayesianModel
from hf_bayes.models.current_members import CurrentMembers
from hf_bayes.posteriors.posterior import Posterior


def predict_by_members(model: BayesianModel) -> None:
    """Predict by members, at temperature 1: the temperature of a posterior belongs to its own draws."""
    model.calibrated = False
    model.linearise(None)


def predict_as_loaded(model: BayesianModel, posterior: Posterior) -> None:
    """Predict as a model that is loaded from the posterior does. The model shows the posterior's members already."""
    if posterior.config.prediction == "members":
        model.show(model.current, model.spread, float(posterior.config.calibration.get("temperature", 1)))
        return
    model.posterior, model.calibrated = posterior, True
    model.predict_by(posterior.config.prediction)
    model.show(None)  # members of a run are no part of a closed form


@contextmanager
def by_members(model: BayesianModel) -> Iterator[None]:
    """Predict by members until the end of the block, and then as before."""
    with ExitStack() as at_end:
        at_end.callback(_put_back, model, *_way_of(model))
        predict_by_members(model)
        yield


@contextmanager
def by_members_from_now(model: BayesianModel) -> Iterator[None]:
    """Predict by members from now on; if the block raises an error, as before."""
    with ExitStack() as on_error:
        on_error.callback(_put_back, model, *_way_of(model))
        predict_by_members(model)
        yield
        on_error.pop_all()


def _way_of(model: BayesianModel) -> tuple[Any, bool, CurrentMembers]:
    return model.predictor, model.calibrated, copy.copy(model.current_members)


def _put_back(model: BayesianModel, predictor: Any, calibrated: bool, members: CurrentMembers) -> None:
    model.predictor, model.calibrated, model.current_members = predictor, calibrated, members
