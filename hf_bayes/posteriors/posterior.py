"""The posterior as an object: what a run ended in, all that is needed to use it, and its directory (docs: on disk).

Layout of the directory::

    README.md  posterior_config.json  manifest.json
    adapter_config.json  adapter_model.safetensors        LoRA: a plain peft adapter, see ``Posterior.representative``
    members/member_000/...                                Draws: each a plain peft adapter (else model.safetensors)
    covariance.safetensors                                Gaussian: means and covariances by parameter name
    trace.json                                            what a run logged of its chains, for plots
    tokenizer.json, chat_template.jinja, ...              sidecars: tokenizer, processor, generation config
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Unpack

import torch
from torch import Tensor

from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.core.layout import Layout
from hf_bayes.core.text_safety import readable_errors, visible_line
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors import contents as posterior_files
from hf_bayes.posteriors import hub, lora_config, storage
from hf_bayes.posteriors.config import CONFIG, PosteriorConfig
from hf_bayes.posteriors.contents import GAUSSIAN, TRACE, gaussian_tensors, member_folder
from hf_bayes.posteriors.lora_adapter import Adapter, adapter_key, partner_key, plain_adapter_config
from hf_bayes.posteriors.model_card import CardFields, card_fields, render_card
from hf_bayes.posteriors.sidecars import Sidecars, is_sidecar, sidecars_in
from hf_bayes.posteriors.storage import POSTERIOR, Content
from hf_bayes.posteriors.storage.plain_values import plain

_NUM_GAUSSIAN_MEMBERS = 10


def require_members(count: Any) -> None:
    """Raise a ValueError for what is no number of members."""
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise ValueError(
            f"members is how many members to take, an integer, got {count!r:.100}: give 1 or more, or None for all"
        )
    if count < 1:
        raise ValueError(f"asked for {count} members: ask for at least 1")


@dataclass(frozen=True, eq=False)
class Posterior:
    """Draws or a Gaussian over named parameters of a base model.

    Attributes:
        approximation: rows of theta, float32 or float64.
        config: what they are.
        adapter_config: the content of peft's ``adapter_config.json`` if the parameters are an adapter's, else None.
        trace: what the run logged of its chains, for plots (docs/diagnostics.md); None if there was no run.
        sidecars: the files of tokenizer, chat template, image processor and generation config.
        source: the directory or repository it was read from, for messages; None if it was made here.
        folder: where the files lie that it was read from; None if it was made here.
    Raises:
        ValueError: if the parts disagree, a value is not finite, or draws of two chains are equal.
    """

    approximation: Draws | Gaussian
    config: PosteriorConfig
    adapter_config: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    sidecars: Sidecars = field(default_factory=Sidecars)
    source: str | None = field(default=None, init=False, repr=False)
    folder: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.approximation, Draws):
            chains = [int(chain) for chain in self.approximation.chain]
            if len(chains) != self.config.num_members:
                raise ValueError(f"{len(chains)} draws, but num_members is {self.config.num_members}")
            if not self.config.member_chains:
                object.__setattr__(self, "config", dataclasses.replace(self.config, member_chains=chains))
            if self.config.member_chains != chains:
                raise ValueError(f"draws come from chains {chains}, the config says {self.config.member_chains}")
        self._check_theta()
        if self.trace is not None:
            object.__setattr__(self, "trace", plain(self.trace, TRACE, undefined_is_null=True))
        if self.adapter_config is not None:
            config = lora_config.explicit(plain_adapter_config(self.adapter_config), self.layout.named_shapes)
            object.__setattr__(self, "adapter_config", config)
            self._check_adapter_keys()

    # -- content ---------------------------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """Which columns of theta are which tensor."""
        return self.config.layout

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that tells this posterior from another: its parameters, and its draws or Gaussian."""
        if isinstance(self.approximation, Gaussian):
            return fingerprint_tensors(gaussian_tensors(self.approximation, self.layout).items())
        return fingerprint_tensors(
            (f"draws.{n}", t) for n, t in self.layout.unflatten(self.approximation.theta).items()
        )

    @property
    def representative(self) -> Tensor:
        """[d]: the one model at the root of the directory.

        The mean of a Gaussian (of independent A and B, hence of BA, too). Of draws it is the first member: a mean over
        A and B of different chains is no model of any. Of a mixture of Gaussians, likewise, the first one's mean.
        """
        return self._rows[0]

    def sample(self, num_members: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """[num_members, d]: all draws, or 10 of a Gaussian, unless told how many.

        Raises:
            ValueError: if that is no number of members, or there are fewer draws than asked for.
        """
        if num_members is None:
            num_members = self.config.num_members or _NUM_GAUSSIAN_MEMBERS
        require_members(num_members)
        return self.approximation.sample(num_members, generator)

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
        """Write the directory in one step: any reader, at any time, finds the old or the new posterior.

        Args:
            directory: made if missing; other files in it stay, but for those of the same names.
            overwrite: False refuses a directory that is not empty.
            repo_id: the id under which the model card says to load it.
            group: processes that hold the draws of other chains; they save one posterior of all draws together.
            contributes: False for a process whose draws another one writes.
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
                content = self._member_files(self._rows[index])
                files |= {f"{member_folder(first + index)}/{name}": part for name, part in content.items()}
        if group.rank == 0:
            whole = dataclasses.replace(self.config, num_members=len(chains), member_chains=chains)
            files |= self._common_files(whole, repo_id, card)
        storage.write_directory(directory, files, format=POSTERIOR, group=group)

    @classmethod
    @readable_errors()
    def from_pretrained(
        cls,
        directory_or_repo: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> Posterior:
        """Read a directory or a repository of the Hub, all of it verified. Warns if the run did not converge.

        Args:
            directory_or_repo: a directory is read as it is, a repository is downloaded.
            revision: branch, tag or commit of a repository.
            subfolder: of the directory or repository.
            token, cache_dir, force_download, local_files_only: as in transformers.
        Raises:
            OSError: if there is no posterior.
            ValueError: if it is damaged, naming the file.
        """
        directory = hub.fetch(
            directory_or_repo,
            patterns=hub.FILES,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        files = storage.read_directory(directory, format=POSTERIOR, raw=is_sidecar, expected=posterior_files.shapes)
        try:
            posterior = cls(*posterior_files.read(files))
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error
        object.__setattr__(posterior, "source", str(directory_or_repo))
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
        """A deep ensemble of plain peft LoRA adapters that exist already, each a chain of its own.

        Args:
            directories: adapter folders or Hub ids; at least one.
            base_fingerprint: of the base model, to be checked when the posterior is loaded onto one.
            task: where ``adapter_config.json`` does not tell.
        Raises:
            ValueError: if an adapter differs in configuration, base, keys, shapes or dtype, naming both.
        """
        if isinstance(directories, str | os.PathLike):
            raise ValueError(f"from_adapters takes a list of adapters, got one path: [{os.fspath(directories)!r}]")
        if not directories:
            raise ValueError("from_adapters got 0 directories: give at least one adapter")
        adapters = [Adapter.read(directory) for directory in directories]
        first = adapters[0]
        for other in adapters[1:]:
            first.check_equal_kind(other)
        fingerprint = base_fingerprint or first.fingerprint or {"weights": None, "config": None, "tokenizer": None}
        layout = Layout(tuple(first.tensors), tuple(tuple(tensor.shape) for tensor in first.tensors.values()))
        theta = torch.stack([layout.flatten(adapter.tensors) for adapter in adapters])
        config = PosteriorConfig(
            task=task or first.task(),
            method={"name": "ensemble", "num_chains": len(adapters), "draws_per_chain": 1},
            approximation="draws",
            parameters=[[name, list(shape)] for name, shape in layout.named_shapes.items()],
            num_members=len(adapters),
            subspace="trainable",
            prior={"name": "unknown"},
            num_data=None,
            data_unit="unknown",
            base_model={
                "name_or_path": first.config.get("base_model_name_or_path"),
                "revision": first.config.get("revision"),
                "dtype": None,
                "fingerprint": dict(fingerprint),
            },
            seed=None,
            diagnostics={"converged": None, "verdict": f"{len(adapters)} adapters trained elsewhere: not assessed"},
        )
        adapter_config = lora_config.from_tensors(first.config, layout.named_shapes, where=first.source)
        return cls(Draws(theta, torch.arange(len(adapters))), config, adapter_config)

    def export_member(self, index: int, directory: str | os.PathLike[str]) -> None:
        """Write one draw as a plain peft adapter folder.

        Raises:
            ValueError: if there is no such draw, the posterior is no adapter's, or the directory is not empty.
        """
        if self.adapter_config is None:
            raise ValueError(f"export_member writes peft adapters; subspace {self.config.subspace!r} is none")
        if not 0 <= index < self.config.num_members:
            raise ValueError(
                f"asked for member {index}, {self.config.num_members} draws are stored"
                + (": save a sample of the Gaussian as Draws first" if not self.config.num_members else "")
            )
        storage.write_plain(directory, self._member_files(self._rows[index]))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        **card: Unpack[CardFields],
    ) -> hub.CommitInfo:
        """Upload the directory, and nothing else. Returns the commit: a text, its address.

        Args:
            repo_id: where to; made if it is not there.
            token: of the Hub; it is used and kept nowhere.
            private: whether a new repository is.
            revision: a branch, made if it is not there, or a pull request (refs/pr/1); the main branch by default.
            commit_message: of the commit.
            card: license, language, datasets, tags and model_name of the model card (``model_card.CardFields``).
        Raises:
            ValueError, OSError: as ``hub.push_directory`` and ``card_fields``.
        """
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory, repo_id=repo_id, **card)
            return hub.push_directory(
                directory,
                repo_id,
                token=token,
                private=private,
                revision=revision,
                commit_message=commit_message,
            )

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> Tensor:
        return self.approximation.theta if isinstance(self.approximation, Draws) else self.approximation.means

    def _check_theta(self) -> None:
        kind = self.approximation.kind
        if kind != self.config.approximation:
            raise ValueError(f"the approximation is {kind}, the config says {self.config.approximation}")
        rows = self._rows
        if rows.shape[1] != self.layout.dim:
            raise ValueError(f"theta has {rows.shape[1]} columns, the parameters have {self.layout.dim} elements")
        if rows.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"theta must be float32 or float64, got {rows.dtype}: lower precision rounds draws away")
        for name, value in self.layout.unflatten(rows).items():
            if not bool(torch.isfinite(value).all()):
                bad = [int(row) for row in (~torch.isfinite(value.flatten(1))).any(1).nonzero()]
                raise ValueError(f"{name} is not finite in members {bad}: they are not saved")
        if isinstance(self.approximation, Draws):
            self._check_distinct()

    def _check_distinct(self) -> None:
        """Equal draws of one chain are a move that was rejected; of two chains they are one chain counted twice."""
        seen: dict[bytes, int] = {}
        chains = self.config.member_chains
        for index, row in enumerate(self._rows.detach().cpu().contiguous()):
            digest = hashlib.sha256(row.numpy()).digest()
            earlier = seen.setdefault(digest, index)
            if chains[earlier] != chains[index]:
                raise ValueError(
                    f"members {earlier} and {index} (chains {chains[earlier]} and {chains[index]}) are equal: chains "
                    "that shared a seed, a checkpoint or an adapter are one chain. Give each its own"
                )

    def _check_adapter_keys(self) -> None:
        keys: dict[str, str] = {}
        for name in self.layout.names:
            other = keys.setdefault(adapter_key(name), name)
            if other != name:
                raise ValueError(f"{other} and {name} would be one tensor {adapter_key(name)!r} of the adapter")
        for key in keys:
            partner = partner_key(key)
            if partner is not None and partner not in keys:
                raise ValueError(
                    f"the parameters hold {key} without {partner}: an adapter of one factor cannot be loaded. Sample "
                    "both, or pass adapter_config=None to store plain tensors"
                )

    def _common_files(self, config: PosteriorConfig, repo_id: str | None, card: CardFields) -> dict[str, Content]:
        """All files but the members'."""
        files: dict[str, Content] = {CONFIG: config.to_dict()}
        if self.trace is not None:
            files[TRACE] = self.trace
        if self.adapter_config is not None:
            files |= self._member_files(self.representative)
        if isinstance(self.approximation, Gaussian):
            files[GAUSSIAN] = gaussian_tensors(self.approximation, self.layout)
        files |= self.sidecars.files
        adapter = self.adapter_config is not None
        files["README.md"] = render_card(config.to_dict(), adapter=adapter, repo_id=repo_id, **card)
        return files

    def _member_files(self, row: Tensor) -> dict[str, Content]:
        return posterior_files.of_member(row, self.layout, self.adapter_config)
