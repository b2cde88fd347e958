"""Small models of each family in float64 with a Gaussian posterior, and Monte Carlo over their weights.

The weights are random and not trained. Scripts and tests of a single pass share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from hf_bayes import attach
from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Covariance, Diagonal

VOCABULARY = 320
CLASSIFIER = "ForSequenceClassification"

TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = TEXT | BLOCKS | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
WIDE_HEADS = TEXT | BLOCKS | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}

FIELDS: dict[str, dict[str, Any]] = {
    "Bert": TEXT | BLOCKS | UNDROPPED | {"max_position_embeddings": 128, "num_labels": 3},
    "ViT": BLOCKS | UNDROPPED | {"image_size": 8, "patch_size": 4, "num_labels": 3},
    "Llama": GROUPED,
    "GPT2": TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Mistral": WIDE_HEADS | {"num_hidden_layers": 3, "sliding_window": 4},
    "Qwen3": WIDE_HEADS,
}  # fmt: skip
"""The sizes of the config of each family."""


def small(family: str, head: str = "ForCausalLM", *, std: float | None = 0.3, **fields: Any) -> Any:
    """Return a model with seeded weights.

    Args:
        family, head: the parts of the name of its class.
        std: of the elements of its matrices, so wide that the model is not almost linear. None keeps its own weights.
        fields: of the config, in place of those of ``FIELDS``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**(FIELDS[family] | fields))
        model = getattr(transformers, f"{family}{head}")(config)
        for parameter in model.parameters():
            if parameter.ndim > 1 and std is not None:
                nn.init.normal_(parameter, std=std)
    return model.double().eval()


def adapted(model: Any, *targets: str) -> Any:
    """Return the model with a LoRA of rank 2 whose factor B is random, in all blocks."""
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=list(targets), lora_dropout=0.0,
        task_type="SEQ_CLS" if type(model).__name__.endswith(CLASSIFIER) else None,  # so that its head is random too
        fan_in_fan_out=model.config.model_type == "gpt2",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = get_peft_model(model, config).double().eval()
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    return found


LLAMA_TARGETS = ("q_proj", "v_proj", "down_proj")

FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (lambda: adapted(small("Bert", CLASSIFIER), "query", "value"), "trainable"),
    "bert, four blocks": (
        lambda: adapted(small("Bert", CLASSIFIER, std=0.25, num_hidden_layers=4), "query", "value", "output.dense"),
        "trainable",
    ),
    "vit": (lambda: adapted(small("ViT", "ForImageClassification"), "q_proj", "v_proj"), "trainable"),
    "llama": (lambda: adapted(small("Llama"), *LLAMA_TARGETS), "trainable"),
    "llama classifier": (
        lambda: adapted(small("Llama", CLASSIFIER, std=None, hidden_size=8, num_labels=3), *LLAMA_TARGETS), "trainable",
    ),
    "gpt2": (lambda: adapted(small("GPT2", "LMHeadModel"), "c_attn", "c_fc"), "trainable"),
    "mistral": (lambda: adapted(small("Mistral"), *LLAMA_TARGETS), "trainable"),
    "qwen3": (lambda: adapted(small("Qwen3"), "v_proj", "down_proj"), "trainable"),
    "head": (lambda: small("Bert", CLASSIFIER), "last_layer"),
}  # fmt: skip
"""Name -> function that builds a model, and its random parameters."""


def inputs_of(model: Any, rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Return words [rows, length] without padding, or images."""
    core = model.get_base_model() if isinstance(model, PeftModel) else model
    generator = torch.Generator().manual_seed(0)
    if core.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn((rows, 3, 8, 8), generator=generator, dtype=torch.float64)}
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def attached(model: nn.Module, subspace: str, variance: float = 1e-4, covariance: Covariance | None = None) -> Any:
    """Return a model with the posterior N(its own weights, covariance), by default with one variance."""
    layout = select(model, subspace)
    start = initial(model, layout)[None]
    own = covariance or Diagonal(torch.full_like(start[0], variance**0.5))
    bayesian: Any = attach(model, start.clone(), subspace=subspace)
    config = SimpleNamespace(calibration={}, layer_factors={}, approximation="gaussian")
    bayesian.posterior = SimpleNamespace(approximation=Gaussian(start, (own,)), config=config)
    return bayesian


@torch.no_grad()
def member_moments(bayesian: Any, inputs: Mapping[str, Tensor], num_draws: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of the logits over draws of the posterior."""
    theta = bayesian.posterior.approximation.sample(num_draws, torch.Generator().manual_seed(0))
    found = []
    for some in theta.split(250):
        with bayesian.members.bind(some):
            found.append(bayesian.members.logits(inputs))
    logits = torch.cat(found)
    return logits.mean(0), logits.var(0)
