"""Errors of Bayesian models: wrong shapes, compiling, saving or changing as an ordinary model, language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_bayes.core.layout import Layout, decoder_blocks
from hf_bayes.members.compat.transformers import CACHE, takes_cache
from hf_bayes.models.predictors import Predictor

_ANSWER_NO_CACHE = ("recurrent_gemma", "xlm", "flaubert")
"""Model types that take a cache, and keep what counts in their layers or predict at a mask token."""

CHANGES_OF_THE_BASE = (
    "add_adapter", "load_adapter", "delete_adapter", "resize_token_embeddings", "resize_position_embeddings",
    "set_input_embeddings", "set_output_embeddings", "set_encoder", "set_decoder",
)  # fmt: skip
"""Methods of transformers that would change the model inside a Bayesian model."""


def refuse_theta(layout: Layout, theta: Tensor, statistics: Layout) -> None:
    """Raise if ``theta`` is not a matrix [M, d] of float32 or float64.

    Args:
        statistics: the layout of the statistics of batch normalisation, which draws may hold behind their parameters.
    """
    wide = theta.dtype in (torch.float32, torch.float64)
    if wide and theta.ndim == 2 and theta.shape[1] == layout.dim + statistics.dim > layout.dim:
        raise ValueError(
            f"theta has {theta.shape[1]} columns, {layout.dim} random parameters and {statistics.dim} statistics of "
            f"batch normalisation (first {statistics.names[0]}), which are no parameters: theta of a model is trained, "
            f"and they belong to finished draws. Call attach(model, theta[:, :{layout.dim}]), and give all columns to "
            "its show(theta)"
        )
    if not wide or theta.ndim != 2 or len(theta) == 0 or theta.shape[1] != layout.dim:
        raise ValueError(
            f"theta must be float32 or float64 [members, {layout.dim}] ({len(layout.names)} random tensors), "
            f"got {theta.dtype} {list(theta.shape)}"
        )


def refuse_layer_outputs(inputs: dict[str, Any]) -> None:
    """Take the arguments for hidden states and attentions out of the inputs.

    Raises:
        ValueError: if one is asked for, because these differ from member to member.
    """
    asked = [name for name in ("output_hidden_states", "output_attentions") if inputs.pop(name, None)]
    if asked:
        raise ValueError(
            f"{', '.join(asked)}: hidden states and attentions differ from member to member: ask members of "
            "`model.core`"
        )


def refuse_distilled(predictor: Predictor) -> None:
    """Raise if a model predicts by the student of its posterior, since it holds no members then."""
    if predictor.imitates is not None:
        raise ValueError(
            "this model was loaded with prediction='distilled' and holds one network: load the posterior again to "
            "predict by its members or linearised"
        )


def refuse_likelihood(likelihood: object, kind: str) -> None:
    """Raise if a likelihood is given for a model that has one of its own.

    Args:
        kind: the kind of the model, in words.
    """
    if likelihood is not None:
        raise ValueError(
            f"likelihood={likelihood!r:.100} is for models that answer whole inputs, and the likelihood of {kind} is "
            "the categorical one: leave likelihood out"
        )


def refuse_other_likelihood(likelihood: object, model: Any) -> None:
    """Raise if a likelihood is given beside a Bayesian model that has another one."""
    if likelihood is not None and likelihood != model.likelihood.config:
        raise ValueError(
            f"likelihood={likelihood!r:.100} is given with a BayesianModel, which has one of its own "
            f"({model.likelihood.name}): leave it out here, and give it to attach(...)"
        )


def refuse_settings(names: Iterable[str], auto_class: Any) -> None:
    """Raise a TypeError for keywords of ``from_pretrained`` that it does not take.

    Args:
        names: the names of the keywords.
        auto_class: the auto class of transformers that loads the base model.
    """
    names = list(names)
    if "torch_dtype" in names:
        raise TypeError("from_pretrained has no argument torch_dtype: give dtype=, the newer name of transformers")
    if names:
        settings = ", ".join(f"{name}=..." for name in names)
        raise TypeError(
            f"from_pretrained has no argument {', '.join(names)}: check the spelling. A setting of the base model "
            f"belongs to the base model: give base_model={auto_class.__name__}.from_pretrained(name, {settings})"
        )


def refuse_compiling(model: Any) -> None:
    """Raise if torch compiles the calling model, a Bayesian model, as a whole."""
    if torch.compiler.is_compiling():
        _raise_outside_of_the_graph(model)


def _raise_compiling(model: Any) -> None:
    raise ValueError(
        "a model with a member axis cannot be compiled as a whole: members, trunk and head exchange forwards while it "
        f"runs. Compile its blocks in place: {compiling_blocks(model.core, 'model.core')}"
    )


def compiling_blocks(core: nn.Module, name: str) -> str:
    """Return the line of code that compiles the blocks of a model in place.

    Args:
        core: the transformers model.
        name: the words for ``core`` in this line.
    """
    found = decoder_blocks(core)
    if found is None:
        return f"block.compile() for each block of {name}"
    return f"for block in {name}.{found[0]}: block.compile()"


_disable: Any = torch.compiler.disable  # untyped in torch
_raise_outside_of_the_graph = _disable(_raise_compiling)


def refuse_saving(model: object, *args: object, **kwargs: object) -> NoReturn:
    """Raise: ``save_pretrained`` of the model would save none of its members."""
    raise ValueError(
        "a BayesianModel is saved as a posterior: BayesianTrainer.save_model(), or Posterior.save_pretrained()"
    )


def refuse_pushing(model: object, *args: object, **kwargs: object) -> NoReturn:
    """Raise: ``push_to_hub`` of the model would create a repository before it calls ``save_pretrained``."""
    raise ValueError(
        "a BayesianModel is pushed as a posterior: BayesianTrainer.push_to_hub(), or Posterior.push_to_hub(), of a "
        "loaded model model.posterior.push_to_hub()"
    )


def refusal_of(name: str) -> Callable[..., NoReturn]:
    """Return the method that stands in place of a method of ``CHANGES_OF_THE_BASE``."""

    def refuse(model: object, *args: object, **kwargs: object) -> NoReturn:
        """Raise: the method would change the model inside, and with it the predictions of all members."""
        raise ValueError(
            f"{name} would change the model inside a BayesianModel, and its members belong to that model as it is. "
            "Call detach(), change the model that it returns, save it, and attach to it again"
        )

    refuse.__name__ = name
    return refuse


def refuse_bidirectional(core: nn.Module) -> None:
    """Raise for an encoder with the head of a language model, whose positions see the tokens that they predict."""
    config: Any = getattr(core, "config", None)
    if getattr(config, "is_decoder", True) is False and not config.model_type.startswith("gpt_neox"):
        raise ValueError(
            f"{type(core).__name__} has is_decoder=False, so that each position sees the tokens it predicts: as a "
            "causal language model load it with is_decoder=True"
        )


def refuse_hidden_state(core: nn.Module) -> None:
    """Raise for models whose state between tokens is not in a cache that can be dealt to members."""
    if not isinstance(core, PreTrainedModel):
        return
    if not takes_cache(core):
        what = f"takes no {CACHE}"
    elif core.config.model_type in _ANSWER_NO_CACHE:
        what = f"returns no {CACHE}"
    else:
        return
    raise ValueError(
        f"{type(core).__name__} {what}: models that keep their state elsewhere (RecurrentGemma in its layers, Mamba "
        "before transformers 5.24 as cache_params) or nowhere are not supported as causal language models. Take one "
        "with a cache (docs/models.md)"
    )
