"""Models of peft whose adapters make a posterior."""

from __future__ import annotations

from collections.abc import Callable

from peft import PeftModel

from tests import tiny_models as models


def lora_models() -> dict[str, Callable[[int], PeftModel]]:
    return {
        "llama": lambda seed: models.with_lora(models.tiny_llama(), seed),
        "gpt2": lambda seed: models.with_lora(models.tiny_gpt2(), seed),
        "bert_with_classifier": lambda seed: models.with_lora(models.tiny_bert(), seed),
        "llama_with_head": lambda seed: models.with_lora(
            models.tiny_llama(), seed, modules_to_save=["lm_head", "norm"]
        ),
        "rank_stabilised": lambda seed: models.with_lora(models.tiny_llama(), seed, use_rslora=True, r=3),
    }
