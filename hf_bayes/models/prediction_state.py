"""A record of how a Bayesian model predicts, by which the model can be restored."""

from __future__ import annotations

from hf_bayes.models.base import BayesianModel


class PredictionState:
    """The members of a model and its way of prediction, as they were when this record was made.

    The attributes of the model are those in ``prediction_fields`` of its class. Members are not copied, because nothing
    writes into them: ``BayesianModel.place`` puts others in their place.
    """

    def __init__(self, model: BayesianModel) -> None:
        self.model = model
        self.fields = {name: getattr(model, name) for name in model.prediction_fields}
        self.theta, self.current_members = model.theta.data, dict(vars(model.current_members))
        self.batch_statistics = model.members.context.batch_statistics

    def restore(self) -> None:
        """Give the model its members and its way of prediction back, on the device where the model is now."""
        model = self.model
        if model.theta.data_ptr() != self.theta.data_ptr():  # others, or these on another device
            model.place(self.theta)
        for name, value in self.fields.items():
            setattr(model, name, value)
        vars(model.current_members).update(self.current_members)
        model.members.context.batch_statistics = self.batch_statistics
