"""Small posteriors that need no model: names and shapes as peft gives them."""

from __future__ import annotations

from typing import Any

import torch

from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.posterior import Posterior

LORA = [
    ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", [2, 6]],
    ["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight", [6, 2]],
    ["base_model.model.score.modules_to_save.default.weight", [3, 6]],
]
PLAIN = [["lm_head.weight", [5, 4]], ["norm.weight", [4]], ["scale", []]]
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "SEQ_CLS",
    "base_model_name_or_path": "someone/base",
    "revision": None,
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "modules_to_save": ["score"],
    "inference_mode": True,
}


def config(**changes: Any) -> PosteriorConfig:
    values = {
        "task": "sequence_classification",
        "method": {"name": "sghmc", "num_chains": 4, "draws_per_chain": 1, "temperature": 1.0, "prior_std": 1.0},
        "approximation": "draws",
        "parameters": PLAIN,
        "num_members": 3,
        "subspace": "trainable",
        "prior": {"name": "gaussian", "std": 1.0},
        "num_data": 1234.0,
        "data_unit": "example",
        "base_model": {
            "name_or_path": "someone/base",
            "revision": "main",
            "dtype": "float32",
            "fingerprint": {"weights": "ab12", "config": "cd34", "tokenizer": None},
        },
        "seed": 7,
        "diagnostics": {"converged": True, "verdict": "chains agree", "r_hat": 1.004},
        "metrics": {"nll": 0.432, "accuracy": 0.81, "map_nll": 0.437},
    }
    return PosteriorConfig(**{**values, **changes})


def theta(rows: int, parameters: list[list[Any]], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = sum(int(torch.tensor(shape).prod()) if shape else 1 for _, shape in parameters)
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draws(members: int = 3, *, adapter: bool = False, seed: int = 0, **changes: Any) -> Posterior:
    parameters = LORA if adapter else PLAIN
    return Posterior(
        Draws(theta(members, parameters, seed), torch.arange(members)),
        config(parameters=parameters, num_members=members, seed=seed, **changes),
        ADAPTER_CONFIG if adapter else None,
    )


def gaussian(components: int = 1, *, adapter: bool = False, seed: int = 0, **changes: Any) -> Posterior:
    parameters = LORA if adapter else PLAIN
    means = theta(components, parameters, seed)
    return Posterior(
        Gaussian.diagonal(means, 0.1 + theta(components, parameters, seed + 1).abs()),
        config(approximation="gaussian", num_members=0, parameters=parameters, seed=seed, **changes),
        ADAPTER_CONFIG if adapter else None,
    )


def equal(one: Posterior, other: Posterior) -> bool:
    """Return whether two posteriors are bitwise equal, with their configs and sidecars."""
    if one.sidecars != other.sidecars:
        return False
    if one.config != other.config or one.adapter_config != other.adapter_config:
        return False
    tensors = [_tensors(one), _tensors(other)]
    return type(one.approximation) is type(other.approximation) and (
        tensors[0].keys() == tensors[1].keys() and all(torch.equal(v, tensors[1][k]) for k, v in tensors[0].items())
    )


def _tensors(posterior: Posterior) -> dict[str, torch.Tensor]:
    approximation = posterior.approximation
    if isinstance(approximation, Draws):
        return {"theta": approximation.theta, "chain": approximation.chain}
    components = enumerate(approximation.covariances)
    parts = {f"{k}.{name}": v for k, c in components for name, v in c.tensors(posterior.layout).items()}
    return {"means": approximation.means, **parts}
