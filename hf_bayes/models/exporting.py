"""One network of a posterior as an ordinary model or a plain peft adapter, for users without hf_bayes.

Such a network is one plausible model. It has no epistemic uncertainty, and its predictions are not the posterior's.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_bayes.distributions.approximations import Draws
from hf_bayes.models.loading.posterior import loaded
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.directory import member_files
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import disk
from hf_bayes.posteriors.tasks import TASKS


def network_of_draw(posterior: Posterior, member: int) -> Tensor:
    """Return the parameters [d] of a stored draw.

    Raises:
        ValueError: if there is no such draw.
    """
    count = posterior.config.num_members
    what = posterior.source or "this posterior"
    if not count:
        raise ValueError(f"{what} is a Gaussian and stores no draws: export its mean, or draws with custom_generate")
    if not 0 <= member < count:
        raise ValueError(f"{what} has no member {member}, expected 0 to {count - 1}")
    return posterior.approximation.rows[member]


def network_of_mean(posterior: Posterior) -> Tensor:
    """Return the mean [d] of a Gaussian posterior.

    Raises:
        ValueError: for draws or a mixture of Gaussians, whose mean is the network of no draw.
    """
    approximation, what = posterior.approximation, posterior.source or "this posterior"
    if isinstance(approximation, Draws):
        kind = "holds draws"
    elif len(approximation.means) > 1:
        kind = "is a mixture of several Gaussians"
    else:
        return approximation.means[0]
    raise ValueError(
        f"{what} {kind}: the mean of networks that were trained apart is no good network. Export one draw of "
        "draws (--member), or all members (--custom_generate)"
    )


def export_adapter(posterior: Posterior, network: Tensor, directory: str | os.PathLike[str]) -> None:
    """Write a network [d] as a plain peft adapter.

    Raises:
        ValueError: if the random parameters are not an adapter's, or the directory is not empty.
    """
    if posterior.adapter_config is None:
        raise ValueError(
            f"the random parameters of {posterior.source or 'this posterior'} ({posterior.config.subspace}) are no "
            "adapter: export a model"
        )
    storage.write_plain(directory, member_files(network, posterior.layout, posterior.adapter_config))


def export_model(
    posterior: Posterior,
    network: Tensor,
    directory: str | os.PathLike[str],
    *,
    base_model: str | os.PathLike[str] | None = None,
) -> None:
    """Write a network [d] as an ordinary model with its tokenizer: the base model with these weights, adapter merged.

    Merged weights are rounded to the dtype of the base model.

    Args:
        base_model: another path or name of the base model; None means the recorded name.
    Raises:
        ValueError: for a quantised base model, whose weights cannot take an adapter up without an error, for a
            tokenizer that names code of another repository than the base model, and if the directory is not empty.
        OSError: if the directory cannot be written. No file is left then.
    """
    storage.check_new(directory)
    if "quantization_config" in posterior.config.head:
        raise ValueError(
            f"the base model of {posterior.source or 'this posterior'} is quantised, and an adapter cannot be merged "
            "into it without an error: export the adapter"
        )
    base = base_model or posterior.config.base_model["name_or_path"] or None
    with posterior.sidecars.folder(code_from=None if base is None else str(base)) as sidecars:
        files = {name: (sidecars / name).read_bytes() for name in posterior.sidecars.files}
    model = merged(posterior, network, base_model=base_model)
    with storage.new_directory(directory) as staging:
        model.save_pretrained(staging)
        for name, data in files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # the model's generation config: the posterior's replaces it
            disk.write(path, data)


@torch.no_grad()
def merged(posterior: Posterior, network: Tensor, *, base_model: Any = None) -> PreTrainedModel:
    """Return the base model with the weights of a network [d], an adapter merged into it."""
    task = TASKS[posterior.config.task]
    with loaded(
        posterior, task.name, getattr(transformers, task.auto_class), members=None, location={}, dtype=None,
        device_map=None, trust_remote_code=False, base_model=base_model, check_base=True,
    ) as (model, layout, *_):  # fmt: skip
        # theta also holds the statistics of random batch normalisation, which are buffers
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        for name, value in layout.unflatten(network).items():
            tensors[name].copy_(value)
        if isinstance(model, PeftModel):
            _give_head_its_weight(model)
        whole = model.merge_and_unload(safe_merge=True) if isinstance(model, PeftModel) else model
        found = cast(PreTrainedModel, whole)
        _untie(found)
    return found


def _give_head_its_weight(model: PeftModel) -> None:
    """Give the head a weight of its own, if it is the embedding's and one of both has an adapter.

    The merge adds the adapter to the weight, so it would change the other one, too.
    """
    core: Any = model.get_base_model()
    if core.get_output_embeddings() is None:  # models of images and audio may lack get_input_embeddings, too
        return
    found = [core.get_output_embeddings(), core.get_input_embeddings()]
    head, embedding = layers = [part.base_layer if hasattr(part, "base_layer") else part for part in found]
    if layers != found and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _untie(model: PreTrainedModel) -> None:
    """Record in the config that the head is a tensor of its own, if the posterior made it one."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Module) and getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
