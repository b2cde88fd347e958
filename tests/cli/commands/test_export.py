from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_bayes.posteriors.posterior import Posterior
from tests.cli.commands.running import run
from tests.tiny_models import batch


def test_the_repository_is_a_posterior_with_code_and_a_card(posterior: str, tmp_path: Path) -> None:
    run("export", posterior, "--custom_generate", str(tmp_path / "out"), "--repo_id", "user/posterior")
    assert (tmp_path / "out/custom_generate/generate.py").exists()
    assert Posterior.from_pretrained(tmp_path / "out").fingerprint == Posterior.from_pretrained(posterior).fingerprint
    assert 'custom_generate="user/posterior", trust_remote_code=True' in (tmp_path / "out/README.md").read_text()


def test_a_member_is_a_model_or_an_adapter_that_says_the_same(posterior: str, tmp_path: Path) -> None:
    run("export", posterior, "--model", str(tmp_path / "model"), "--member", "1")
    run("export", posterior, "--adapter", str(tmp_path / "adapter"), "--member", "1")
    base = AutoModelForCausalLM.from_pretrained(Path(posterior).parent / "base")
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(**batch()).logits
    other = PeftModel.from_pretrained(base, tmp_path / "adapter")(**batch()).logits
    assert (one - other).abs().max() < 1e-4  # float32: merged weights are rounded once more


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "give one of --custom_generate, --model, --adapter, --space, --card, got none"),
        (["--model", "a", "--adapter", "b"], "got model, adapter"),
        (["--model", "a"], "--model is one network: give --member K or --mean"),
        (["--adapter", "a", "--member", "0", "--mean", "true"], "--adapter is one network"),
        (["--space", "a", "--member", "0"], "--member does not go with --space"),
        (["--adapter", "a", "--member", "7"], "has no member 7, expected 0 to 1"),
        (["--adapter", "a", "--mean", "true"], "holds draws: the mean of networks"),
        (["--space", "a"], "a Space loads posteriors from the Hub"),
    ],
)
def test_exports_that_do_not_exist_are_refused(
    posterior: str, arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=named):
        run("export", posterior, *arguments)
    assert not list(tmp_path.iterdir())
