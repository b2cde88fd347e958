"""The posterior of a run as an object: draws or a Gaussian, with all that is needed to save, load and use them.

``directory`` lists the files of a saved posterior.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Unpack

import torch
from huggingface_hub import CommitInfo
from torch import Tensor

from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.core.layout import Layout
from hf_bayes.core.number_checks import is_integral
from hf_bayes.core.text_safety import readable_errors, visible_line
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors import hub, lora_config, storage
from hf_bayes.posteriors.config import CONFIG, PosteriorConfig
from hf_bayes.posteriors.consistency import (
    check_adapter_keys,
    check_distinct_chains,
    check_kind,
    check_theta,
    with_chains,
)
from hf_bayes.posteriors.directory import (
    GAUSSIAN,
    TRACE,
    expected_shapes,
    member_files,
    member_folder,
    read_parts,
)
from hf_bayes.posteriors.lora_ensemble import ensemble_of
from hf_bayes.posteriors.model_card import CardFields, card_fields, render_card, write_card
from hf_bayes.posteriors.sidecars import Sidecars, is_sidecar, sidecars_in
from hf_bayes.posteriors.storage import POSTERIOR, Content
from hf_bayes.posteriors.storage.json_values import json_value
from hf_bayes.posteriors.student import STUDENT, check_student

_NUM_GAUSSIAN_MEMBERS = 10


def require_members(count: Any) -> None:
    """Check that ``count`` is a number of members: an integer of at least 1.

    Raises:
        ValueError: if it is not.
    """
    if not is_integral(count):
        raise ValueError(f"members must be an integer, got {count!r:.100}: give the number of members, or None for all")
    if count < 1:
        raise ValueError(f"asked for {count} members: ask for at least 1")


@dataclass(frozen=True, eq=False)
class Posterior:
    """Draws or a Gaussian over named parameters of a base model.

    Attributes:
        approximation: rows of theta in float32 or float64.
        config: the method, prior, base model and parameters that theta belongs to.
        adapter_config: the content of peft's ``adapter_config.json`` for the parameters of an adapter, else None.
        trace: the log of the chains of the run, for plots (docs/diagnostics.md), or None without a run.
        sidecars: the files of tokenizer, chat template, image processor and generation config.
        student: the tensors of a distilled student, or None without one.
        source: the directory or repository that the posterior was read from, for messages, or None.
        folder: the real path of the files that the posterior was read from, or None.
    Raises:
        ValueError: if the parts disagree, a value is not finite, or draws of two chains are equal.
    """

    approximation: Draws | Gaussian
    config: PosteriorConfig
    adapter_config: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    sidecars: Sidecars = field(default_factory=Sidecars)
    student: dict[str, Tensor] | None = None
    source: str | None = field(default=None, init=False, repr=False)
    folder: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.approximation.num_stored:
            object.__setattr__(self, "config", with_chains(self.config, self.approximation.chains))
        check_kind(self.approximation, self.config)
        check_theta(self.approximation.rows, self.layout)
        if self.approximation.num_stored:
            check_distinct_chains(self.approximation.rows, self.config.member_chains)
        if self.trace is not None:
            object.__setattr__(self, "trace", json_value(self.trace, TRACE, undefined_is_null=True))
        if self.adapter_config is not None:
            config = lora_config.explicit(lora_config.for_inference(self.adapter_config), self.layout.named_shapes)
            object.__setattr__(self, "adapter_config", config)
            check_adapter_keys(self.layout)
        if self.student is not None or self.config.student:
            check_student(self.student, self.config.student, self.fingerprint)

    # -- content ---------------------------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """The columns of theta that belong to each tensor."""
        return self.config.layout

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the parameter names and of the draws or the Gaussian."""
        return fingerprint_tensors(self.approximation.tensors(self.layout).items())

    @property
    def representative(self) -> Tensor:
        """The one model [d] at the root of the directory.

        A Gaussian has its mean there (A and B are independent, so it is the mean of BA, too). Draws have their first
        member: a mean over factors A and B of different chains is not a model of any chain. A mixture of Gaussians has
        the mean of its first component.
        """
        return self.approximation.rows[0]

    def sample(self, num_members: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Return members [num_members, d]: by default all draws, or 10 draws from a Gaussian.

        Raises:
            ValueError: if ``num_members`` is not an integer of at least 1, or exceeds the number of stored draws.
        """
        if num_members is None:
            num_members = self.config.num_members or _NUM_GAUSSIAN_MEMBERS
        require_members(num_members)
        return self.approximation.sample(num_members, generator)

    def members(self, num_members: int | None = None) -> Tensor:
        """Return the members [num_members, d] that a model loaded from this posterior has; arguments as of ``sample``.

        A temperature of the mixture is fitted to exactly these members.
        """
        return self.sample(num_members, torch.Generator().manual_seed(self.config.seed or 0))

    # -- directory -------------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        repo_id: str | None = None,
        group: storage.Group | None = None,
        contributes: bool = True,
        **card: Unpack[CardFields],
    ) -> None:
        """Write the directory in one step: at any time a reader finds the complete old or the complete new posterior.

        Args:
            directory: the target, made if missing. Other files in it stay, except files of the same names.
            overwrite: False refuses a directory that is not empty.
            repo_id: the repository id in the examples of the model card.
            group: the processes that hold the draws of other chains. Together they save one posterior of all draws.
            contributes: False for a process whose draws another process writes.
            card: license, language, datasets, tags and model_name of the model card (``model_card.CardFields``).
        Raises:
            OSError, ValueError: as ``storage.write_directory`` and ``card_fields``.
        """
        card = card_fields(**card)
        storage.check_writable(directory, overwrite, format=POSTERIOR)
        group = group or storage.Alone()
        shares = group.share(self.config.member_chains if contributes else [])
        chains = [chain for share in shares for chain in share]
        files: dict[str, Content] = {}
        if contributes:
            first = sum(map(len, shares[: group.rank]))
            for index in range(len(shares[group.rank])):
                content = member_files(self.approximation.rows[index], self.layout, self.adapter_config)
                files |= {f"{member_folder(first + index)}/{name}": part for name, part in content.items()}
        if group.rank == 0:
            whole = self.config
            if chains != whole.member_chains:  # other processes have draws, too
                whole = dataclasses.replace(whole, num_members=len(chains), member_chains=chains)
            files |= self._common_files(whole.to_dict(), repo_id, card)
        storage.write_directory(directory, files, format=POSTERIOR, group=group)

    @classmethod
    @readable_errors()
    def from_pretrained(cls, directory_or_repo: str | os.PathLike[str], **location: Unpack[hub.Location]) -> Posterior:
        """Read and verify a directory or a repository of the Hub. Warn if the run did not converge.

        Args:
            directory_or_repo: a directory is read where it is, a repository is downloaded.
            location: revision (branch, tag or commit of the repository) and subfolder (the folder of the posterior);
                token, cache_dir, force_download and local_files_only as in transformers.
        Raises:
            OSError: if there is no posterior.
            ValueError: if it is damaged, naming the file.
        """
        directory = hub.fetch(directory_or_repo, patterns=hub.FILES, **location)
        _refuse_plain_adapter(directory)
        files = storage.read_directory(directory, format=POSTERIOR, raw=is_sidecar, expected=expected_shapes)
        try:
            posterior = cls(*read_parts(files))
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error
        posterior = posterior.read_from(directory_or_repo)
        object.__setattr__(posterior, "folder", os.path.realpath(directory))
        if posterior.config.diagnostics.get("converged") is False:
            verdict = posterior.config.diagnostics.get("verdict") or "its diagnostics failed"
            warnings.warn(f"{directory_or_repo}: this posterior did not converge: {visible_line(verdict)}")
        if unlisted := [name for name in sidecars_in(directory) if name not in files]:
            warnings.warn(
                f"{directory_or_repo}: ignored {', '.join(unlisted)}, which the posterior's manifest does not list. "
                "Save the posterior with its tokenizer or processor to have the file used, or remove it"
            )
        return posterior

    @classmethod
    @readable_errors()
    def from_adapters(
        cls,
        directories: Sequence[str | os.PathLike[str]],
        *,
        base_fingerprint: Mapping[str, str | None] | None = None,
        task: str | None = None,
    ) -> Posterior:
        """Make a deep ensemble of plain peft LoRA adapters, each a chain of its own.

        Args:
            directories: adapter folders or Hub ids, at least one.
            base_fingerprint: the fingerprint of the base model, for the check when the posterior is put on a model.
            task: the task, where ``adapter_config.json`` does not name it.
        Raises:
            ValueError: if an adapter differs in configuration, base, keys, shapes or dtype, naming both.
        """
        posterior = cls(*ensemble_of(directories, base_fingerprint=base_fingerprint, task=task))
        return posterior.read_from(directories[0]) if len(directories) == 1 else posterior

    def read_from(self, place: str | os.PathLike[str] | None) -> Posterior:
        """Return the posterior with ``place`` as its ``source``, the directory or repository that messages name."""
        posterior = copy.copy(self)
        object.__setattr__(posterior, "source", None if place is None else str(place))
        return posterior

    def export_member(self, index: int, directory: str | os.PathLike[str]) -> None:
        """Write one draw as a plain peft adapter folder.

        Raises:
            ValueError: if there is no such draw, the parameters are not an adapter's, or the directory is not empty.
        """
        if self.adapter_config is None:
            raise ValueError(
                f"export_member writes peft adapters, but subspace {self.config.subspace!r} is not an adapter's"
            )
        if not 0 <= index < self.config.num_members:
            raise ValueError(
                f"asked for member {index}, {self.config.num_members} draws are stored"
                + (": save a sample of the Gaussian as Draws first" if not self.config.num_members else "")
            )
        storage.write_plain(directory, member_files(self.approximation.rows[index], self.layout, self.adapter_config))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        **card: Unpack[CardFields],
    ) -> CommitInfo:
        """Upload the files of the posterior, and no other file. Return the commit, a text with its address.

        Args:
            repo_id: the repository, made if missing. Without an owner it is the user's, and the card names it in full.
            token: the access token of the Hub. It is never stored.
            private: whether a new repository is private.
            revision: a branch, made if missing, or a pull request (refs/pr/1). The main branch by default.
            commit_message: the message of the commit.
            card: license, language, datasets, tags and model_name of the model card (``model_card.CardFields``).
        Raises:
            ValueError, OSError: as ``hub.push_directory`` and ``card_fields``.
        """
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory, repo_id=repo_id, **card)
            return hub.upload(
                directory,
                repo_id,
                with_repository=lambda name: write_card(directory, repo_id=name, **card),
                token=token,
                private=private,
                revision=revision,
                commit_message=commit_message,
            )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _common_files(self, config: dict[str, Any], repo_id: str | None, card: CardFields) -> dict[str, Content]:
        """Return all files except the files of the members."""
        files: dict[str, Content] = {CONFIG: config}
        if self.trace is not None:
            files[TRACE] = self.trace
        if self.adapter_config is not None:
            files |= member_files(self.representative, self.layout, self.adapter_config)
        if not self.approximation.num_stored:
            files[GAUSSIAN] = self.approximation.tensors(self.layout)
        if self.student is not None:
            files[STUDENT] = self.student
        files |= self.sidecars.files
        adapter = self.adapter_config is not None
        files["README.md"] = render_card(config, adapter=adapter, repo_id=repo_id, **card)
        return files


def _refuse_plain_adapter(directory: str | os.PathLike[str]) -> None:
    """Raise a FileNotFoundError for the folder of an adapter that is no part of a posterior."""
    found = set(os.listdir(directory))
    if lora_config.FILE in found and not found & {CONFIG, storage.MANIFEST}:
        raise FileNotFoundError(
            f"{directory} holds a plain adapter, expected a posterior: make one from held-out rows by hf-bayes "
            "bayesianise (docs/training_free.md)"
        )
