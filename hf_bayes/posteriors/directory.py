"""The files of a posterior's directory: their names, and the conversion between files and the parts of a posterior.

::

    README.md  posterior_config.json  manifest.json
    adapter_config.json  adapter_model.safetensors        LoRA: a plain peft adapter, see ``Posterior.representative``
    members/member_000/...                                Draws: each a plain peft adapter (else model.safetensors)
    covariance.safetensors                                Gaussian: means and covariances by parameter name
    student.safetensors                                   the head of a distilled student
    trace.json                                            the log of the chains of a run, for plots
    tokenizer.json, chat_template.jinja, ...              sidecars: tokenizer, processor, generation config
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from statistics import mode
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.core.layout import Layout
from hf_bayes.distributions.approximations import GAUSSIANS, Draws, Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, check_shapes
from hf_bayes.posteriors import lora_config
from hf_bayes.posteriors.config import CONFIG, PosteriorConfig
from hf_bayes.posteriors.file_formats import ADAPTER, ADAPTER_CONFIG
from hf_bayes.posteriors.lora_keys import adapter_keys
from hf_bayes.posteriors.sidecars import Sidecars, is_sidecar
from hf_bayes.posteriors.storage import Content
from hf_bayes.posteriors.storage.formats import bytes_in
from hf_bayes.posteriors.storage.listing import shown
from hf_bayes.posteriors.storage.read import Shapes
from hf_bayes.posteriors.student import STUDENT, student_shapes

TENSORS = "model.safetensors"
GAUSSIAN = "covariance.safetensors"
TRACE = "trace.json"


_NO_SIDECARS = Sidecars()


class Parts(NamedTuple):
    """The parts of a ``Posterior``; its docstring describes them."""

    approximation: Draws | Gaussian
    config: PosteriorConfig
    adapter_config: dict[str, Any] | None
    trace: dict[str, Any] | None = None
    sidecars: Sidecars = _NO_SIDECARS
    student: dict[str, Tensor] | None = None


def member_files(row: Tensor, layout: Layout, adapter_config: dict[str, Any] | None) -> dict[str, Content]:
    """Return the files of one model, ``row`` [d] of theta: a plain peft adapter, or plain tensors."""
    tensors = layout.unflatten(row)
    if adapter_config is None:
        return {TENSORS: tensors}
    keys = adapter_keys(tensors)
    return {ADAPTER_CONFIG: adapter_config, ADAPTER: {keys[name]: tensor for name, tensor in tensors.items()}}


def member_folder(index: int) -> str:
    """Return the folder of a draw."""
    return f"members/member_{index:03d}"


def expected_shapes(contents: Mapping[str, Any], names: list[str]) -> Shapes:
    """Return the tensors that each safetensors file must hold, by the JSON files. A covariance has a check instead.

    Args:
        contents: name -> content of the JSON files.
        names: the names of all files.
    Raises:
        ValueError: if files are missing, or do not fit one another.
    """
    if CONFIG not in names:
        raise ValueError(f"the manifest lists no {CONFIG}: it is not a posterior")
    config = PosteriorConfig.from_dict(contents[CONFIG])
    if config.approximation == "draws" and not config.member_chains:
        raise ValueError(f"{CONFIG}: member_chains is empty for {config.num_members} members")
    if config.num_members > len(names):
        raise ValueError(f"{CONFIG} has {config.num_members:,} members, in a directory of {len(names):,} files")
    adapter_config = contents.get(ADAPTER_CONFIG)
    expected = _expected_names(config, adapter=adapter_config is not None)
    own = {name for name in names if not is_sidecar(name)}
    missing, extra = sorted(expected - own), sorted(own - expected - {TRACE})
    if missing or extra:
        raise ValueError(
            f"the files do not fit {CONFIG} ({config.approximation}, {config.num_members} members): "
            f"missing {shown(missing)}, extra {shown(extra)}"
        )
    found = config.layout.named_shapes
    if adapter_config is not None:
        lora_config.explicit(lora_config.for_inference(adapter_config), found)
        for index in range(config.num_members):
            name = f"{member_folder(index)}/{ADAPTER_CONFIG}"
            if contents[name] != adapter_config:
                raise ValueError(f"{name} differs from {ADAPTER_CONFIG}: all members are one kind of adapter")
        found = {key: found[name] for name, key in adapter_keys(found).items()}
    shapes: dict[str, Any] = {name: found for name in names if name.endswith((ADAPTER, TENSORS))}
    if config.approximation in GAUSSIANS:
        shapes[GAUSSIAN] = functools.partial(_check_header, config=config)
    return shapes | ({STUDENT: student_shapes(config.student)} if config.student else {})


def read_parts(contents: Mapping[str, Any]) -> Parts:
    """Return the parts of a posterior from the files that ``storage.read_directory`` has read. Sidecars are bytes.

    Raises:
        ValueError: if the files do not fit together, naming the first that does not.
    """
    sidecars = Sidecars(bytes_in(contents))
    files = {name: content for name, content in contents.items() if name not in sidecars.files}
    config = PosteriorConfig.from_dict(files[CONFIG])
    adapter_config = files.get(ADAPTER_CONFIG)
    theta_of = _reader(files, config, adapter=adapter_config is not None)
    approximation: Draws | Gaussian
    if config.approximation == "draws":
        file = ADAPTER if adapter_config is not None else TENSORS
        rows = [theta_of(f"{member_folder(i)}/{file}") for i in range(config.num_members)]
        if len({row.dtype for row in rows}) > 1:
            raise ValueError(f"members have different dtypes: {[str(row.dtype) for row in rows]}")
        approximation = Draws(torch.stack(rows), torch.tensor(config.member_chains, dtype=torch.int64))
    else:
        approximation = _gaussian(files[GAUSSIAN], config)
    if adapter_config is not None and not torch.equal(theta_of(ADAPTER), approximation.rows[0]):
        raise ValueError(f"{ADAPTER} is not the mean or first member that the other files hold")
    return Parts(approximation, config, adapter_config, files.get(TRACE), sidecars, files.get(STUDENT))


def fingerprint_of(contents: Mapping[str, Any]) -> str:
    """Return ``Posterior.fingerprint`` from the files that ``storage.read_directory`` has read.

    Raises:
        ValueError: as ``read_parts``.
    """
    approximation, config, *_ = read_parts(contents)
    return fingerprint_tensors(approximation.tensors(config.layout).items())


def _expected_names(config: PosteriorConfig, *, adapter: bool) -> set[str]:
    files = {ADAPTER_CONFIG, ADAPTER} if adapter else {TENSORS}
    expected = {CONFIG} | (files if adapter else set()) | ({STUDENT} if config.student else set())
    if config.approximation in GAUSSIANS:
        return expected | {GAUSSIAN}
    return expected | {f"{member_folder(index)}/{name}" for index in range(config.num_members) for name in files}


def _reader(files: Mapping[str, dict[str, Any]], config: PosteriorConfig, *, adapter: bool) -> Callable[[str], Tensor]:
    """Return a function from the name of a file to its row of theta."""
    layout = config.layout
    keys = adapter_keys(layout.names) if adapter else {name: name for name in layout.names}
    names = {key: name for name, key in keys.items()}

    def theta_of(file: str) -> Tensor:
        tensors = files[file]
        _check_dtypes(file, tensors)
        return layout.flatten({names[key]: tensor for key, tensor in tensors.items()})

    return theta_of


def _gaussian(tensors: Mapping[str, Tensor], config: PosteriorConfig) -> Gaussian:
    layout = config.layout
    structure = COVARIANCES[GAUSSIANS[config.approximation]]
    _check_dtypes(GAUSSIAN, tensors)
    try:
        rest = _check_gaussian(tensors, config)
        rows = layout.flatten({name: tensors[f"means.{name}"] for name in layout.names})
        covariances = [
            structure.from_tensors({name: value[index] for name, value in rest.items()}, layout)
            for index in range(len(rows))
        ]
        return Gaussian(rows, tuple(covariances))
    except ValueError as error:
        raise ValueError(f"{GAUSSIAN}: {error}") from error


def _check_gaussian(tensors: Mapping[str, Tensor], config: PosteriorConfig) -> dict[str, Tensor]:
    """Check names and shapes of the tensors of Gaussians, and return those of the covariances. No values are read."""
    layout = config.layout
    means = {f"means.{name}": shape for name, shape in layout.named_shapes.items()}
    rest = {name: value for name, value in tensors.items() if name not in means}
    num_components = mode(value.shape[:1] for value in tensors.values())  # a different one is wrong
    structure = COVARIANCES[GAUSSIANS[config.approximation]]
    check_shapes(tensors, means | structure.shapes(rest, layout), num_components)
    return rest


def _check_header(header: Mapping[str, Any], *, config: PosteriorConfig) -> None:
    """Check the header of the file of a Gaussian.

    Raises:
        ValueError: for other tensors than the structure has, or more numbers than a covariance can have.
    """
    try:
        tensors = {name: torch.empty(entry["shape"], device="meta") for name, entry in header.items()}
        _check_gaussian(tensors, config)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{GAUSSIAN}: {error}") from error
    dim, found = config.layout.dim, sum(tensor.numel() for tensor in tensors.values())
    num_components = len(next(iter(tensors.values())))  # all tensors have as many
    most = num_components * (2 * dim**2 + 3 * dim)  # two bases of dim columns at most, mean, stds and scales
    if found > most:
        raise ValueError(f"{GAUSSIAN} holds {found:,} numbers, expected at most {most:,} for {dim:,} parameters")


def _check_dtypes(file: str, tensors: Mapping[str, Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        odd = {key: str(tensor.dtype) for key, tensor in tensors.items() if tensor.dtype != torch.float32}
        found = [f"{key} in {dtype}" for key, dtype in odd.items()]
        raise ValueError(f"{file}: expected all tensors in float32 (or all in float64), got {shown(found)}")
