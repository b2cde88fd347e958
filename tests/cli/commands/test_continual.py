from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BloomConfig, BloomForCausalLM, TrainerCallback

from hf_bayes import Posterior
from hf_bayes.cli.commands import continual
from hf_bayes.training.checkpoints import WORDS
from tests.cli.commands import running
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    tiny_llama(max_position_embeddings=48).save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    for name, text in (("one", TEXTS[0]), ("two", TEXTS[1])):
        (tmp_path / f"{name}.txt").write_text(f"{text}\n" * 12)
    return {
        "model_name_or_path": str(tmp_path / "llama"),
        "episodes": [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")],
        "output_dir": str(tmp_path / "out"),
        "lora_rank": 2,
        "learning_rate": 1e-2,
        "methods": ["sequential", "offline", "laplace_kronecker", "mean_field"],
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def run(fields: dict[str, Any]) -> dict[str, Any]:
    out = Path(fields["output_dir"])
    file = out.parent / "run.yaml"
    file.write_text(yaml.safe_dump(fields))
    running.run("continual", str(file))
    return json.loads((out / "results.json").read_text())


def test_two_episodes_chain_posteriors_and_a_second_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(fields)
    out = tmp_path / "out"
    assert results["settings"]["window"] == 48  # the model's context, below 2048
    losses = results["losses"]
    methods = ["sequential", "offline", "laplace_kronecker", "mean_field"]
    assert list(losses) == ["single", *methods]
    assert all(len(rows) == 2 and all(len(row) == 2 for row in rows) for rows in losses.values())
    assert losses["single"][0] == losses["sequential"][0] == losses["laplace_kronecker"][0]  # one MAP, three names
    assert losses["single"][1] != losses["sequential"][1] != losses["laplace_kronecker"][1]
    for name in ("laplace_kronecker", "mean_field"):
        first, second = (Posterior.from_pretrained(out / name / f"episode_{index}") for index in (0, 1))
        assert first.config.prior == {"name": "gaussian", "std": 0.1, "mean": "zero"}
        assert second.config.prior["fingerprint"] == first.fingerprint
        gained = second.approximation.covariances[0].precision_diagonal.sum()
        assert name == "mean_field" or gained > first.approximation.covariances[0].precision_diagonal.sum()
    assert "| laplace_kronecker |" in capsys.readouterr().out
    assert {"losses.png", "average.png"} <= {file.name for file in out.iterdir()}

    removed = out / "mean_field" / "episode_1"
    for file in sorted(removed.rglob("*"), reverse=True):
        file.unlink()
    trained: list[str] = []
    train = continual.BayesianTrainer.train
    monkeypatch.setattr(
        continual.BayesianTrainer,
        "train",
        lambda self, **options: (trained.append(self.args.output_dir), train(self, **options))[1],
    )
    assert run(fields) == results  # bit for bit
    assert trained == [str(removed)]
    for change, key in (
        ({"strength": 2.0}, "strength"),
        ({"gradient_accumulation_steps": 2}, WORDS["rows_per_update"]),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type"),
        ({"data_unit": "sequence"}, "data_unit"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"other ['{key}']: choose another output_dir")):
            run({**fields, **change})
    (tmp_path / "two.txt").write_text(f"{TEXTS[2]}\n" * 12)
    with pytest.raises(ValueError, match=r"other \['texts'\]: choose another output_dir"):
        run(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_decay": 0.5}, r"map needs weight_decay=0 \(got 0.5\)"),
        ({"optim": "sgd"}, "optim of the arguments would be ignored: map is the optimizer"),
        ({"max_grad_norm": 1e-3}, r"map needs max_grad_norm=0 \(got 0.001\)"),
    ],
)
def test_finished_results_refuse_what_a_new_run_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    fields |= {"methods": ["single"], "episodes": fields["episodes"][:1], "max_steps": 1}
    run(fields)
    monkeypatch.setattr(continual, "_new_model", None)  # it is refused before a model is loaded
    for folder in ("out", "other"):
        with pytest.raises(ValueError, match=message):
            run({**fields, "output_dir": str(tmp_path / folder), **change})


@pytest.mark.parametrize(
    ("model", "texts", "differing"),
    [
        ({"seed": 1}, TEXTS, ["fingerprint of weights"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, TEXTS, ["fingerprint of config"]),
        ({}, ("abc abd",), ["fingerprint of tokenizer"]),
    ],
)
def test_a_run_does_not_resume_with_another_model(
    model: dict[str, Any], texts: tuple[str, ...], differing: list[str], tmp_path: Path, fields: dict[str, Any],
) -> None:  # fmt: skip
    fields |= {"methods": ["sequential"], "max_steps": 1}
    run(fields)
    shutil.rmtree(tmp_path / "out" / "sequential" / "episode_1")
    tiny_llama(max_position_embeddings=48, **model).save_pretrained(tmp_path / "llama")
    tiny_tokenizer(texts).save_pretrained(tmp_path / "llama")
    with pytest.raises(
        ValueError, match=rf"was made with other {re.escape(str(differing))}: choose another output_dir"
    ):
        run(fields)


def test_a_run_killed_within_an_episode_resumes_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    fields |= {"methods": ["laplace_diagonal"], "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run({**fields, "output_dir": str(tmp_path / "whole")})
    trained: list[tuple[str, int]] = []

    class Killed(BaseException):
        pass

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trained.append((Path(args.output_dir).parts[-2:], state.global_step))
            if trained[-1] == (("laplace_diagonal", "episode_1"), 3) and not restarted:
                raise Killed

    class Watched(continual.BayesianTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[Killer()], **kwargs)

    monkeypatch.setattr(continual, "BayesianTrainer", Watched)
    restarted: list[bool] = []
    with pytest.raises(Killed):
        run(fields)
    with pytest.raises(ValueError, match=r"other \['learning_rate'\]"):  # nothing of this episode is finished
        run({**fields, "learning_rate": 0.5})
    trained.clear()
    restarted.append(True)
    assert run(fields)["losses"] == whole["losses"]
    assert trained == [(("laplace_diagonal", "episode_1"), step) for step in (3, 4)]
    posteriors = [
        Posterior.from_pretrained(tmp_path / run / "laplace_diagonal" / "episode_1") for run in ("whole", "out")
    ]
    assert posteriors[0].fingerprint == posteriors[1].fingerprint


def test_a_model_without_a_context_limit_gets_the_default_window(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = BloomConfig(vocab_size=320, hidden_size=16, n_layer=1, n_head=2)
    assert not hasattr(config, "max_position_embeddings")
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    tiny_tokenizer().save_pretrained(tmp_path / "bloom")
    fields |= {"model_name_or_path": str(tmp_path / "bloom"), "methods": ["single"], "max_steps": 1}
    assert run(fields)["settings"]["window"] == 2048


def test_an_unknown_method_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"methods \['ewc'\] are unknown: choose of single, sequential, offline"):
        run({**fields, "methods": ["ewc"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 49}, "window=49 is longer than the model's longest context, 48 tokens: lower it to 48"),
        ({"window": 0}, "windows need length >= 2 and 0 <= overlap < length, got length=0"),
        ({"stride": 0}, "--stride must be 1 to the window of 48 tokens, got 0"),
        ({"push_to_hub": True}, "push_to_hub is refused: there is a posterior for each method and episode"),
        ({"mean_field_args": {"width": 1}}, "mean_field has no field .width."),
    ],
)
def test_what_the_script_cannot_do_is_refused(fields: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(fields | change)


def test_an_episode_without_a_token_to_test_on_is_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "two.txt").write_text("Hi")
    with pytest.raises(ValueError, match=r"of '.*two\.txt': no window with a token to predict"):
        run(fields)


def test_the_lora_is_the_papers_and_there_has_to_be_one(tmp_path: Path, fields: dict[str, Any]) -> None:
    run({**fields, "methods": ["single"], "lora_layers": [1], "max_steps": 1})
    config = json.loads((tmp_path / "out" / "single" / "episode_0" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 32
    assert config["target_modules"]
    assert all(".1." in module for module in config["target_modules"])  # the second of two layers
    with pytest.raises(ValueError, match="lora_rank must be at least 1, got 0"):
        run({**fields, "lora_rank": 0})
