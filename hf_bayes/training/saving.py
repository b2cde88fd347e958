"""The directory that a trainer saves its posterior to, and the model card there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_bayes.posteriors import storage
from hf_bayes.posteriors.model_card import CardFields, author_fields, write_card
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.checks.rows import refuse_overwritten_prior
from hf_bayes.training.outcome import Outcome
from hf_bayes.training.trainer_host import TrainerHost


class SavedPosterior:
    """The posterior of a trainer as it is saved, with the author's fields of its model card.

    Attributes:
        outcome: the outcome of the trainer's last run.
        card: the fields of the model card that only the author can fill in.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.card: CardFields = {}

    def save(self, host: TrainerHost, active: ActiveRun | None, directory: str) -> None:
        """Write the posterior directory in one step, with held-out metrics if there is an eval_dataset.

        The directory has the current tokenizer and generation config. Every process calls this method and writes the
        members of its chains.

        Raises:
            ValueError: before a run has ended, or if the directory is that of the posterior which is the prior.
        """
        setup = self.outcome.setup
        refuse_overwritten_prior(setup.inherited, directory)
        posterior, repo_id = self.outcome.to_save(active), host.args.hub_model_id
        first = setup.mesh.data_rank == 0
        posterior.save_pretrained(directory, repo_id=repo_id, group=setup.mesh, contributes=first, **self.card)

    def keep_card(self, fields: dict[str, Any]) -> None:
        """Keep the author's fields of the card, for this and later saves.

        Raises:
            ValueError: for a field that a card does not have.
        """
        self.card = author_fields(self.card, fields)

    def write_card(self, host: TrainerHost, fields: dict[str, Any]) -> None:
        """Keep the author's fields of the card; write the card anew if a posterior is saved.

        A run that has not ended has no posterior and gets no card; TRL asks for one at every checkpoint.
        """
        self.keep_card(fields)
        args = host.args
        if args.should_save and (Path(host.directory) / storage.MANIFEST).exists():
            write_card(host.directory, repo_id=args.hub_model_id, **self.card)
