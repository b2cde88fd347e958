from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.compat import ADAPTER_CONFIG
from hf_bayes.posteriors.config import CONFIG, PosteriorConfig, library_versions
from hf_bayes.posteriors.posterior import Posterior
from tests import tiny_models as models
from tests.faults import posteriors
from tests.faults.corruptions import edit_json, sign
from tests.faults.posteriors import config, draws, equal, gaussian

# -- round trips ---------------------------------------------------------------------------------------------------

POSTERIORS: dict[str, Callable[[], Posterior]] = {
    "draws": lambda: draws(3),
    "draws_lora": lambda: draws(3, adapter=True),
    "one_draw": lambda: draws(1),
    "gaussian": lambda: gaussian(1),
    "gaussian_lora": lambda: gaussian(1, adapter=True),
    "mixture_lora": lambda: gaussian(3, adapter=True),
    "float64": lambda: Posterior(
        Draws(posteriors.theta(2, posteriors.PLAIN, dtype=torch.float64), torch.tensor([0, 1])), config(num_members=2)
    ),
    "chains_of_two": lambda: Posterior(
        Draws.from_chains(posteriors.theta(4, posteriors.PLAIN).unflatten(0, (2, 2))), config(num_members=4)
    ),
}


@pytest.mark.parametrize("kind", POSTERIORS)
def test_posterior_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    posterior = POSTERIORS[kind]()
    posterior.save_pretrained(tmp_path)
    assert equal(Posterior.from_pretrained(tmp_path), posterior)


def test_saving_twice_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draws(3, adapter=True).save_pretrained(tmp_path / name)
    one, other = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in tmp_path.iterdir())
    assert one == other


def test_directory_is_laid_out_as_documented(tmp_path: Path) -> None:
    common = {"README.md", "posterior_config.json", "manifest.json"}
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    expected = {
        "draws": {"members/member_000/model.safetensors", "members/member_001/model.safetensors"},
        "draws_lora": adapter | {f"members/member_00{i}/{name}" for i in range(2) for name in adapter},
        "gaussian": {"covariance.safetensors"},
        "gaussian_lora": adapter | {"covariance.safetensors"},
    }
    made = (draws(2), draws(2, adapter=True), gaussian(), gaussian(adapter=True))
    for (name, files), posterior in zip(expected.items(), made, strict=True):
        posterior.save_pretrained(tmp_path / name)
        found = {str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*") if p.is_file()}
        assert found == common | files


def test_root_is_the_gaussian_mean_or_the_first_member(tmp_path: Path) -> None:
    for posterior, expected in (
        (gaussian(1, adapter=True), lambda p: p.approximation.mean),
        (gaussian(2, adapter=True), lambda p: p.approximation.means[0]),
        (draws(2, adapter=True), lambda p: p.approximation.theta[0]),
    ):
        posterior.save_pretrained(tmp_path)
        root = load_file(tmp_path / "adapter_model.safetensors")
        tensors = posterior.layout.unflatten(expected(posterior))
        assert torch.equal(root["base_model.model.score.weight"], tensors[posteriors.LORA[2][0]])


def test_figures_that_are_not_defined_are_saved_as_null(tmp_path: Path) -> None:
    posterior = draws(2, diagnostics={"converged": None, "r_hat": float("nan"), "ess": [1.0, float("inf")]}, metrics={})
    posterior.save_pretrained(tmp_path)
    assert Posterior.from_pretrained(tmp_path).config.diagnostics == {
        "converged": None,
        "r_hat": None,
        "ess": [1.0, None],
    }


# -- peft ----------------------------------------------------------------------------------------------------------


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


def posterior_of(peft_models: list[PeftModel]) -> Posterior:
    layout = select(peft_models[0])
    theta = torch.stack([initial(model, layout) for model in peft_models])
    task = (
        "sequence_classification" if "bert" in type(peft_models[0].get_base_model()).__name__.lower() else "causal_lm"
    )
    return Posterior(
        Draws(theta, torch.arange(len(theta))),
        config(
            task=task,
            num_members=len(theta),
            parameters=[[name, list(shape)] for name, shape in layout.named_shapes.items()],
        ),
        peft_models[0].peft_config["default"].to_dict(),
    )


def base_of(kind: str) -> Any:
    return (models.tiny_bert if "bert" in kind else models.tiny_gpt2 if "gpt2" in kind else models.tiny_llama)()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(**models.batch()).logits


@pytest.mark.parametrize("kind", lora_models())
def test_root_and_members_load_in_plain_peft_with_equal_logits(kind: str, tmp_path: Path) -> None:
    peft_models = [lora_models()[kind](seed) for seed in range(2)]
    posterior_of(peft_models).save_pretrained(tmp_path)
    for number, model in enumerate(peft_models):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # no missing and no unexpected keys
            loaded = PeftModel.from_pretrained(base_of(kind), tmp_path, subfolder=f"members/member_00{number}")
        assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), logits(peft_models[0]))
    assert not torch.equal(logits(peft_models[0]), logits(peft_models[1]))


@pytest.mark.parametrize("kind", lora_models())
def test_members_are_the_files_that_peft_would_write(kind: str, tmp_path: Path) -> None:
    model = lora_models()[kind](0)
    model.save_pretrained(tmp_path / "peft")
    posterior_of([model]).save_pretrained(tmp_path / "ours")
    member = tmp_path / "ours" / "members" / "member_000"
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", member))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    theirs, ours = (json.loads((folder / ADAPTER_CONFIG).read_text()) for folder in (tmp_path / "peft", member))
    for field in ("target_modules", "modules_to_save"):  # full names here, last parts of names in peft
        names, endings = ours.pop(field) or [], theirs.pop(field) or []
        assert all(name.endswith(tuple(endings)) for name in names)
    # peft writes null for an empty base_model_name_or_path. Our file leaves out names of modules to import.
    assert {k: v or None for k, v in ours.items()} == {k: v or None for k, v in theirs.items() if k in ours}
    assert set(theirs) - set(ours) == {"auto_mapping", "megatron_core", "qalora_group_size", "eva_config"}


@pytest.mark.parametrize("kind", lora_models())
def test_adapters_become_an_ensemble_with_the_model_s_own_names(kind: str, tmp_path: Path) -> None:
    peft_models = [lora_models()[kind](seed) for seed in range(3)]
    for number, model in enumerate(peft_models):
        model.save_pretrained(tmp_path / str(number))
    ensemble = Posterior.from_adapters([tmp_path / str(number) for number in range(3)])
    expected = select(peft_models[0])
    assert ensemble.layout.named_shapes == expected.named_shapes
    for row, model in zip(ensemble.approximation.theta, peft_models, strict=True):
        parameters = dict(model.named_parameters())
        assert all(torch.equal(value, parameters[name]) for name, value in ensemble.layout.unflatten(row).items())
    ensemble.save_pretrained(tmp_path / "posterior")
    assert equal(Posterior.from_pretrained(tmp_path / "posterior"), ensemble)
    assert ensemble.config.method["name"] == "ensemble"
    assert ensemble.config.member_chains == [0, 1, 2]


def test_exported_member_is_a_plain_adapter(tmp_path: Path) -> None:
    peft_models = [models.with_lora(models.tiny_llama(), seed) for seed in range(2)]
    posterior = posterior_of(peft_models)
    posterior.export_member(1, tmp_path / "member")
    assert {path.name for path in (tmp_path / "member").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = PeftModel.from_pretrained(models.tiny_llama(), tmp_path / "member")
    assert torch.equal(logits(loaded), logits(peft_models[1]))
    with pytest.raises(ValueError, match="asked for member 2, 2 draws are stored"):
        posterior.export_member(2, tmp_path / "other")
    with pytest.raises(ValueError, match="is not empty"):
        posterior.export_member(0, tmp_path / "member")
    with pytest.raises(ValueError, match="writes peft adapters"):
        draws(1).export_member(0, tmp_path / "other")


# -- ensembles that are none -----------------------------------------------------------------------------------------


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    posterior = draws(2, adapter=True)
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        posterior.export_member(number, folder)
    return folders


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model_name_or_path": "other/base"}, "different base models: base_model_name_or_path is 'someone/base'"),
        ({"revision": "abc"}, "different base models: revision is None in .*one, 'abc' in .*two"),
        ({"r": 4}, "different adapters: r is 2 in .*one, 4 in .*two"),
        ({"lora_alpha": 8}, "different adapters: lora_alpha is 4"),
        ({"target_modules": ["k_proj"]}, "different adapters: target_modules"),
        ({"use_rslora": True}, "different adapters: use_rslora"),
        ({"use_dora": True}, "DoRA adapter"),
        ({"peft_type": "IA3"}, "IA3 adapter"),
        ({"trainable_token_indices": [3, 5]}, r"trainable_token_indices=\[3, 5\] beside its LoRA on layers"),
        ({"target_parameters": ["experts.weight"]}, "target_parameters=.* factors of layers and modules_to_save only"),
    ],
)
def test_adapters_that_differ_are_no_ensemble(adapters: list[Path], change: dict[str, Any], message: str) -> None:
    edit_json(adapters[1] / ADAPTER_CONFIG, lambda values: values.update(change))
    with pytest.raises(ValueError, match=message):
        Posterior.from_adapters(adapters)


def test_one_path_is_no_list_of_adapters(adapters: list[Path]) -> None:
    for path in (adapters[0], str(adapters[0])):  # the letters of a text would be taken for ids of the Hub
        with pytest.raises(ValueError, match=r"from_adapters takes a list of adapters, got one path: \['"):
            Posterior.from_adapters(path)  # type: ignore[arg-type]


def test_adapters_may_differ_in_fields_outside_the_forward_pass(adapters: list[Path]) -> None:
    change = {"lora_dropout": 0.1, "init_lora_weights": False, "target_modules": ["q_proj"], "use_dora": False}
    edit_json(adapters[1] / ADAPTER_CONFIG, lambda values: values.update(change))
    assert Posterior.from_adapters(adapters).config.num_members == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("base_model.model.score.weight"), "lacks the tensors"),
        (lambda t: t.update(extra=torch.zeros(1)), "adds"),
        (
            lambda t: t.update({k: v.half() for k, v in t.items()}),
            "dtype torch.float32 in .*one, torch.float16 in .*two",
        ),
        (
            lambda t: t.update({"base_model.model.score.weight": torch.zeros(4, 6)}),
            r"score.*: shape \[3, 6\] in .*one, \[4, 6\] in .*two",
        ),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
def test_adapters_with_other_tensors_are_no_ensemble(
    adapters: list[Path], change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    from tests.faults.corruptions import edit_tensors

    edit_tensors(adapters[1] / "adapter_model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        Posterior.from_adapters(adapters)


def test_members_with_different_bases_form_no_ensemble(tmp_path: Path) -> None:
    base = config().base_model
    for name, weights in (("one", "1111"), ("two", "2222")):
        fingerprint = {**base["fingerprint"], "weights": weights}
        draws(1, adapter=True, seed=int(weights), base_model={**base, "fingerprint": fingerprint}).save_pretrained(
            tmp_path / name
        )
    with pytest.raises(ValueError, match=r"different base models: .*1111.*2222"):
        Posterior.from_adapters([tmp_path / "one", tmp_path / "two" / "members" / "member_000"])
    assert Posterior.from_adapters([tmp_path / "one"]).config.base_model["fingerprint"]["weights"] == "1111"


def test_the_same_adapter_twice_is_no_ensemble(adapters: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"members 0 and 2 \(chains 0 and 2\) are equal"):
        Posterior.from_adapters([*adapters, adapters[0]])


@pytest.mark.parametrize("key", [*posteriors.ADAPTER_CONFIG, "rank_pattern"])
def test_adapter_configs_of_any_type_never_crash(adapters: list[Path], key: str) -> None:
    for value in (None, True, -1, 0.5, "x", [], [[]], [1], {}, {"x": [{}]}):
        for folder in adapters:
            edit_json(folder / ADAPTER_CONFIG, lambda values, value=value: values.update({key: value}))
        with contextlib.suppress(ValueError):
            Posterior.from_adapters(adapters)


def test_no_adapter_is_no_ensemble(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 0 directories"):
        Posterior.from_adapters([])
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors: .*Pickled adapters .* are not read"):
        Posterior.from_adapters([tmp_path])


def test_half_precision_adapters_are_read_in_float32(adapters: list[Path]) -> None:
    from tests.faults.corruptions import edit_tensors

    for folder in adapters:
        edit_tensors(folder / "adapter_model.safetensors", lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    assert Posterior.from_adapters(adapters).approximation.theta.dtype == torch.float32


# -- objects that are no posterior -----------------------------------------------------------------------------------


def test_draws_that_are_not_finite_are_named_with_their_member() -> None:
    posterior = draws(3)
    theta = posterior.approximation.theta.clone()
    theta[1, 20] = float("nan")
    with pytest.raises(ValueError, match=r"norm\.weight is not finite in members \[1\]"):
        Posterior(Draws(theta, torch.arange(3)), posterior.config)


def test_equal_draws_are_refused_unless_they_share_a_chain() -> None:
    theta = posteriors.theta(2, posteriors.PLAIN)[[0, 1, 1]]
    with pytest.raises(ValueError, match="are equal: chains that shared"):
        Posterior(Draws(theta, torch.tensor([0, 1, 2])), config())
    Posterior(Draws(theta, torch.tensor([0, 1, 1])), config())


@pytest.mark.parametrize(
    ("approximation", "changes", "message"),
    [
        (Draws(torch.zeros(2, 25), torch.arange(2)), {}, "2 draws, but num_members is 3"),
        (Draws(torch.randn(3, 7), torch.arange(3)), {}, "theta has 7 columns, the parameters have 25"),
        (Draws(torch.randn(3, 25).bfloat16(), torch.arange(3)), {}, "must be float32 or float64"),
        (Gaussian.diagonal(torch.zeros(1, 25), torch.ones(1, 25)), {}, "is gaussian, the config has draws"),
        (Draws(torch.randn(3, 25), torch.arange(3)), {"member_chains": [0, 0, 0]}, "the config has"),
    ],
)
def test_parts_that_disagree_are_refused(approximation: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Posterior(approximation, config(**changes))


def test_adapter_with_one_factor_only_is_refused() -> None:
    parameters = posteriors.LORA[:1]
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight without .*q_proj\.lora_B\.weight"):
        Posterior(
            Draws(posteriors.theta(3, parameters), torch.arange(3)),
            config(parameters=parameters),
            posteriors.ADAPTER_CONFIG,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "translation"}, "task must be one of causal_lm, sequence_classification"),
        ({"num_members": 0}, "0 members"),
        ({"prediction": "linearised"}, 'prediction must be one of members for draws, got "linearised"'),
        ({"prediction": 1}, "prediction must be one of members for draws, got 1"),
        ({"num_members": True}, "num_members must be an integer"),
        ({"method": {}}, "method's name"),
        ({"parameters": []}, "parameters must be"),
        ({"parameters": [["w", [0]]]}, "parameters must be"),
        ({"parameters": [["w", [1]], ["w", [1]]]}, "each name once"),
        ({"num_data": -1.0}, "num_data must be a number > 0"),
        ({"num_data": float("nan")}, "num_data must be finite"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be an integer from 0 to 18446744073709551615"),
        ({"base_model": {"name_or_path": "x"}}, "base_model must be the keys"),
        ({"diagnostics": {"converged": "yes"}}, "converged must be true, false or null"),
        ({"member_chains": [0]}, "member_chains must be"),
        ({"prior": {"x": object()}}, r"prior\.x holds a object"),
    ],
)
def test_config_values_that_mean_nothing_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("key", config().to_dict())
def test_config_values_of_any_type_never_crash(key: str) -> None:
    for value in (None, True, 0, -1, 2**70, 0.5, "", "x", [], [[]], [1], ["x"], [["x", "y"]], {}, {"x": [{}]}):
        with contextlib.suppress(ValueError):
            made = PosteriorConfig.from_dict({**config().to_dict(), key: value})
            assert made == PosteriorConfig.from_dict(made.to_dict())


def test_config_keys_are_exactly_known() -> None:
    values = config().to_dict()
    assert PosteriorConfig.from_dict(values) == config()
    with pytest.raises(ValueError, match=r"missing keys \['prior'\], unknown keys \['priors'\]"):
        PosteriorConfig.from_dict({**{k: v for k, v in values.items() if k != "prior"}, "priors": {}})
    with pytest.raises(ValueError, match="format_version is 2, this version of hf_bayes reads 1"):
        PosteriorConfig.from_dict({**values, "format_version": 2})


def test_config_takes_the_types_that_code_holds() -> None:
    made = config(parameters=[("w", torch.Size([2]))], metrics={"nll": torch.tensor(0.5)}, seed=3, num_members=1)
    assert made.parameters == [["w", [2]]]
    assert made.metrics == {"nll": 0.5}
    assert dataclasses.replace(made, seed=None).seed is None
    assert library_versions()["torch"] == importlib.metadata.version("torch")


# -- loading ---------------------------------------------------------------------------------------------------------


def test_posterior_that_did_not_converge_warns_with_its_verdict(tmp_path: Path) -> None:
    draws(2, diagnostics={"converged": False, "verdict": "chain 1 did not move"}).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="did not converge: chain 1 did not move"):
        Posterior.from_pretrained(tmp_path)
    for converged in (True, None):
        draws(2, diagnostics={"converged": converged}).save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Posterior.from_pretrained(tmp_path)


def test_member_count_that_differs_from_the_config_is_refused(tmp_path: Path) -> None:
    draws(3).save_pretrained(tmp_path)
    edit_json(tmp_path / CONFIG, lambda values: values.update(num_members=2, member_chains=[0, 1]))
    sign(tmp_path)
    with pytest.raises(
        ValueError, match=r"2 members\): missing \[\], extra \['members/member_002/model\.safetensors'\]"
    ):
        Posterior.from_pretrained(tmp_path)
    edit_json(tmp_path / CONFIG, lambda values: values.update(num_members=0, member_chains=[]))
    sign(tmp_path)
    with pytest.raises(ValueError, match="a posterior of 0 members is empty"):
        Posterior.from_pretrained(tmp_path)


def test_gaussian_without_spread_is_refused(tmp_path: Path) -> None:
    from tests.faults.corruptions import edit_tensors

    gaussian().save_pretrained(tmp_path)
    edit_tensors(tmp_path / "covariance.safetensors", lambda t: t.update({k: v - 9 for k, v in t.items()}))
    sign(tmp_path)
    with pytest.raises(ValueError, match=r"covariance\.safetensors: a diagonal Gaussian needs positive stds"):
        Posterior.from_pretrained(tmp_path)


def test_what_is_no_posterior_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json"):
        Posterior.from_pretrained(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        Posterior.from_pretrained(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="neither a directory nor the id of a repository"):
        Posterior.from_pretrained(tmp_path / "missing" / "deeper" / "still")
    storage.write_directory(tmp_path / "empty", {"x.json": {}}, format=storage.POSTERIOR)
    with pytest.raises(ValueError, match=r"lists no posterior_config\.json"):
        Posterior.from_pretrained(tmp_path / "empty")


def test_subfolder_is_loaded_and_cannot_lead_out(tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path / "a" / "b")
    assert equal(Posterior.from_pretrained(tmp_path, subfolder="a/b"), draws(2))
    for subfolder in ("../x", "/etc", "a/../../b"):
        with pytest.raises(ValueError, match="subfolder must be a relative path inside"):
            Posterior.from_pretrained(tmp_path, subfolder=subfolder)
    with pytest.raises(FileNotFoundError, match="has no folder 'c'"):
        Posterior.from_pretrained(tmp_path, subfolder="c")


def test_saving_without_overwrite_needs_an_empty_directory(tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path / "x", overwrite=False)
    with pytest.raises(ValueError, match="is not empty"):
        draws(3).save_pretrained(tmp_path / "x", overwrite=False)
    assert equal(Posterior.from_pretrained(tmp_path / "x"), draws(2))


def test_sample_gives_all_draws_or_ten_of_a_gaussian() -> None:
    assert torch.equal(draws(3).sample(), draws(3).approximation.theta)
    assert draws(3).sample(2).shape == (2, 25)
    assert gaussian().sample(generator=torch.Generator().manual_seed(0)).shape == (10, 25)
    with pytest.raises(ValueError, match="asked for 4 members, 3 are stored"):
        draws(3).sample(4)
    with pytest.raises(ValueError, match="ask for at least 1"):
        gaussian().sample(0)


@pytest.mark.parametrize("members", ["2", 2.5, True, 0, -1])
def test_members_are_counted_in_whole_numbers(members: Any) -> None:
    with pytest.raises(ValueError, match=r"an integer, got|ask for at least 1"):
        draws(3).sample(members)
