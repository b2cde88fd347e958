from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from huggingface_hub import CommitInfo, HfApi, ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects

import hf_bayes
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.posteriors import hub
from hf_bayes.posteriors.benchmark_results import Benchmark, benchmark_result
from hf_bayes.posteriors.card_results import stamp
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.faults.posteriors import config, draws, equal, gaussian
from tests.posteriors.storage.test_read import as_hub_cache
from tests.tiny_models import tiny_llama, with_lora

# -- push ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pushed() -> Any:
    """Record an upload to the Hub: the calls, and the files that upload_folder selects."""
    calls: dict[str, Any] = {}

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> RepoUrl:
        calls["create_repo"] = {"repo_id": repo_id, "token": self.token, **options}
        return RepoUrl(f"https://huggingface.co/user/{repo_id.split('/')[-1]}")

    def upload_folder(self: HfApi, **options: Any) -> CommitInfo:
        root = Path(options["folder_path"])
        found = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        kept = filter_repo_objects(found, allow_patterns=options["allow_patterns"])
        calls["upload_folder"] = {"token": self.token, **options}
        calls["files"] = {name: (root / name).read_bytes() for name in kept}
        return CommitInfo(
            commit_url="https://huggingface.co/user/x/commit/1", commit_message="", commit_description="", oid="1"
        )

    def create_branch(self: HfApi, repo_id: str, **options: Any) -> None:
        calls["create_branch"] = {"repo_id": repo_id, **options}

    def list_repo_files(self: HfApi, repo_id: str, **options: Any) -> list[str]:
        return calls.get("earlier", [])

    with (
        patch.object(HfApi, "list_repo_files", list_repo_files),
        patch.object(HfApi, "create_repo", create_repo),
        patch.object(HfApi, "upload_folder", upload_folder),
        patch.object(HfApi, "create_branch", create_branch),
    ):
        yield calls


def test_push_sends_the_posterior_and_nothing_else(pushed: dict[str, Any], tmp_path: Path) -> None:
    draws(2, adapter=True).save_pretrained(tmp_path)
    for name in (
        "training_args.bin", "optimizer.pt", "rng_state.pth", "trainer_state.json", "checkpoint-3/model.safetensors",
        ".env", "tokenizer.json", "_hf_bayes_staging-1/adapter_model.safetensors", "token", "runs/events",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("hf_secretsecretsecretsecretsecret")
    assert hub.push_directory(tmp_path, "user/x") == "https://huggingface.co/user/x/commit/1"
    member = ["adapter_config.json", "adapter_model.safetensors"]
    assert set(pushed["files"]) == {
        *member,
        *(f"members/member_00{number}/{name}" for number in range(2) for name in member),
        "posterior_config.json",
        "manifest.json",
        "README.md",
    }
    assert not any(b"secret" in data for data in pushed["files"].values())


def test_what_was_pushed_loads_again(pushed: dict[str, Any], tmp_path: Path) -> None:
    posterior = draws(2, adapter=True)
    posterior.push_to_hub("user/x", token="hf_given", private=True, revision="dev", commit_message="Second")
    for name, data in pushed["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert equal(Posterior.from_pretrained(tmp_path), posterior)
    assert 'PeftModel.from_pretrained(base, "user/x"' in (tmp_path / "README.md").read_text()
    assert pushed["create_repo"] == {"repo_id": "user/x", "token": "hf_given", "private": True, "exist_ok": True}
    assert pushed["create_branch"] == {"repo_id": "user/x", "branch": "dev", "exist_ok": True}
    assert pushed["upload_folder"]["revision"] == "dev"
    assert pushed["upload_folder"]["commit_message"] == "Second"
    assert not any(b"hf_given" in data for data in pushed["files"].values())


def test_push_removes_members_of_an_earlier_push(pushed: dict[str, Any], tmp_path: Path) -> None:
    earlier = ["members/member_007/adapter_model.safetensors", "adapter_model.safetensors", "README.md", "other/x.bin"]
    pushed["earlier"] = earlier
    gaussian(adapter=True).push_to_hub("user/x")
    gone = set(filter_repo_objects(earlier, allow_patterns=pushed["upload_folder"]["delete_patterns"]))
    assert gone == {"members/member_007/adapter_model.safetensors", "adapter_model.safetensors"}


def test_damaged_posterior_is_not_pushed(pushed: dict[str, Any], tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path)
    (tmp_path / "members/member_000/model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 bytes"):
        hub.push_directory(tmp_path, "user/x")
    assert not pushed


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("README.md", "hf_" + "aB3" * 10),
        ("posterior_config.json", "hf_" + "aB3" * 10),
        ("README.md", "hf_oauth_" + "aB3" * 10 + "." + "aB3" * 10),  # signed in with a browser, as in a Space
    ],
)
def test_token_in_a_text_stops_the_push(pushed: dict[str, Any], tmp_path: Path, name: str, token: str) -> None:
    draws(2, prior={"note": token} if name != "README.md" else {"name": "gaussian"}).save_pretrained(tmp_path)
    if name == "README.md":
        with (tmp_path / name).open("a") as file:
            file.write(token)
    with pytest.raises(ValueError, match=f"{name} holds what looks like an access token") as caught:
        hub.push_directory(tmp_path, "user/x")
    assert token not in str(caught.value)
    assert not pushed


def test_an_access_token_is_neither_saved_nor_shown(
    pushed: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    token = "hf_" + "aB3" * 10
    draws(2, adapter=True).save_pretrained(tmp_path / "pushed")
    with caplog.at_level(0), patch("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "pushed")):
        posterior = Posterior.from_pretrained("user/x", token=token)
    posterior.push_to_hub("user/x", token=token)
    posterior.save_pretrained(tmp_path / "saved")
    assert pushed["upload_folder"]["token"] == token
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert token not in repr(posterior) + repr(vars(posterior)) + caplog.text + "".join(capfd.readouterr())


def test_local_base_model_is_warned_about_before_the_push(pushed: dict[str, Any], tmp_path: Path) -> None:
    base = {**config().base_model, "name_or_path": "/home/somebody/models/tiny"}
    posterior = draws(2, adapter=True, base_model=base)
    with pytest.warns(UserWarning, match="the base model is local"):
        posterior.push_to_hub("user/x")
    assert b"/home/" not in pushed["files"]["README.md"]


def test_a_local_prior_is_warned_about_before_the_push(pushed: dict[str, Any]) -> None:
    first = {"posterior": "/home/somebody/first", "used_as": "diagonal", "prior": {"name": "gaussian", "std": 1.0}}
    for prior in (first, {"posterior": "user/second", "used_as": "diagonal", "prior": first}):
        with pytest.warns(UserWarning, match=r"a prior is a local posterior \(/home/somebody/first\): this path"):
            draws(2, prior=prior).push_to_hub("user/x")
        assert b"/home/" not in pushed["files"]["README.md"]


def test_edited_card_is_pushed_and_still_loads(pushed: dict[str, Any], tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# By hand\n")
    hub.push_directory(tmp_path, "user/x")
    assert pushed["files"]["README.md"] == b"# By hand\n"
    assert equal(Posterior.from_pretrained(tmp_path), draws(2))


def test_results_on_benchmarks_are_pushed(pushed: dict[str, Any], tmp_path: Path) -> None:
    draws(2, seed=1).save_pretrained(tmp_path)
    evaluation = {"posterior": draws(2, seed=1).fingerprint, "accuracy": 0.75}
    benchmark = Benchmark.parse("user/set:default:accuracy")
    (tmp_path / ".eval_results").mkdir()
    (tmp_path / benchmark.file).write_text(benchmark_result(benchmark, evaluation))
    (tmp_path / ".eval_results/notes.txt").write_text("not for the Hub")
    hub.push_directory(tmp_path, "user/x")
    found = {name for name in pushed["files"] if name.startswith(".eval_results")}
    assert found == {".eval_results/user-set-default.yaml"}


@pytest.mark.parametrize("name", ["heat_map.png", ".eval_results/user-set-default.yaml"])
def test_a_file_beside_a_card_of_other_weights_is_not_pushed(pushed: dict[str, Any], tmp_path: Path, name: str) -> None:
    draws(2, seed=1).save_pretrained(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"# {stamp(draws(2, seed=1).fingerprint)}")
    hub.push_directory(tmp_path, "user/x")
    assert name in pushed["files"]
    draws(2, seed=2).save_pretrained(tmp_path)  # a run into the same folder
    with pytest.raises(ValueError, match=rf"{name} is of another posterior, or does not say which"):
        hub.push_directory(tmp_path, "user/x")


def test_an_evaluation_of_other_weights_is_not_pushed(pushed: dict[str, Any], tmp_path: Path) -> None:
    draws(2, seed=1).save_pretrained(tmp_path)
    (tmp_path / "evaluation.json").write_text(json.dumps({"posterior": draws(2, seed=2).fingerprint, "nll": 2.5}))
    with pytest.raises(ValueError, match=r"evaluation.json has the figures of another posterior"):
        hub.push_directory(tmp_path, "user/x")
    assert not pushed
    (tmp_path / "evaluation.json").write_text(json.dumps({"posterior": draws(2, seed=1).fingerprint, "nll": 2.5}))
    hub.push_directory(tmp_path, "user/x")
    assert "evaluation.json" in pushed["files"]


def test_push_after_a_killed_save_sends_the_committed_posterior(pushed: dict[str, Any], tmp_path: Path) -> None:
    """A kill right after the commit leaves the new manifest, and all other files in the pending folder."""
    import hashlib

    draws(3, seed=1).save_pretrained(tmp_path / "d")
    draws(2, seed=2).save_pretrained(tmp_path / "new")
    manifest = (tmp_path / "new" / "manifest.json").read_bytes()
    pending = tmp_path / "d" / f"_hf_bayes_pending-{hashlib.sha256(manifest).hexdigest()}"
    shutil.copytree(tmp_path / "new", pending)
    (pending / "_hf_bayes_obsolete.json").write_text('{"files": ["members/member_002/model.safetensors"]}')
    (pending / "manifest.json").replace(tmp_path / "d" / "manifest.json")
    assert equal(Posterior.from_pretrained(tmp_path / "d"), draws(2, seed=2))
    hub.push_directory(tmp_path / "d", "user/x")
    assert (
        pushed["files"]["members/member_000/model.safetensors"]
        == (tmp_path / "new" / "members/member_000/model.safetensors").read_bytes()
    )
    assert "members/member_002/model.safetensors" not in pushed["files"]
    assert equal(Posterior.from_pretrained(tmp_path / "d"), draws(2, seed=2))


def test_the_card_of_a_push_names_the_owner_of_the_repository(pushed: dict[str, Any]) -> None:
    draws(2, adapter=True).push_to_hub("x", license="mit")  # the Hub adds the user to whom the token belongs
    card = ModelCard(pushed["files"]["README.md"].decode())
    assert '.from_pretrained("user/x")' in card.text
    assert 'PeftModel.from_pretrained(base, "user/x"' in card.text
    assert '"x"' not in card.text
    assert card.data.license == "mit"


def test_the_card_of_a_trainer_s_push_names_the_owner(pushed: dict[str, Any], tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path / "x", SGHMCConfig(num_chains=2))
    trainer.train()
    trainer.push_to_hub(tags=["one"])
    card = ModelCard(pushed["files"]["README.md"].decode())
    assert 'from_pretrained("user/x")' in card.text
    assert "one" in card.data.tags


def test_no_repository_is_made_for_a_posterior_that_is_not_saved(pushed: dict[str, Any]) -> None:
    with (
        patch.object(hub.storage, "write_directory", side_effect=OSError("no space left on device")),
        pytest.raises(OSError, match="no space left"),
    ):
        draws(2, adapter=True).push_to_hub("x")
    assert not pushed


def test_a_push_into_a_pull_request_makes_no_branch(pushed: dict[str, Any]) -> None:
    draws(2).push_to_hub("user/x", revision="refs/pr/3")
    assert pushed["upload_folder"]["revision"] == "refs/pr/3"
    assert "create_branch" not in pushed  # the Hub makes no branch of that name


def test_a_live_model_is_not_pushed_and_no_repository_is_made(pushed: dict[str, Any]) -> None:
    model = hf_bayes.attach(with_lora(tiny_llama()))
    with pytest.raises(ValueError, match=r"is pushed as a posterior: BayesianTrainer.push_to_hub\(\)"):
        model.push_to_hub("user/x")
    assert not pushed


TRAINERS_OWN = {"hub_model_id": "user/x", "hub_token": "hf_of_the_arguments", "hub_revision": "dev"}


@pytest.mark.parametrize(
    ("given", "token", "revision", "private"),
    [
        ({}, "hf_of_the_arguments", "dev", None),
        ({"token": "hf_mine", "revision": "exp1", "private": True}, "hf_mine", "exp1", True),
    ],
)
def test_trainer_pushes_where_and_as_whom_it_is_told(
    pushed: dict[str, Any], tmp_path: Path, given: dict[str, Any], token: str, revision: str, private: bool | None
) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), **TRAINERS_OWN)
    trainer.train()
    commit = trainer.push_to_hub("Hello", **given)
    assert isinstance(commit, CommitInfo)
    assert commit == commit.commit_url == "https://huggingface.co/user/x/commit/1"
    assert pushed["create_repo"] == {"repo_id": "user/x", "token": token, "private": private, "exist_ok": True}
    assert pushed["create_branch"]["branch"] == pushed["upload_folder"]["revision"] == revision
    assert (pushed["upload_folder"]["token"], pushed["upload_folder"]["commit_message"]) == (token, "Hello")
    written = [*pushed["files"].values(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    assert not any(secret in data for data in written for secret in (b"hf_mine", b"hf_of_the_arguments"))


def test_trainer_pushes_to_the_main_branch_by_default(pushed: dict[str, Any], tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), hub_model_id="user/x")
    trainer.train()
    trainer.push_to_hub()
    assert "create_branch" not in pushed
    assert pushed["upload_folder"]["revision"] is None


def test_a_push_that_does_not_block_is_one_in_the_future(pushed: dict[str, Any], tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), hub_model_id="user/x")
    trainer.train()
    future = trainer.push_to_hub(blocking=False)
    assert future.result(timeout=60) == "https://huggingface.co/user/x/commit/1"
    assert "posterior_config.json" in pushed["files"]


def test_tags_of_a_push_stand_beside_the_card_s_own(pushed: dict[str, Any], tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), hub_model_id="user/x")
    trainer.train()
    for tags, added in (("one", ["one"]), (["a", "bayesian", "b"], ["a", "b"])):
        trainer.push_to_hub(tags=tags)
        card = ModelCard(pushed["files"]["README.md"].decode())
        assert card.data.tags == ["hf_bayes", "bayesian", "sghmc", "lora", *added]
        assert "from_pretrained" in card.text  # and the rest is unchanged
    with pytest.raises(ValueError, match=r"tags of a model card are texts, got 3"):
        trainer.push_to_hub(tags=["a", 3])


def test_unsupported_push_options_are_refused_before_any_write(pushed: dict[str, Any], tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), hub_model_id="user/x")
    trainer.train()
    with pytest.raises(ValueError, match=r"card takes license, language, .* got create_pr: leave it out"):
        trainer.push_to_hub(license="mit", create_pr=True)
    assert not pushed
    assert not (tmp_path / "manifest.json").exists()


# -- fetch -----------------------------------------------------------------------------------------------------------


def test_posterior_is_loaded_from_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(2, adapter=True).save_pretrained(tmp_path / "posterior")
    as_hub_cache(tmp_path / "posterior", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert equal(Posterior.from_pretrained("user/posterior"), draws(2, adapter=True))
    ensemble = Posterior.from_adapters(["user/posterior"])
    assert ensemble.config.num_members == 1


def test_a_revision_of_a_local_directory_is_refused(tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"revision='v2' is for a repository of the Hub, .* is a folder here: leave"):
        Posterior.from_pretrained(tmp_path, revision="v2")
    for same in (None, "main"):  # the defaults of transformers and of other libraries
        assert equal(Posterior.from_pretrained(tmp_path, revision=same), draws(2))


def test_a_download_fetches_only_posterior_files_of_one_revision(tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path / "sub")
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    with patch("huggingface_hub.snapshot_download", download):
        loaded = Posterior.from_pretrained("user/posterior", revision="v2", subfolder="sub", token="t")
    assert equal(loaded, draws(2))
    assert asked["repo_id"] == "user/posterior"
    assert (asked["revision"], asked["token"]) == ("v2", "t")
    assert {"sub/*.json", "sub/*.safetensors", "sub/*.md"} < set(asked["allow_patterns"])
    assert all(pattern.startswith("sub/") for pattern in asked["allow_patterns"])
    kept = ["sub/members/member_000/model.safetensors", "sub/README.md", "sub/chat_template.jinja", "sub/a.model"]
    left = ["sub/training_args.bin", "sub/modeling.py", "other/x.json", "checkpoint-3/a.json"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(kept + left, **patterns)) == kept


def test_a_misspelt_setting_of_the_place_is_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"revison": "v2"}
    with pytest.raises(TypeError, match=r"place has no revison: it takes token, .*revision, subfolder"):
        Posterior.from_pretrained(tmp_path, **settings)


def test_repository_that_the_hub_does_not_give_is_named() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"user/no-such-posterior is not a directory here, and the download from the Hub failed"
    ) as refused:
        Posterior.from_pretrained("user/no-such-posterior")
    assert str(refused.value).splitlines()[0].endswith("Check the name, the token and the network")


@pytest.mark.parametrize(
    ("name", "local"),
    [("a/b", False), ("gpt2", False), (None, False), ("/x", True), ("./x", True), ("~/x", True), ("a/b/c", True),
     ("x" * 6000, False)],
)  # fmt: skip
def test_local_names_of_base_models_are_told_from_ids(name: str | None, local: bool) -> None:
    assert hub.is_local(name) is local


@pytest.mark.parametrize(("value", "expected"), [("user/name", True), (Path("here"), True), (None, False), (1, False)])
def test_a_place_is_a_text_or_a_path(value: Any, expected: bool) -> None:
    assert hub.is_place(value) == expected
