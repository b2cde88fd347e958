from __future__ import annotations

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
from hf_bayes.distributions.approximations import Draws
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.file_formats import ADAPTER_CONFIG
from hf_bayes.posteriors.posterior import Posterior
from tests import tiny_models as models
from tests.faults import posteriors
from tests.faults.posteriors import config, draws, equal, gaussian
from tests.posteriors.lora_posteriors import lora_models

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


def test_figures_that_are_not_defined_are_saved_as_null(tmp_path: Path) -> None:
    posterior = draws(2, diagnostics={"converged": None, "r_hat": float("nan"), "ess": [1.0, float("inf")]}, metrics={})
    posterior.save_pretrained(tmp_path)
    assert Posterior.from_pretrained(tmp_path).config.diagnostics == {
        "converged": None,
        "r_hat": None,
        "ess": [1.0, None],
    }


# -- peft ----------------------------------------------------------------------------------------------------------


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


# -- objects that are no posterior -----------------------------------------------------------------------------------


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


def test_a_checkpoint_is_no_posterior_but_is_beside_one(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        Posterior.from_pretrained(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint} holds no manifest.json: it is a checkpoint, from which a run")
    assert f"The posterior is in {tmp_path} once the run has ended" in str(caught.value)


def test_what_is_no_posterior_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json: it is not a"):
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
