"""Check the trainers that the mixin extends: their loss must be the negative log-likelihood of the labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, Trainer

from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences

_LOSS_METHODS = ("compute_loss", "training_step", "train")
"""Methods in which a trainer defines what a step optimises. The mixin's own take their place."""
_OF_TRL = ("SFTTrainer", "RewardTrainer", "DPOTrainer")
"""The trainers of TRL whose loss is the negative log-likelihood of their rows."""
_OF_DPO: dict[str, tuple[Any, str]] = {
    "loss_type": (["sigmoid"], "no other loss is the negative log-likelihood of a preference that TRL's steps follow"),
    "loss_weights": (None, "a weighted likelihood is none; set the temperature of the method"),
    "f_divergence_type": ("reverse_kl", "rewards of another divergence are not supported"),
    "ld_alpha": (None, "answers have a probability only with all of their tokens"),
    "label_smoothing": (0.0, "smoothed labels have no likelihood, and TRL's sigmoid loss does not read it"),
    "use_weighting": (False, "weights that depend on the weights of the model make the loss no log-likelihood"),
    "sync_ref_model": (False, "a reference that follows the chains would change their target in every update"),
}
"""Arguments of DPOConfig that change the likelihood -> the value that is supported, and why no other is."""
OTHER_LOSS = (
    "For a classifier or a regression give likelihood=hf_bayes.Weighted() for weights of rows or classes, read from a "
    "column, or a likelihood of your own (docs/likelihoods.md); a language model takes no other likelihood"
)
"""The advice of errors about a user's loss."""
_OWN_OPTIMIZER = (
    "the method is the optimizer, and training would take no more than a learning rate from another. Leave it out, set "
    "learning_rate in the arguments, and the rest in the method's config"
)
_REFUSED_HOOKS = {
    "compute_loss": (
        "training does not call it: the chains use the log-likelihood of the labels. Leave it out. " + OTHER_LOSS
    ),
    "get_train_dataloader": (
        "each chain takes rows of its own, and the scale of the likelihood counts them, so other batches would be "
        "another posterior. Leave it out: give the rows as train_dataset=, and what makes a batch as data_collator="
    ),
    "_get_train_sampler": (
        "training does not call it: each chain takes the rows in permutations of its own. Leave it out. For rows or "
        "classes that count more, give likelihood=hf_bayes.Weighted() and their weights in a column "
        "(docs/likelihoods.md)"
    ),
    "create_optimizer": _OWN_OPTIMIZER,
    "create_optimizer_and_scheduler": _OWN_OPTIMIZER,
    "get_optimizer_cls_and_kwargs": _OWN_OPTIMIZER,
    "create_scheduler": (
        "it would replace the method's schedule, or exceed the peak that frictions are fixed for. Leave it out, and "
        "set lr_scheduler_type and lr_scheduler_kwargs in the arguments"
    ),
}
"""Methods of Trainer that a class of the user must not have -> why, and what to do instead."""
_TEMPLATE_FILES = (".jinja", ".j2")
_TAKEN_OVER = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "use_cache"})
"""Fields of a model's config that a trainer sets and that stay: special tokens are the tokenizer's."""


def refuse_order(trainer: type, mixin: type) -> None:
    """Raise if a class has a trainer of transformers or TRL before the mixin, which then gets arguments of the mixin.

    Args:
        trainer: the class that is being defined.
        mixin: the class of ours.
    """
    before = trainer.__mro__[: trainer.__mro__.index(mixin)]
    if any(issubclass(kind, Trainer) and _name_of(kind)[0] in ("transformers", "trl") for kind in before):
        hosts = [base.__name__ for base in trainer.__bases__ if not issubclass(base, mixin)]
        raise ValueError(
            f"the bases of {trainer.__name__} have {mixin.__name__} after the trainer that it extends: write "
            f"class {trainer.__name__}({', '.join([mixin.__name__, *hosts])})"
        )


def refuse_foreign_methods(trainer: type, mixin: type) -> None:
    """Raise if a class before or after the mixin defines a loss, batches or an optimizer of its own.

    A method before the mixin would change the target without a word; one after the mixin would never be called.
    transformers' trainers and TRL's SFTTrainer minimise the negative log-likelihood of labels, as the mixin does, and
    TRL's RewardTrainer and DPOTrainer that of preferences. A loss of a policy or a teacher is another one, under any
    name.

    Args:
        trainer: the class that is being made.
        mixin: the class of ours that comes before the host's.
    """
    place = trainer.__mro__.index(mixin)
    for kind in trainer.__mro__[:place]:
        _refuse_hooks(kind)
    for host in trainer.__mro__[place + 1 :]:
        if _minimises_likelihood(host):
            continue
        if own := [name for name in _LOSS_METHODS if name in vars(host)]:
            raise ValueError(
                f"{host.__name__} ({host.__module__}) defines a loss of its own ({', '.join(own)}), whose likelihood "
                "is not supported: the posterior would be of the labels' likelihood instead. Use transformers' Trainer "
                "or TRL's SFTTrainer, RewardTrainer or DPOTrainer. A class of yours that changes no loss goes before "
                "the mixin BayesianTrainerMixin"
            )
        _refuse_hooks(host)


def _refuse_hooks(kind: type) -> None:
    """Raise if a class defines a method of Trainer in ``_REFUSED_HOOKS``."""
    for name, advice in _REFUSED_HOOKS.items():
        if name in vars(kind):
            raise ValueError(f"{kind.__name__} ({kind.__module__}) overrides {name}, which is refused: {advice}")


def likelihood_for(
    trainer: type, given: LikelihoodConfig | None, args: Any, kwargs: Mapping[str, Any] | None = None
) -> LikelihoodConfig | None:
    """Return the likelihood of a trainer: the user's, or for TRL's RewardTrainer and DPOTrainer that of preferences.

    Args:
        kwargs: the other arguments for the host trainer's ``__init__``.
    Raises:
        ValueError: for another likelihood with these trainers, and for a part of their loss that is no likelihood.
    """
    if is_dpo(trainer):
        return _direct_preferences(given, args, kwargs or {})
    if not any(_name_of(kind) == ("trl", "RewardTrainer") for kind in trainer.__mro__):
        return given
    if given is not None and not isinstance(given, BradleyTerry):
        raise ValueError(
            f"likelihood={given!r:.100} is given to TRL's RewardTrainer, whose rows are preferences: leave it out, or "
            "use BayesianTrainer"
        )
    centre = getattr(args, "center_rewards_coefficient", None)
    if centre:
        raise ValueError(
            f"center_rewards_coefficient={centre} is refused, expected None: it is no part of the likelihood of "
            "preferences. The prior bounds the rewards, and RewardModel centres them (docs/rewards.md)"
        )
    return given or BradleyTerry()


def is_dpo(trainer: type) -> bool:
    """Return whether a class is TRL's DPOTrainer, or derived from it."""
    return any(_name_of(kind) == ("trl", "DPOTrainer") for kind in trainer.__mro__)


def host_config(trainer: type) -> str | None:
    """Return the name of the config that a trainer of TRL needs, such as SFTConfig; None for other trainers."""
    names = (name for package, name in map(_name_of, trainer.__mro__) if package == "trl" and name in _OF_TRL)
    found = next(names, None)
    return None if found is None else found.replace("Trainer", "Config")


def has_config(args: type, config: str | None) -> bool:
    """Return whether a class of arguments derives from TRL's config of that name; None needs none."""
    return config is None or ("trl", config) in map(_name_of, args.__mro__)


def _direct_preferences(given: LikelihoodConfig | None, args: Any, kwargs: Mapping[str, Any]) -> DirectPreferences:
    """Return the likelihood of DPOTrainer's arguments."""
    if given is not None:
        raise ValueError(
            f"likelihood={given!r:.100} is given to TRL's DPOTrainer, whose likelihood follows from its arguments "
            "(beta): leave it out"
        )
    for name, (expected, why) in _OF_DPO.items():
        value = getattr(args, name, expected)
        if value != expected:
            raise ValueError(f"{name}={value!r} is refused with DPO, expected {expected!r}: {why} (docs/dpo.md)")
    reference = kwargs.get("ref_model")
    if reference is None:
        return DirectPreferences(beta=args.beta)
    name = getattr(getattr(reference, "config", None), "name_or_path", "")
    return DirectPreferences(beta=args.beta, reference=name or type(reference).__name__)


def refuse_loss_settings(args: Any) -> None:
    """Raise for settings of TRL's configs that ask for another loss, or that come too late for an attached model."""
    loss, coefficient = getattr(args, "loss_type", "nll"), getattr(args, "router_aux_loss_coef", None)
    if loss not in ("nll", "chunked_nll") and not isinstance(loss, list):  # DPO has a list, see likelihood_for
        raise ValueError(f"loss_type={loss!r} is refused, expected 'nll': no other loss is a log-likelihood")
    if coefficient:
        raise ValueError(
            f"router_aux_loss_coef={coefficient} is refused, expected None or 0: a loss that balances experts is no "
            "part of the likelihood. Leave it out"
        )
    if getattr(args, "activation_offloading", False):
        raise ValueError(
            "activation_offloading=True is refused, expected False: the chains move outside of TRL's training step, so "
            "nothing is offloaded. Set gradient_checkpointing=True, or a smaller members_per_pass"
        )
    template = getattr(args, "chat_template_path", None)
    if template is not None and Path(template).suffix not in _TEMPLATE_FILES:
        raise ValueError(
            f"chat_template_path={template!r} is refused, expected a file {' or '.join(_TEMPLATE_FILES)}: the template "
            "of another tokenizer adds tokens, and the embeddings of a model with a member axis cannot grow. Call "
            "trl.clone_chat_template(model, tokenizer, path) before the trainer is made"
        )


@contextmanager
def config_kept(config: PreTrainedConfig) -> Iterator[None]:
    """Undo, at the end of the block, the changes that a host's ``__init__`` makes to the model's config.

    Special tokens stay as the host sets them, unless the block raises.

    TRL switches the loss on that balances experts. It is never used here, but the fingerprint of the posterior would
    be that of another configuration than its base has.
    """
    parts = [config] if config.get_text_config() is config else [config, config.get_text_config()]
    before = [dict(vars(part)) for part in parts]
    try:
        yield
    except BaseException:
        _restore(parts, before, except_for=frozenset())
        raise
    _restore(parts, before, except_for=_TAKEN_OVER)


def _restore(parts: list[PreTrainedConfig], before: list[dict[str, Any]], *, except_for: frozenset[str]) -> None:
    for part, values in zip(parts, before, strict=True):
        for name in vars(part).keys() - except_for:
            if name not in values:
                delattr(part, name)
            elif getattr(part, name) is not values[name]:
                setattr(part, name, values[name])


def _minimises_likelihood(host: type) -> bool:
    package, name = _name_of(host)
    return package in ("hf_bayes", "transformers") or (package == "trl" and name in _OF_TRL)


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__.partition(".")[0], kind.__name__
