"""The mixin before TRL's trainer, as docs/trl.md shows it. TRL is no dependency: ``make test-slow`` installs it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM, MixtralForCausalLM

from hf_bayes import BayesianModelForCausalLM, BayesianTrainerMixin, BayesianTrainingArguments, SGHMCConfig
from tests import runs
from tests.members.subject_models import mixtral
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer, with_lora
from tests.training.trained import require_loaded_and_resumed

pytestmark = pytest.mark.slow

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "A:{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}U:{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
TEXT_ROWS = [{"text": text} for text in TEXTS * 2]


def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def arguments(folder: Path, **changes: Any) -> Any:
    from trl import SFTConfig

    class Args(BayesianTrainingArguments, SFTConfig): ...

    fields: dict[str, Any] = {
        "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_length": 24,
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return Args(output_dir=str(folder), **(fields | changes))


def sft(
    folder: Path, model: Any, *, rows: Any = TEXT_ROWS, kwargs: dict[str, Any] | None = None, **changes: Any
) -> Any:
    from trl import SFTTrainer

    class BayesianSFT(BayesianTrainerMixin, SFTTrainer): ...

    return BayesianSFT(
        model,
        SGHMCConfig(num_chains=2, prior_std=0.1),
        args=arguments(folder, **changes),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        **{"processing_class": chat_tokenizer()} | (kwargs or {}),
    )


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A base without a padding token, as Llama's: TRL gives it one."""
    tiny_llama(pad_token_id=None).save_pretrained(tmp_path / "base")
    chat_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_supervised_fine_tuning_ends_in_a_posterior(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    texts = Dataset.from_list(TEXT_ROWS)
    trainer = sft(tmp_path, with_lora(model), kwargs={"eval_dataset": texts.select(range(4))})
    trainer.train()
    expected = trainer.evaluate()["eval_nll"]
    trainer.save_model(str(tmp_path / "posterior"))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = trainer.bayesian(ids).logits
        loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
        assert torch.equal(loaded(ids).logits, logits)
    assert trainer.posterior.config.metrics["nll"] == expected


@pytest.mark.parametrize("named", [False, True], ids=["model", "name"])
def test_a_peft_config_is_trained_saved_loaded_and_resumed(tmp_path: Path, base: str, named: bool) -> None:
    def run(folder: str, **options: Any) -> Any:
        model = base if named else LlamaForCausalLM.from_pretrained(base)
        kwargs = {"peft_config": LoraConfig(**LORA), "processing_class": None}
        trainer = sft(tmp_path / folder, model, kwargs=kwargs, save_strategy="steps", save_steps=3)
        trainer.train(**options)
        return trainer

    whole = run("whole")
    assert all(".lora_" in name for name in whole.bayesian.layout.names)
    require_loaded_and_resumed(whole, run, tmp_path)


def test_a_mixture_of_experts_is_loaded_on_its_own_base(tmp_path: Path) -> None:
    mixtral(torch.float32).save_pretrained(tmp_path / "base")
    model = MixtralForCausalLM.from_pretrained(tmp_path / "base")
    trainer = sft(tmp_path / "run", model, kwargs={"peft_config": LoraConfig(**LORA)})
    trainer.train()
    trainer.save_model(str(tmp_path / "posterior"))
    ids = torch.arange(3, 12)[None]
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
    assert torch.equal(loaded(ids).logits, trainer.bayesian(ids).logits)


def test_a_base_quantised_to_four_bits_takes_an_adapter(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    # with AVX512-BF16 prediction packs weights for good, and has no packing for layers as narrow as these
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    from transformers import BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    kwargs = {"peft_config": LoraConfig(**LORA), "quantization_config": quantised, "processing_class": None}
    trainer = sft(tmp_path / "run", base, kwargs=kwargs)
    assert all(".lora_" in name for name in trainer.bayesian.layout.names)
    assert trainer.bayesian.theta.dtype == torch.float32
    trainer.train()
    trainer.save_model(str(tmp_path / "posterior"))
    ids = torch.arange(3, 12)[None]
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
    torch.testing.assert_close(loaded(ids).logits, trainer.bayesian(ids).logits)


# -- data formats: N counted by hand -----------------------------------------------------------------------------------


def tokens(text: str, first: int = 0, *, limit: int = 24) -> int:
    """Tokens of a text that have one before them, begin at character ``first`` or later, and are not cut off."""
    offsets = tiny_tokenizer()(text, return_offsets_mapping=True)["offset_mapping"][:limit]
    return sum(start >= first for start, _ in offsets[1:])


def cut(text: str) -> tuple[str, str]:
    """A text at a space, where tokens end."""
    place = text.index(" ", 12)
    return text[:place], text[place:]


def chat(text: str) -> list[dict[str, str]]:
    question, answer = cut(text)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer[1:]}]


def rendered(text: str) -> tuple[str, int]:
    """Return a chat as the template has it, and where the assistant's turn begins."""
    question, answer = cut(text)
    return f"U:{question}\nA:{answer[1:]}</s>", len(f"U:{question}\nA:")


PROMPTS = [dict(zip(("prompt", "completion"), cut(text), strict=True)) for text in TEXTS]
CHATS = [{"messages": chat(text)} for text in TEXTS]
IDS = [{"input_ids": list(range(3, 3 + n))} for n in (5, 9, 30)]
WHOLE = sum(tokens(text + "</s>") for text in TEXTS)
ANSWERS = sum(tokens(*rendered(text)) for text in TEXTS)
FORMATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = {
    "text": ([{"text": text} for text in TEXTS], {}, WHOLE),
    "another column": ([{"body": text} for text in TEXTS], {"dataset_text_field": "body"}, WHOLE),
    "prompt and completion": (PROMPTS, {}, sum(tokens(text + "</s>", len(cut(text)[0])) for text in TEXTS)),
    "the prompt, too": (PROMPTS, {"completion_only_loss": False}, WHOLE),
    "messages": (CHATS, {}, sum(tokens(rendered(text)[0]) for text in TEXTS)),
    "the assistant only": (CHATS, {"assistant_only_loss": True}, ANSWERS),
    "prompt and completion of chats": (
        [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in CHATS], {}, ANSWERS,
    ),
    "token ids": (IDS, {}, 4 + 8 + 23),
    "token ids and labels": ([row | {"labels": [-100] * 3 + row["input_ids"][3:]} for row in IDS], {}, 2 + 6 + 21),
    "cut and joined": (
        [{"text": text} for text in TEXTS], {"packing": True, "packing_strategy": "wrapped"},
        sum(tokens(text + "</s>", limit=99) + 1 for text in TEXTS) - -(-sum(
            tokens(text + "</s>", limit=99) + 1 for text in TEXTS) // 24),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_every_format_of_rows_has_the_terms_counted_by_hand(tmp_path: Path, name: str) -> None:
    rows, settings, expected = FORMATS[name]
    trainer = sft(tmp_path, with_lora(tiny_llama()), rows=rows, max_steps=2, **settings)
    assert trainer.rows.num_data == expected
    trainer.train()


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": True, "packing_strategy": "bfd"},
        {"packing": True, "packing_strategy": "bfd_split"},
        {"padding_free": True, "max_length": None},
    ],
    ids=["bfd", "bfd_split", "padding_free"],
)
def test_packed_texts_stay_documents_of_their_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"max_length": 64, "minibatch": "shared"} | settings
    trainer = sft(tmp_path, with_lora(tiny_llama()), max_steps=2, **settings)
    documents = [tiny_tokenizer()(row["text"] + "</s>", return_tensors="pt")["input_ids"] for row in TEXT_ROWS]
    assert trainer.rows.num_data == sum(ids.shape[1] - 1 for ids in documents)
    theta = trainer.bayesian.theta.detach() + 0.1
    batch = next(iter(trainer.get_train_dataloader()))
    ends = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
    parts = [batch["input_ids"][:, start:end] for start, end in pairwise(ends)]
    single = [trainer.bayesian(input_ids=part, labels=part, theta=theta, folded=False).loss for part in parts]
    torch.testing.assert_close(trainer.bayesian(**batch, theta=theta, folded=False).loss, sum(single))
    trainer.train()


def test_a_formatting_function_and_a_template_file_are_used(tmp_path: Path) -> None:
    kwargs = {"formatting_func": lambda row: row["body"]}
    trainer = sft(tmp_path, with_lora(tiny_llama()), rows=[{"body": text} for text in TEXTS], kwargs=kwargs)
    assert trainer.rows.num_data == WHOLE
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings = {"chat_template_path": str(tmp_path / "template.jinja"), "assistant_only_loss": True}
    kwargs = {"processing_class": tiny_tokenizer()}
    trainer = sft(tmp_path, with_lora(tiny_llama()), rows=CHATS, kwargs=kwargs, **settings)
    assert trainer.rows.num_data == ANSWERS


def test_a_stream_of_texts_is_trained_on(tmp_path: Path) -> None:
    rows = Dataset.from_list(TEXT_ROWS).to_iterable_dataset()
    trainer = sft(tmp_path, with_lora(tiny_llama()), rows=rows, num_data=500, minibatch="shared")
    trainer.train()
    assert trainer.rows.num_data == 500


def test_checkpointed_activations_change_no_chain(tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        trainer = sft(tmp_path, with_lora(tiny_llama()), gradient_checkpointing=checkpointing)
        trainer.train()
        found.append(trainer.posterior.approximation.theta)
    torch.testing.assert_close(*found)


# -- refusals and the card ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["KTO", "GRPO", "RLOO", "Distillation"])
def test_trainers_with_a_loss_of_their_own_are_refused_by_name(tmp_path: Path, name: str) -> None:
    import trl

    host = getattr(trl, f"{name}Trainer")
    kind = type(f"Bayesian{name}", (BayesianTrainerMixin, host), {})
    with pytest.raises(ValueError, match=rf"^{name}Trainer \(trl\..*\) defines a loss of its own"):
        kind(model=with_lora(tiny_llama()), method=SGHMCConfig(), args=runs.arguments(tmp_path))


def test_another_loss_of_the_same_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss_type='dft' is refused, expected 'nll'"):
        sft(tmp_path, with_lora(tiny_llama()), loss_type="dft")


def test_the_card_is_the_posteriors_whoever_writes_it(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    trainer = sft(tmp_path, with_lora(tiny_llama()), save_strategy="steps", save_steps=3)
    trainer.train()
    assert not card.exists()  # TRL writes its own at every checkpoint
    trainer.save_model()
    saved = card.read_text()
    assert "hf_bayes" in saved
    assert "trl" not in saved.lower()
    trainer.create_model_card(tags=["extra"])
    assert card.read_text().replace("- extra\n", "") == saved
    with pytest.raises(ValueError, match="dataset_name"):
        trainer.create_model_card(dataset_name="mine")
