"""The experiments on cold posteriors, at small sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from hf_bayes.models.attaching import attach
from scripts.reproduce import cnn_lstm, cold_posteriors_ablation, cold_posteriors_mlp, temperature_sweep
from scripts.reproduce.cold_posteriors_mlp_chains import MLP
from scripts.reproduce.cold_posteriors_mlp_chains import Arguments as MLPArguments
from scripts.reproduce.temperature_sweep_problem import METHODS, Arguments, prepare
from tests.members.subjects import CAUSAL
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

SIZES = {"vocab_size": 40, "embedding_size": 3, "num_filters": 4, "hidden_size": 5}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    cnn_lstm.build(tmp_path / "model", TEXTS, num_labels=2, **SIZES)
    return str(tmp_path / "model")


@pytest.fixture
def settings(tmp_path: Path, folder: str) -> dict:
    rows = [{"text": f"{TEXTS[i % 4]} {i}", "label": ["even", "odd"][i % 2]} for i in range(40)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "output_dir": str(tmp_path / "sweep"),
        "model_name_or_path": folder,
        "dataset": str(tmp_path / "train.jsonl"),
        "test_file": str(tmp_path / "test.jsonl"),
        "num_train": 24,
        "batch_size": 4,
        "num_steps": 8,
        "num_draws": 2,
        "preconditioner_batches": 1,
        "num_chains": 2,
        "adam_steps": 2,
        "laplace_structure": "low_rank",
        "laplace_rank": 4,
        "num_members": 2,
        "temperatures": [0.1],
    }


def test_the_cnn_lstm_is_torchs_convolution_and_lstm(folder: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    convolution, lstm = nn.Conv1d(3, 4, 5), nn.LSTM(4, 5, batch_first=True)
    layer = model.layers[0]
    convolution.weight.data = model.convolution.weight.data.view(4, 5, 3).mT
    convolution.bias = model.convolution.bias
    lstm.weight_ih_l0, lstm.bias_ih_l0 = layer.inputs.weight, layer.inputs.bias
    lstm.weight_hh_l0 = layer.recurrent.weight
    lstm.bias_hh_l0.data.zero_()
    x = model.embedding(batch["input_ids"]) * batch["attention_mask"][..., None]
    states = lstm(nn.functional.max_pool1d(convolution(x.mT).relu(), 4).mT)[0]
    expected = model.classifier(states[:, -1])
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-5, atol=1e-6)


def test_members_of_the_cnn_lstm_are_models_of_their_own(folder: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder).double()
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding="max_length", max_length=16, return_tensors="pt")
    with attach(model, subspace="all", num_members=3) as bayesian:
        theta = torch.randn(bayesian.theta.shape, dtype=torch.float64)
        bayesian.show(theta)
        folded = bayesian.member_logits(dict(batch))
        layout = bayesian.layout
    for row, logits in zip(theta, folded, strict=True):
        model.load_state_dict(layout.unflatten(row))
        torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_sweep_has_every_cell_and_is_taken_up_where_it_stopped(
    settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = Arguments(**settings)
    record = temperature_sweep.sweep(args)
    lines = temperature_sweep.lines_of(record)
    phases = {"phase_1_sgd", "phase_2_sghmc", "phase_3_sgd"}
    linearised = {"laplace_ef_linearised", "laplace_ggn_linearised"}
    assert set(lines) == set(METHODS) - {"phases"} | phases | linearised
    assert all(set(lines[name]) == {0.1} for name in linearised | {"sghmc_serial", "mean_field"})
    assert all(math.isfinite(v) for at in lines.values() for m in at.values() for vs in m.values() for v in vs)
    temperature_sweep.figures(record, tmp_path)
    assert (tmp_path / "temperature_sweep.png").exists()
    assert "| sghmc_parallel, T = 0.1 |" in temperature_sweep.blocks(record)["diagnostics"]

    def refuse(*arguments: object) -> None:
        raise AssertionError("this cell has been run")

    monkeypatch.setattr(temperature_sweep, "run_cell", refuse)
    assert temperature_sweep.sweep(args) == record
    with pytest.raises(AssertionError, match="has been run"):  # the broken twin: other settings are other cells
        temperature_sweep.sweep(Arguments(**{**settings, "prior_std": 0.5}))


@pytest.mark.slow
def test_laplace_is_around_the_map_of_its_own_settings(settings: dict, tmp_path: Path) -> None:
    def lines(output_dir: Path, methods: list[str], **changes: object) -> dict:
        changed = {**settings, "output_dir": str(output_dir), "methods": methods, **changes}
        return temperature_sweep.sweep(Arguments(**changed))["cells"][-1]["lines"]

    lines(tmp_path / "shared", ["map"])
    lines(tmp_path / "shared", ["map"], adam_steps=40, adam_learning_rate=0.1)
    assert lines(tmp_path / "shared", ["laplace_ef"]) == lines(tmp_path / "fresh", ["laplace_ef"])


@pytest.mark.parametrize(("flags", "kept"), [([], True), (["--num_train", "500"], False), (["--seeds", "1"], False)])
def test_only_the_default_settings_make_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], kept: bool
) -> None:
    pages: list[str] = []
    monkeypatch.setattr("sys.argv", ["sweep", "--output_dir", str(tmp_path), *flags])
    monkeypatch.setattr(temperature_sweep, "keep", lambda name, run: pages.append(name))
    monkeypatch.setattr(temperature_sweep, "sweep", lambda args: {"cells": []})
    monkeypatch.setattr(temperature_sweep, "figures", lambda record, directory: None)
    temperature_sweep.main()
    assert pages == ["temperature_sweep"] * kept
    assert (tmp_path / "record.json").exists() is not kept


def test_a_layer_that_a_file_lacks_begins_with_torchs_values(folder: str) -> None:
    shallow = AutoModelForSequenceClassification.from_pretrained(folder)
    deep = AutoModelForSequenceClassification.from_pretrained(folder, num_hidden_layers=2)
    for name, value in shallow.state_dict().items():
        assert torch.equal(deep.state_dict()[name], value)
    bound = 5**-0.5  # torch's Linear: uniform within 1 / sqrt(inputs), here the hidden size
    for name, value in deep.layers[1].state_dict().items():
        assert 0.5 * bound < value.abs().max() <= bound, name


def language_settings(settings: dict, model: PreTrainedModel, tmp_path: Path, **changes: object) -> dict:
    model.save_pretrained(tmp_path / "language")
    tiny_tokenizer().save_pretrained(tmp_path / "language")
    language = {"model_name_or_path": str(tmp_path / "language"), "task": "causal_lm", "laplace_structure": "diagonal"}
    return {**settings, **language, "temperatures": [1.0], "learning_rate": 1e-4, **changes}


def test_a_sweep_runs_on_language_models(settings: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["laplace_ef", "laplace_ggn", "sghmc_serial"]
    changed = language_settings(settings, tiny_llama(), tmp_path, depth=1, methods=methods, num_members=4, seeds=[0])
    lines = temperature_sweep.lines_of(temperature_sweep.sweep(Arguments(**changed)))
    linearised = {f"{name}_linearised" for name in methods[:2]}
    assert set(lines) == {"map", *methods, *linearised}
    assert "left out" not in capsys.readouterr().out
    for name in linearised:
        (nll,), (members,) = lines[name][1.0]["nll"], lines[name.removesuffix("_linearised")][1.0]["nll"]
        # of draws as wide as the prior N(0, 1) nothing agrees
        assert math.isfinite(nll)
        assert abs(nll - members) > 0.01


@pytest.mark.slow
def test_a_sweep_says_what_it_leaves_out(settings: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bloom = CAUSAL["bloom-last-block"].make(torch.float32)  # whose activation cannot be differentiated forwards
    changed = language_settings(settings, bloom, tmp_path, methods=["laplace_ef"], num_members=2, seeds=[0, 1])
    args = Arguments(**changed)
    record = temperature_sweep.sweep(args)
    assert set(temperature_sweep.lines_of(record)) == {"map", "laplace_ef"}
    said = "left out: laplace_ef_linearised: linearised predictions differentiate Bloom"
    assert capsys.readouterr().out.count(said) == 1
    assert temperature_sweep.sweep(args) == record  # from the cells that are there
    assert capsys.readouterr().out.count(said) == 1


def test_unknown_methods_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="unknown methods sgldd"):
        temperature_sweep.sweep(Arguments(**{**settings, "methods": ["sgldd"]}))


def test_the_ablation_measures_momenta_at_the_ends_of_cycles(settings: dict) -> None:
    args = cold_posteriors_ablation.Arguments(**{**settings, "temperatures": [1.0], "num_steps": 16, "num_draws": 2})
    record = cold_posteriors_ablation.experiment(args)
    assert [(row["preconditioned"], row["cyclical"]) for row in record["rows"]] == [
        *[(True, True), (False, True), (True, False), (False, False)]
    ]
    for row in record["rows"]:
        # 2 chains x 2 ends: the mean of chi^2(120) / 120, of momenta that start from their law and barely forget it
        assert row["kinetic"]["embedding.weight"] == pytest.approx(1, abs=0.5)
        assert len(row["nll"]) == 2
    assert "| 1 | yes | yes |" in cold_posteriors_ablation.blocks(record)["ablation"]


@pytest.fixture(scope="module")
def mlp() -> dict:
    sizes = {"depths": 1, "num_datasets": 1, "num_test": 50, "temperatures": (0.1, 1.0), "num_chains": 2}
    runs = {"hmc_burn_in": 10, "hmc_updates": 20, "hmc_thin": 4, "num_leapfrog": 3, "cycles": 6, "burn_in_cycles": 2}
    args = MLPArguments(**sizes, **runs, cycle_length=10)
    with pytest.warns(UserWarning, match=r"depth 1, T = 1, data set 0: HMC is no gold standard here, .*ESS \d+ where"):
        return cold_posteriors_mlp.experiment(args)


def test_the_mlp_experiment_compares_both_samplers(mlp: dict, tmp_path: Path) -> None:
    assert [row["temperature"] for row in mlp["rows"]] == [0.1, 1.0]
    assert all(row["kl"][0] > 0 and math.isfinite(row["hmc_nll"][0]) for row in mlp["rows"])
    cold_posteriors_mlp.figures(mlp, tmp_path)
    assert (tmp_path / "cold_posteriors_mlp.png").exists()
    assert "| 1 | 0.1 |" in cold_posteriors_mlp.blocks(mlp)["predictions"]


def test_the_mlp_is_a_stack_of_torchs_layers() -> None:
    net = MLP(2)
    theta, x = torch.randn(3, sum(net.sizes)), torch.randn(4, 5)
    stack = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3))
    for row, logits in zip(theta, net.logits(theta, x[None]), strict=True):
        nn.utils.vector_to_parameters(row, stack.parameters())
        torch.testing.assert_close(logits, stack(x), rtol=1e-5, atol=1e-5)


def test_the_symmetrised_kl_is_both_divergences() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    both = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1) + 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert cold_posteriors_mlp.symmetrised_kl(p, q) == pytest.approx(both, rel=1e-5)


def test_the_sweep_needs_rows_to_evaluate_on(settings: dict) -> None:
    args = Arguments(**{**settings, "evaluate_on": "validation", "validation_fraction": 0.0})
    with pytest.raises(
        ValueError, match=r"strictly between 0 and 1 where no other rows .* got 0\.0: raise it, or give"
    ):
        prepare(args)
