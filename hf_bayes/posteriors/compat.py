"""The private names of huggingface_hub that the package reads."""

from __future__ import annotations

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from hf_bayes.core.compat import PrivateName

NAMES = (PrivateName("huggingface_hub.utils._validators", "validate_repo_id", ("repo_id",), "called"),)
"""The private names of huggingface_hub."""


def is_repo_id(name: str) -> bool:
    """Return whether a name has the form of a repository id of the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
