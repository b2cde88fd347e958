"""The upload of a trainer's posterior to the Hub."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi

from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.outcome import NO_POSTERIOR
from hf_bayes.training.saving import SavedPosterior
from hf_bayes.training.session import required
from hf_bayes.training.trainer_host import TrainerHost


def push(
    saved: SavedPosterior,
    host: TrainerHost,
    directory: str,
    *,
    commit_message: str | None,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
) -> CommitInfo | Future[CommitInfo] | None:
    """Upload a posterior's own files: never training_args.bin, checkpoints or tokens.

    Args:
        saved: the posterior, with the fields of its card.
        host: the trainer.
        directory: where it has been saved.
        commit_message: the message of the commit; None takes the usual one.
        blocking: False returns at once, while the upload goes on.
        token: an access token of the Hub (``args.hub_token`` by default).
        revision: a branch, made if it is not there, or a pull request such as refs/pr/1 (``args.hub_revision`` by
            default).
        private: True makes a new repository private (``args.hub_private_repo`` by default).
    Returns:
        The commit, a text with its address, or its future if not blocking; None in all processes but the first.
    """
    if not host.is_first_process:
        return None
    args, whole = host.args, saved.outcome.setup.mesh.chain_size == 1
    posterior = required(saved.outcome.posterior, NO_POSTERIOR) if whole else Posterior.from_pretrained(directory)
    upload = partial(
        posterior.push_to_hub,
        args.hub_model_id or Path(host.directory).absolute().name,
        token=args.hub_token if token is None else token,
        private=args.hub_private_repo if private is None else private,
        revision=args.hub_revision if revision is None else revision,
        commit_message=commit_message,
        **saved.card,
    )
    return upload() if blocking else HfApi().run_as_future(upload)
