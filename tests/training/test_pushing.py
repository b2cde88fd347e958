from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, RepoUrl

from hf_bayes import Posterior
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs


def test_push_uploads_no_checkpoints_and_no_pickles(tmp_path, monkeypatch):
    sent: dict[str, Any] = {}

    def upload_folder(self: HfApi, *, folder_path: str, allow_patterns: list[str], **others: Any) -> Any:
        sent.update(others, allow_patterns=allow_patterns, files={p.name for p in Path(folder_path).rglob("*")})
        return SimpleNamespace(oid="1", commit_url="https://huggingface.co/user/x/commit/1")

    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, repo_id, **others: RepoUrl(f"https://huggingface.co/{repo_id}")
    )
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, repo_id, **others: [])
    trainer = runs.trainer(tmp_path, SGHMCConfig(), hub_model_id="user/x", save_strategy="steps", save_steps=3)
    trainer.train()
    (tmp_path / "training_args.bin").write_bytes(b"a pickle that may hold a token")
    trainer.push_to_hub()
    assert sent["repo_id"] == "user/x"
    assert not [
        name for name in sent["allow_patterns"] if "checkpoint" in name or name.endswith((".bin", ".pt", ".pth"))
    ]
    assert "manifest.json" in sent["allow_patterns"]


def test_a_setting_of_a_push_comes_before_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Posterior, "push_to_hub", lambda self, repo_id, **given: sent.append({"to": repo_id, **given}))
    trainer = runs.trainer(tmp_path / "mine", SGHMCConfig(), hub_token="of args", hub_private_repo=True)
    trainer.train()
    trainer.push_to_hub(license="mit")
    trainer.push_to_hub(token="given", private=False, tags=["new"])
    first, second = ({name: found[name] for name in ("to", "token", "private")} for found in sent)
    assert first == {"to": "mine", "token": "of args", "private": True}
    assert second == {"to": "mine", "token": "given", "private": False}
    assert (sent[1]["license"], sent[1]["tags"]) == ("mit", ["new"])


def test_save_model_pushes_if_the_arguments_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        Posterior, "push_to_hub", lambda self, repo_id, **given: sent.append((repo_id, given["commit_message"]))
    )
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, repo_id, **others: RepoUrl(f"https://huggingface.co/{repo_id}")
    )
    settings = {"hub_model_id": "user/x", "save_strategy": "steps", "save_steps": 3}
    for pushes in (False, True):
        trainer = runs.trainer(tmp_path / str(pushes), SGHMCConfig(), push_to_hub=pushes, **settings)
        trainer.train()
        assert sent == []  # a checkpoint is no posterior
        trainer.save_model()
    assert sent == [("user/x", "Model save")]
