from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.directory import GAUSSIAN, expected_shapes, fingerprint_of
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import is_sidecar
from hf_bayes.posteriors.storage import POSTERIOR, read_directory
from tests.faults import posteriors
from tests.faults.edits import edit_json, sign
from tests.faults.posteriors import draws, equal, gaussian


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


@pytest.mark.parametrize("make", [draws, gaussian])
@pytest.mark.parametrize("adapter", [True, False])
def test_the_files_have_the_fingerprint_of_the_posterior(tmp_path: Path, make: Any, adapter: bool) -> None:
    posterior = make(2, adapter=adapter)
    posterior.save_pretrained(tmp_path)
    contents = read_directory(tmp_path, format=POSTERIOR, raw=is_sidecar)
    assert fingerprint_of(contents) == posterior.fingerprint


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
    from tests.faults.edits import edit_tensors

    gaussian().save_pretrained(tmp_path)
    edit_tensors(tmp_path / "covariance.safetensors", lambda t: t.update({k: v - 9 for k, v in t.items()}))
    sign(tmp_path)
    with pytest.raises(ValueError, match=r"covariance\.safetensors: a diagonal Gaussian needs positive stds"):
        Posterior.from_pretrained(tmp_path)


def test_a_wrong_covariance_is_refused_by_its_header() -> None:
    posterior = gaussian()
    check = expected_shapes({CONFIG: posterior.config.to_dict()}, [CONFIG, GAUSSIAN])[GAUSSIAN]
    assert callable(check)
    with pytest.raises(ValueError, match=r"covariance\.safetensors: missing tensors"):
        check({"junk": {"shape": [10**9]}})


def test_a_large_wrong_covariance_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaussian().save_pretrained(tmp_path)
    save_file({"junk": torch.zeros(99)}, tmp_path / GAUSSIAN)
    sign(tmp_path)
    monkeypatch.setattr("hf_bayes.posteriors.storage.read.MAX_TEXT", 300)  # such a file is large
    with pytest.raises(ValueError, match=r"covariance\.safetensors: missing tensors"):
        read_directory(
            tmp_path,
            format=POSTERIOR,
            only=lambda name: name == GAUSSIAN,
            expected=lambda *_: {
                GAUSSIAN: expected_shapes({CONFIG: gaussian().config.to_dict()}, [CONFIG, GAUSSIAN])[GAUSSIAN]
            },
        )


@pytest.mark.parametrize("components", [1, 3])
def test_a_large_covariance_is_read(components: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = gaussian(components)
    posterior.save_pretrained(tmp_path)
    monkeypatch.setattr("hf_bayes.posteriors.storage.read.MAX_TEXT", 500)  # above the header, below the file
    assert (tmp_path / GAUSSIAN).stat().st_size > 500
    assert equal(Posterior.from_pretrained(tmp_path), posterior)


def test_more_directions_than_parameters_are_refused() -> None:
    config = dataclasses.replace(gaussian().config, approximation="gaussian_low_rank")
    check = expected_shapes({CONFIG: config.to_dict()}, [CONFIG, GAUSSIAN])[GAUSSIAN]
    assert callable(check)
    shapes = config.layout.named_shapes
    dim = config.layout.dim

    def header(rank: int) -> dict[str, Any]:
        parts = {"means": (1,), "stds": (1,), "basis": (1, rank)}
        found = {f"{part}.{name}": {"shape": [*lead, *shape]} for part, lead in parts.items()
                 for name, shape in shapes.items()}  # fmt: skip
        return found | {"scale": {"shape": [1, rank]}}

    check(header(dim))
    with pytest.raises(ValueError, match=rf"holds [\d,]+ numbers, expected at most [\d,]+ for {dim} parameters"):
        check(header(2 * dim + 1))


@pytest.mark.parametrize("make", [draws, gaussian])
def test_a_posterior_of_a_real_size_comes_back(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.posteriors.PLAIN", [["lm_head.weight", [32_000, 140]]])
    posterior = make(1)
    posterior.save_pretrained(tmp_path)
    assert max(file.stat().st_size for file in tmp_path.rglob("*")) > 16 * 2**20  # others are read in another way
    assert equal(Posterior.from_pretrained(tmp_path), posterior)
