"""The likelihoods that a saved posterior may name. A posterior stores a name and JSON fields, never code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.weighted import Weighted

LIKELIHOODS: dict[str, type[LikelihoodConfig]] = {
    kind.name: kind for kind in (BradleyTerry, Heteroscedastic, MixtureDensity, Ordinal, Poisson, Weighted)
}
"""Name -> class."""

Kind = TypeVar("Kind", bound=type[LikelihoodConfig])


def register_likelihood(kind: Kind) -> Kind:
    """Register a class of likelihoods under its ``name``, so that posteriors with it can be loaded.

    Use it as a decorator above ``@dataclass(frozen=True)``, in a module that is imported before a posterior is loaded.

    Raises:
        ValueError: for a class that is no frozen dataclass, has no name, or takes the name of another class.
    """
    if not (isinstance(kind, type) and issubclass(kind, LikelihoodConfig)):
        raise ValueError(f"register_likelihood takes a subclass of CustomLikelihood, got {kind!r}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"{kind.__name__} needs a name in lower case, such as name: ClassVar[str] = 'my_noise', got {name!r}"
        )
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or "__dataclass_fields__" not in vars(kind):
        raise ValueError(f"{kind.__name__} must be a frozen dataclass: put @dataclass(frozen=True) above the class")
    known = LIKELIHOODS.get(name)
    # a module that is run again (a notebook, a reload) defines the same class anew
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(
            f"the name {name!r} belongs to {known.__module__}.{known.__qualname__}: give {kind.__name__} another name"
        )
    LIKELIHOODS[name] = kind
    return kind


def likelihood_from(stored: Any, *, given: LikelihoodConfig | None = None) -> LikelihoodConfig:
    """Return the likelihood of a stored name with its fields.

    Args:
        stored: ``LikelihoodConfig.to_dict()``, as read from a file.
        given: the user's likelihood, which need not be registered, but must be the stored one.
    Raises:
        ValueError: for a name that is not registered, unknown or invalid fields, or another likelihood.
    """
    if not isinstance(stored, Mapping) or not isinstance(stored.get("name"), str):
        raise ValueError(f"a posterior's likelihood must be an object with a name, got {stored!r:.100}")
    if given is not None:
        if given.to_dict() != dict(stored):
            raise ValueError(
                f"the posterior has the likelihood {dict(stored)}, got {given.to_dict()}: the members were trained "
                "with the first. Leave likelihood= out, or give the same one"
            )
        return given
    name = stored["name"]
    if name not in LIKELIHOODS:
        raise ValueError(
            f"the posterior's likelihood {name!r:.100} is not registered; known are {', '.join(sorted(LIKELIHOODS))}. "
            "A posterior brings no code: import the module that defines it, with @register_likelihood above the class, "
            "or give it as likelihood="
        )
    kind, fields = LIKELIHOODS[name], {key: value for key, value in stored.items() if key != "name"}
    known = {field.name for field in dataclasses.fields(kind)} - {"name"}  # type: ignore[arg-type]
    if fields.keys() != known:
        raise ValueError(
            f"the posterior's likelihood {name} has the fields {sorted(fields)}, expected {sorted(known)}: use the "
            "version of the likelihood that wrote it"
        )
    try:
        return kind(**{key: _field(value) for key, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"the posterior's likelihood {name} has invalid fields {fields}: {error}") from error


def _field(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return likelihood_from(value) if isinstance(value, Mapping) else value
