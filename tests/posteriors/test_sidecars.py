"""Tokenizer, templates, image processor and generation config: saved, verified and carried with the tensors."""

from __future__ import annotations

import copy
import errno
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.loading.posterior import load_image_processor, load_tokenizer
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import MAX_BYTES, Sidecars, is_sidecar, sidecars_in
from tests.faults.posteriors import draws
from tests.pipelines.test_classification import processor
from tests.runs import token_rows, trainer
from tests.tiny_models import batch, tiny_llama, tiny_tokenizer, with_lora

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
CHAT = [{"role": "user", "content": "a cell"}]


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def with_sidecars(directory: Path, *sources: Any) -> Path:
    """Return a posterior without a model, with the files of these processors."""
    sidecars = Sidecars()
    for source in sources:
        sidecars |= Sidecars.of(source)
    replace(draws(2), sidecars=sidecars).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on a base without a chat template, saved by the trainer with a template."""
    folder = tmp_path_factory.mktemp("run")
    tiny_llama().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    model = with_lora(AutoModelForCausalLM.from_pretrained(folder / "base"))
    model.generation_config.max_new_tokens = 5
    run = trainer(folder / "posterior", MAPConfig(num_chains=2), model=model, processing_class=chat_tokenizer())
    run.train()
    run.save_model()
    return folder / "posterior"


# -- one save ------------------------------------------------------------------------------------------------------


def test_the_manifest_lists_all_but_the_card(finished: Path) -> None:
    listed = json.loads((finished / "manifest.json").read_text())["files"]
    present = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    assert present - set(listed) == {"README.md", "manifest.json"}
    expected = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert expected == {name for name in listed if is_sidecar(name)}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda object: pickle.loads(pickle.dumps(object))])
def test_a_loaded_posterior_and_its_model_can_be_copied(finished: Path, copied: Callable[[Any], Any]) -> None:
    posterior = Posterior.from_pretrained(finished)
    assert posterior.sidecars.files
    assert copied(posterior).sidecars == posterior.sidecars
    model = BayesianModelForCausalLM.from_pretrained(posterior)
    with torch.no_grad():
        assert torch.equal(copied(model)(**batch()).logits, model(**batch()).logits)


def test_a_loaded_posterior_keeps_its_tokenizer(finished: Path, tmp_path: Path) -> None:
    Posterior.from_pretrained(finished).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "<s>a cell</s>"
    assert tokenizer.name_or_path == str(tmp_path)
    assert Posterior.from_pretrained(tmp_path).sidecars == Posterior.from_pretrained(finished).sidecars


def test_a_template_set_after_training_is_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path, MAPConfig(num_chains=2), processing_class=tiny_tokenizer())
    run.train()
    run.processing_class.chat_template = "late"
    run.save_model()
    assert load_tokenizer(tmp_path).chat_template == "late"


def test_sidecars_of_an_earlier_save_are_removed(tmp_path: Path) -> None:
    with_sidecars(tmp_path, chat_tokenizer({"default": TEMPLATE, "tools": "t"}))
    assert load_tokenizer(tmp_path).chat_template == {"default": TEMPLATE, "tools": "t"}
    with_sidecars(tmp_path, processor())
    assert sidecars_in(tmp_path) == ["preprocessor_config.json"]
    assert list(load_image_processor(tmp_path).image_mean) == [0.5] * 3


def test_post_hoc_fits_keep_the_tokenizer(finished: Path) -> None:
    rows = token_rows(4)
    around = fit_laplace(finished, rows)
    assert around.sidecars == Posterior.from_pretrained(finished).sidecars
    assert around.config.base_model["fingerprint"]["tokenizer"]
    given = fit_laplace(with_lora(tiny_llama()), rows, tokenizer=chat_tokenizer())
    assert given.sidecars.files["chat_template.jinja"] == TEMPLATE.encode()


def test_the_generation_config_comes_with_the_posterior(finished: Path) -> None:
    lent = tiny_llama()
    for options in ({}, {"base_model": lent}):
        assert BayesianModelForCausalLM.from_pretrained(finished, **options).generation_config.max_new_tokens == 5
    assert lent.generation_config.max_new_tokens is None


# -- verified ------------------------------------------------------------------------------------------------------


def change(key: str, value: Any) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    return edit


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("preprocessor_config.json", change("image_mean", [0.1] * 3)),
        ("tokenizer_config.json", change("model_max_length", 3)),
        ("chat_template.jinja", cut),
        ("tokenizer.json", link),
        ("tokenizer.json", Path.unlink),
    ],
)
def test_a_changed_sidecar_is_refused_by_name(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    saved = with_sidecars(tmp_path / "posterior", chat_tokenizer(), processor())
    damage(saved / name)
    for load in (Posterior.from_pretrained, load_tokenizer, load_image_processor):
        with pytest.raises(ValueError, match=f"{name}( has|:| is a link| is missing)"):
            load(saved)


def test_a_file_that_no_manifest_lists_is_ignored(tmp_path: Path) -> None:
    saved = with_sidecars(tmp_path, tiny_tokenizer())
    (saved / "chat_template.jinja").write_text("other")
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "tools.jinja").write_text("other")
    with pytest.warns(
        UserWarning, match=r"ignored additional_chat_templates/tools\.jinja, chat_template\.jinja, which"
    ):
        assert load_tokenizer(saved).chat_template is None
    with_sidecars(tmp_path, chat_tokenizer())
    assert load_tokenizer(saved).chat_template == TEMPLATE


def test_paths_in_a_config_do_not_lead_out(tmp_path: Path) -> None:
    files = dict(Sidecars.of(chat_tokenizer()).files)
    other = {**json.loads(files["tokenizer.json"]), "added_tokens": []}
    (tmp_path / "tokenizer.4.0.0.json").write_text(json.dumps(other))
    config = json.loads(files["tokenizer_config.json"])
    config["fast_tokenizer_files"] = [f"{tmp_path}/tokenizer.4.0.0.json"]
    files["tokenizer_config.json"] = json.dumps(config).encode()
    replace(draws(2), sidecars=Sidecars(files)).save_pretrained(tmp_path / "posterior")
    assert "<s>" in load_tokenizer(tmp_path / "posterior").get_added_vocab()


# -- code ----------------------------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def naming_code(base: Path, reference: str) -> Posterior:
    """Return a posterior whose tokenizer config names code."""
    files = dict(Sidecars.of(tiny_tokenizer()).files)
    values = {"auto_map": {"AutoTokenizer": [None, reference]}, "tokenizer_class": "OwnTokenizer"}
    config = {**json.loads(files["tokenizer_config.json"]), **values}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    posterior = draws(2, base_model={**draws(2).config.base_model, "name_or_path": str(base)})
    return replace(posterior, sidecars=Sidecars(files))


@pytest.mark.parametrize(
    ("reference", "trust", "words"),
    [
        ("own_tokenizer.OwnTokenizer", False, "custom code"),
        ("own_tokenizer.OwnTokenizer", True, r"base does not appear to have a file named own_tokenizer"),
        ("{saved}--own_tokenizer.OwnTokenizer", False, "custom code"),
        ("{saved}--own_tokenizer.OwnTokenizer", True, "names code of '.*' in auto_map, expected code of the base"),
    ],
)
def test_code_beside_a_posterior_never_runs(tmp_path: Path, reference: str, trust: bool, words: str) -> None:
    saved, marker = tmp_path / "posterior", tmp_path / "ran"
    (tmp_path / "base").mkdir()
    naming_code(tmp_path / "base", reference.format(saved=saved)).save_pretrained(saved)
    (saved / "own_tokenizer.py").write_text(CODE.format(marker=str(marker)))
    with pytest.raises(ValueError, match=words):
        load_tokenizer(saved, trust_remote_code=trust)
    assert not marker.exists()


def test_code_of_the_base_model_runs_with_consent_only(tmp_path: Path) -> None:
    saved, marker, base = tmp_path / "posterior", tmp_path / "ran", tmp_path / "base"
    base.mkdir()
    (base / "own_tokenizer.py").write_text(CODE.format(marker=str(marker)))
    naming_code(base, "own_tokenizer.OwnTokenizer").save_pretrained(saved)
    with pytest.raises(ValueError, match=r"saved with the posterior .* contains custom code"):
        load_tokenizer(saved)
    assert not marker.exists()
    assert type(load_tokenizer(saved, trust_remote_code=True)).__name__ == "OwnTokenizer"
    assert marker.exists()


def test_a_base_within_the_posterior_brings_no_code(tmp_path: Path) -> None:
    naming_code(tmp_path / "code", "own_tokenizer.OwnTokenizer").save_pretrained(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "code")
    (tmp_path / "code" / "own_tokenizer.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    for load in (load_tokenizer, BayesianModelForSequenceClassification.from_pretrained):
        with pytest.raises(ValueError, match="own place: no code"):
            load(tmp_path, trust_remote_code=True)
    assert not (tmp_path / "ran").exists()


# -- what is kept --------------------------------------------------------------------------------------------------


class Writes:
    """A substitute for a processor, which saves one file."""

    def __init__(self, name: str, content: bytes = b"{}") -> None:
        self.name, self.content = name, content

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / self.name).write_bytes(self.content)


def test_code_is_left_out_and_pickles_are_refused() -> None:
    assert Sidecars.of(Writes("tokenization_own.py")) == Sidecars()
    for name in ("vocab.pkl", "model.bin", "config.json", "adapter_config.json", "notes.txt"):
        with pytest.raises(ValueError, match=rf"the Writes saves {name}, which a posterior does not keep"):
            Sidecars.of(Writes(name))
    with pytest.raises(ValueError, match="a dict cannot be saved with the posterior: it has no save_pretrained"):
        Sidecars.of({})


def test_a_cut_or_endless_file_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json of the Writes, written to .*, is not valid JSON"):
        Sidecars.of(Writes("tokenizer.json", b'{"model": '))
    with pytest.raises(ValueError, match=r"a\.model \(67,108,865 bytes\): a posterior keeps files of at most"):
        Sidecars({"a.model": bytes(MAX_BYTES + 1)})
    with pytest.raises(ValueError, match="65 files of tokenizer and processor"):
        Sidecars({f"vocab{number}.txt": b"" for number in range(65)})


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool.jinja", "tokenizer_config.json"]
)
def test_an_endless_chat_template_is_refused(name: str) -> None:
    endless = "{% for m in messages %}{% for i in range(9999) %}x{% endfor %}{% endfor %}"
    data = json.dumps({"chat_template": [{"name": "default", "template": endless}]}) if "json" in name else endless
    with pytest.raises(
        ValueError, match=f"{re.escape(name)}: the chat template is refused: line 1: a loop over a list"
    ):
        Sidecars({name: data.encode()})


def test_a_tokenizer_that_cannot_be_kept_stops_the_run_early(tmp_path: Path) -> None:
    run = trainer(tmp_path, MAPConfig(), processing_class=tiny_tokenizer())
    run.processing_class = Writes("vocab.pkl")
    with pytest.raises(ValueError, match=r"saves vocab\.pkl"):
        run.train()
    assert run.state.global_step == 0


def test_a_full_disk_is_named_and_the_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, MAPConfig(num_chains=2), processing_class=tiny_tokenizer())
    run.train()

    def full(folder: str) -> None:
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    with monkeypatch.context() as patch:
        patch.setattr(run.processing_class, "save_pretrained", full)
        with pytest.raises(OSError, match=r"the files of .* to /.*: No space left .*TMPDIR") as caught:
            run.save_model()
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "manifest.json").exists()
    run.save_model()
    assert load_tokenizer(tmp_path).get_vocab() == tiny_tokenizer().get_vocab()


def test_vocabularies_outside_of_the_posterior_are_not_read() -> None:
    values = {"vocab": "/other/v.json", "merges": {"a": 1}, "gguf_file": "/other/x.gguf"}
    with Sidecars({"tokenizer_config.json": json.dumps(values).encode()}).folder() as folder:
        assert json.loads((folder / "tokenizer_config.json").read_text()) == {"merges": {"a": 1}}


@pytest.mark.parametrize("token", ["hf_" + "A" * 34, "token of another server"])
def test_a_tokenizer_with_an_access_token_is_refused(token: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.init_kwargs["use_auth_token"] = token
    with pytest.raises(ValueError, match=r"access token into tokenizer_config\.json .* token= in place of") as caught:
        Sidecars.of(tokenizer)
    assert token not in str(caught.value)
