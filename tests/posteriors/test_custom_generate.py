from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from hf_bayes.members.compat.transformers import CACHE
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.posteriors.custom_generate import as_draws, export_custom_generate, generate_file
from hf_bayes.posteriors.file_formats import GENERATION_CONFIG
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.posteriors.storage import disk
from tests.faults.posteriors import draws
from tests.hub_server import serving
from tests.models.prepared import unchanged
from tests.posteriors.exported import KINDS, posterior_of
from tests.tiny_models import batch

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 50, "num_return_sequences": 2},
    "without-cache": {"do_sample": False, "use_cache": False},
}
INPUTS = batch(3, 6, padding="left")
CALIBRATION = {
    "temperature": 0.6, "log_std_error": 0.1, "nll": 2.0, "calibrated_nll": 1.9, "nll_std_error": 0.1,
    "num_terms": 100, "num_members": 3, "prediction": "members",
}  # fmt: skip


def text(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**INPUTS, max_new_tokens=7, pad_token_id=0, return_dict_in_generate=True, **options)


def require_equal(posterior: Posterior, base: Path, exported: Path, **options: Any) -> None:
    ours = BayesianModelForCausalLM.from_pretrained(posterior, base_model=str(base))
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = text(ours, **options)
    found = text(plain, custom_generate=str(exported), trust_remote_code=True, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.epistemic.nan_to_num().max() > 1e-3  # there is something to compare
    for part in ("total", "aleatoric", "epistemic"):
        # float32 of our own model: entropies of up to 6 nats have errors of 1e-6, epistemic uncertainty of 1e-7
        atol = 1e-6 if part == "epistemic" else 4e-6
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_generates_as_our_own_model(kind: str, tmp_path: Path) -> None:
    posterior = posterior_of(kind, tmp_path / "base")
    export_custom_generate(posterior, tmp_path / "out")
    for options in WAYS.values():
        require_equal(posterior, tmp_path / "base", tmp_path / "out", **options)


def test_a_fitted_temperature_of_the_mixture_is_applied(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    posterior = dataclasses.replace(posterior, config=dataclasses.replace(posterior.config, calibration=CALIBRATION))
    export_custom_generate(posterior, tmp_path / "out")
    require_equal(posterior, tmp_path / "base", tmp_path / "out")


def test_settings_saved_with_the_posterior_are_the_defaults(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    ours = BayesianModelForCausalLM.from_pretrained(posterior, base_model=str(tmp_path / "base"))
    end = text(ours).sequences[0, 8].item()
    saved = Sidecars({**posterior.sidecars.files, GENERATION_CONFIG: json.dumps({"eos_token_id": end}).encode()})
    posterior = dataclasses.replace(posterior, sidecars=saved)
    export_custom_generate(posterior, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    found = text(plain, custom_generate=str(tmp_path / "out"), trust_remote_code=True)
    assert found.epistemic[0].isnan().any()
    assert plain.generation_config.eos_token_id != end
    require_equal(posterior, tmp_path / "base", tmp_path / "out")


def test_draws_of_a_gaussian_are_those_of_our_own_model(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base", gaussian=True)
    exported = export_custom_generate(posterior, tmp_path / "out")
    assert exported.config.num_members == 10
    require_equal(posterior, tmp_path / "base", tmp_path / "out")
    assert torch.equal(Posterior.from_pretrained(tmp_path / "out").approximation.rows, exported.approximation.rows)


def test_fewer_draws_are_evenly_spaced_over_the_chains(tmp_path: Path) -> None:
    found = as_draws(posterior_of("lora", tmp_path / "base", members=4), 2)
    assert found.config.num_members == 2
    assert found.config.member_chains == [0, 2]


@pytest.mark.parametrize(
    ("gaussian", "fitted", "members", "kept"),
    [
        (False, 3, 2, set()),
        (False, 2, 2, {"calibration"}),
        (True, 3, None, {"metrics"}),  # a Gaussian predicts with 10 members
        (True, 10, None, {"calibration", "metrics"}),
        (True, 3, 3, {"calibration"}),
    ],
)
def test_figures_of_other_members_are_left_out(
    gaussian: bool, fitted: int, members: int | None, kept: set[str], tmp_path: Path
) -> None:
    posterior = posterior_of("lora", tmp_path / "base", members=4, gaussian=gaussian)
    fits = {"calibration": CALIBRATION | {"num_members": fitted}, "metrics": {"nll": 2.0}}
    config = dataclasses.replace(posterior.config, **fits)
    found = as_draws(dataclasses.replace(posterior, config=config), members).config
    assert {name: getattr(found, name) for name in fits} == {name: fits[name] if name in kept else {} for name in fits}


def test_the_base_model_is_left_unchanged(tmp_path: Path) -> None:
    export_custom_generate(posterior_of("lora-and-whole-modules", tmp_path / "base"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with unchanged(plain):
        text(plain, custom_generate=str(tmp_path / "out"), trust_remote_code=True)


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    export_custom_generate(posterior_of("lora", tmp_path / "base"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        plain.model.norm.weight.add_(1e-3)
    given = {"custom_generate": str(tmp_path / "out"), "trust_remote_code": True}
    with pytest.raises(ValueError, match="this is another base model: expected the weights of"):
        text(plain, **given)
    assert text(plain, check_base=False, **given).epistemic.nan_to_num().max() > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam_search is not supported"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "beam_search is not supported"),
        ({CACHE: DynamicCache()}, f"{CACHE} is not supported"),
        ({"cache_implementation": "static"}, "a cache of another kind is not supported"),
        ({"guidance_scale": 2.0}, "guidance_scale is not supported"),
        ({"attention_mask": INPUTS["attention_mask"].flip(1)}, "pad on the left"),
    ],
)
def test_other_ways_of_generating_are_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    export_custom_generate(posterior_of("lora", tmp_path / "base"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=named):
        plain.generate(
            **(INPUTS | options), max_new_tokens=2, custom_generate=str(tmp_path / "out"), trust_remote_code=True
        )


def test_a_fresh_clone_of_a_repository_is_filled(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    (tmp_path / "clone" / ".git").mkdir(parents=True)
    (tmp_path / "clone" / ".gitattributes").write_text("*.safetensors filter=lfs")
    export_custom_generate(posterior, tmp_path / "clone")
    export_custom_generate(posterior, tmp_path / "new")
    found, new = ({path.name for path in (tmp_path / name).iterdir()} for name in ("clone", "new"))
    assert found == new | {".git", ".gitattributes"}


def test_what_the_file_cannot_represent_is_refused(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    config = posterior.config
    quantised = dataclasses.replace(config, head={"quantization_config": {"quant_method": "bitsandbytes"}})
    assert posterior.adapter_config is not None
    for refused, reason in [
        (draws(2), "for posteriors of language models"),
        (dataclasses.replace(posterior, config=quantised), "has a quantised base model"),
        (
            dataclasses.replace(posterior, adapter_config={**posterior.adapter_config, "init_lora_weights": "pissa"}),
            "init_lora_weights='pissa'",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            export_custom_generate(refused, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    linear = posterior_of("lora", tmp_path / "base", gaussian=True)
    linear = dataclasses.replace(linear, config=dataclasses.replace(linear.config, prediction="linearised"))
    with pytest.raises(ValueError, match="predicts by 'linearised'"):
        export_custom_generate(linear, tmp_path / "out")


def test_the_file_is_clean_in_its_rendered_form(tmp_path: Path) -> None:
    ruff = shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed (make lint has it)")
    (tmp_path / "generate.py").write_text(generate_file())
    root = Path(__file__).parents[2]
    shutil.copy(root / "pyproject.toml", tmp_path)
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *check, "generate.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert "hf_bayes import" not in generate_file()
    assert "import hf_bayes" not in generate_file()


def test_numbers_after_the_end_of_a_row_are_undefined(tmp_path: Path) -> None:
    export_custom_generate(posterior_of("lora", tmp_path / "base"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    given = {"custom_generate": str(tmp_path / "out"), "trust_remote_code": True}
    first = text(plain, **given).sequences[0, 6].item()
    found = text(plain, eos_token_id=first, **given)
    assert math.isfinite(found.epistemic[0, 0])
    assert found.epistemic[0, 1:].isnan().all()


def test_a_repository_of_the_hub_generates_as_its_folder(tmp_path: Path) -> None:
    posterior = posterior_of("lora", tmp_path / "base")
    export_custom_generate(posterior, tmp_path / "out", repo_id="user/posterior")
    files = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes()
             for path in (tmp_path / "out").rglob("*") if path.is_file()}  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = text(plain, custom_generate=str(tmp_path / "out"), trust_remote_code=True)
    with serving() as hub:
        hub.commit("user/posterior", "main", files, [])
        revision = hub.sha("user/posterior", "main")
        hub.commit("user/posterior", "main", {"members/member_000/adapter_model.safetensors": b"other"}, [])
        given = {"custom_generate": "user/posterior", "revision": revision, "cache_dir": str(tmp_path / "cache")}
        found = text(plain, trust_remote_code=True, **given)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.epistemic.nan_to_num(), expected.epistemic.nan_to_num())


def test_the_place_can_be_given_if_transformers_has_none(tmp_path: Path) -> None:
    export_custom_generate(posterior_of("lora", tmp_path / "base"), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    function = plain.load_custom_generate(str(tmp_path / "out"), trust_remote_code=True)
    with pytest.raises(ValueError, match="the place of the posterior is not known"):
        function(model=plain, **INPUTS)
    assert function(model=plain, posterior=str(tmp_path / "out"), max_new_tokens=2, **INPUTS).shape[1] == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "last-layer"])
def test_a_process_without_hf_bayes_generates_the_same(kind: str, tmp_path: Path) -> None:
    """``HF_BAYES_CLEAN_PYTHON`` names a Python that has only torch, transformers and safetensors."""
    posterior = posterior_of(kind, tmp_path / "base")
    export_custom_generate(posterior, tmp_path / "out")
    script, python = Path(__file__).parent / "without_hf_bayes.py", os.environ.get("HF_BAYES_CLEAN_PYTHON")
    arguments = [str(tmp_path / "base"), str(tmp_path / "out"), str(tmp_path / "found")]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python or sys.executable, str(script), *arguments]
    subprocess.run(command, cwd=tmp_path, env=clean, check=True)
    found = load_file(tmp_path / "found")
    ours = BayesianModelForCausalLM.from_pretrained(posterior, base_model=str(tmp_path / "base"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base", padding_side="left")
    inputs = tokenizer(["The mitochondrion is", "Langevin"], padding=True, return_tensors="pt")
    for name in ("greedy", "sampling"):
        torch.manual_seed(0)
        expected = ours.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=name == "sampling",
            max_new_tokens=12, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(found[f"{name}.sequences"], expected.sequences)
        difference = (found[f"{name}.epistemic"] - expected.epistemic).abs().nan_to_num().max().item()
        print(f"{kind}, {name}: largest difference of EU {difference:.1e} nats")
        assert difference < 1e-6


def test_a_full_disk_leaves_no_part_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, write = posterior_of("lora", tmp_path / "base"), disk.write
    for name in ("manifest.json", "generate.py"):

        def full(path: Path, data: bytes, *, last: str = name) -> None:
            if path.name == last:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write(path, data)

        monkeypatch.setattr(disk, "write", full)
        with pytest.raises(OSError, match="No space left") as caught:
            export_custom_generate(posterior, tmp_path / "out")
        assert caught.value.strerror.startswith(f"cannot save to {tmp_path / 'out'}: No space left on device at ")
        assert caught.value.strerror.count("cannot save") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
