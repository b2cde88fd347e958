"""Journeys of a new user, from the built wheel outside the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import demo_page
from tests.hub_server import serving
from tests.installed import Installed
from tests.pipelines.harness_task import write_tasks
from tests.test_project import wheel  # noqa: F401 - a fixture
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.slow

TRAINING = ["--max_steps", "4", "--learning_rate", "1e-3", "--window", "24", "--lora_rank", "2", "--use_cpu", "true"]
SGHMC = ["--method", "sghmc", "--method_args", json.dumps({"num_chains": 2, "prior_std": 0.1})]

SCRIPT = """
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("base")
rows = Dataset.from_list([dict(tokenizer(line)) for line in open("one.txt")])
model = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), LoraConfig(r=2, task_type="CAUSAL_LM"))
args = TrainingArguments("tuned", max_steps=4, learning_rate=1e-3, report_to="none", use_cpu=True)
trainer = Trainer(model, args=args, train_dataset=rows, processing_class=tokenizer,
                  data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
trainer.train()
trainer.save_model()
"""
CHANGES = {
    "from transformers import Trainer, TrainingArguments": (
        "from hf_bayes import BayesianTrainer, BayesianTrainingArguments, EnsembleConfig"
    ),
    'args = TrainingArguments("tuned"': 'args = BayesianTrainingArguments("scripted"',
    "trainer = Trainer(model,": "trainer = BayesianTrainer(model, EnsembleConfig(num_chains=2),",
}
"""The changed lines of the script: three."""

SFT_SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
rows = Dataset.from_list([{"text": line} for line in open("one.txt")])
args = SFTConfig("sft", max_steps=4, learning_rate=1e-3, max_length=24, report_to="none", use_cpu=True)
trainer = SFTTrainer("base", args=args, train_dataset=rows, peft_config=LoraConfig(r=2, task_type="CAUSAL_LM"))
trainer.train()
trainer.save_model()
"""
SFT_CHANGES = {
    "import SFTConfig, SFTTrainer": """import SFTConfig, SFTTrainer
from hf_bayes import BayesianTrainerMixin, BayesianTrainingArguments, EnsembleConfig
class BayesianSFT(BayesianTrainerMixin, SFTTrainer): ...
class Args(BayesianTrainingArguments, SFTConfig): ...""",
    'args = SFTConfig("sft"': 'args = Args("sft"',
    'SFTTrainer("base"': 'BayesianSFT("base", method=EnsembleConfig(num_chains=2)',
}
"""Three new lines and two changed ones."""

SCORE = """
import json
from hf_bayes import pipeline
print(json.dumps(pipeline(model={place!r}).score("A chain that has not moved.")["uncertainty"]))
"""

GENERATE = """
import json
from hf_bayes import pipeline
(record,) = pipeline(model="posterior")({prompt!r}, max_new_tokens=5, do_sample=False)
print(json.dumps([[token["id"], token["epistemic"]] for token in record["tokens"]]))
"""
WITHOUT = """
import importlib.util, json
from transformers import AutoModelForCausalLM, AutoTokenizer
assert importlib.util.find_spec("hf_bayes") is None
model, tokenizer = AutoModelForCausalLM.from_pretrained({base!r}), AutoTokenizer.from_pretrained({base!r})
inputs = tokenizer([{prompt!r}], return_tensors="pt")
found = model.generate(
    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=5, do_sample=False,
    custom_generate={place!r}, trust_remote_code=True, return_dict_in_generate=True,
)
new = found.sequences[0, inputs["input_ids"].shape[1]:]
print(json.dumps([list(pair) for pair in zip(new.tolist(), found.epistemic[0].tolist())]))
"""
PROMPT = "The mitochondrion is"


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:  # noqa: F811
    """An environment with the wheel, a base model and two texts in its folder."""
    installed = Installed(wheel, tmp_path_factory.mktemp("user"))
    tiny_llama().save_pretrained(installed.folder / "base")
    tiny_tokenizer().save_pretrained(installed.folder / "base")
    for name, text in (("one", TEXTS[0]), ("two", TEXTS[1])):
        (installed.folder / f"{name}.txt").write_text(f"{text}\n" * 20)
    assert Path(installed.python("import hf_bayes; print(hf_bayes.__file__)")).is_relative_to(installed.environment)
    return installed


@pytest.fixture(scope="module")
def trained(user: Installed) -> Installed:
    """The same, with a posterior in the folder "posterior"."""
    place = ["--model_name_or_path", "base", "--dataset", "one.txt", "--output_dir", "posterior"]
    user.run("hf-bayes", "train", *place, *TRAINING, *SGHMC)
    return user


def test_two_commands_lead_to_a_heat_map(trained: Installed) -> None:
    trained.run("hf-bayes", "score", "posterior", "--text", TEXTS[0], "--html", "map.html")
    page = (trained.folder / "map.html").read_text("utf-8")
    assert "mitoch" in "".join(page.split())
    assert "Epistemic uncertainty" in page


def test_three_changed_lines_turn_a_script_into_a_posterior(user: Installed) -> None:
    script = SCRIPT
    for old, new in CHANGES.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    changed = sum(a != b for a, b in zip(SCRIPT.splitlines(), script.splitlines(), strict=True))
    assert changed == len(CHANGES) <= 5
    user.python(SCRIPT)
    assert (user.folder / "tuned" / "adapter_model.safetensors").exists()
    user.python(script)
    assert json.loads(user.python(SCORE.format(place="scripted")))["epistemic"] > 0


def test_five_lines_turn_a_script_of_trl_into_a_posterior(user: Installed) -> None:
    pytest.importorskip("trl", reason="trl is no dependency: make test-slow")
    script = SFT_SCRIPT
    for old, new in SFT_CHANGES.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    before, after = SFT_SCRIPT.splitlines(), script.splitlines()
    assert len(set(after) - set(before)) == 5
    user.python(script)
    assert json.loads(user.python(SCORE.format(place="sft")))["epistemic"] > 0


def test_a_pushed_posterior_answers_from_a_clean_cache(trained: Installed) -> None:
    with serving() as hub:
        address = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test"}
        push = "from hf_bayes import Posterior; Posterior.from_pretrained('posterior').push_to_hub('user/posterior')"
        trained.python(push, HF_HOME=str(trained.folder / "author"), **address)
        assert "manifest.json" in hub.files("user/posterior")
        there = trained.python(SCORE.format(place="user/posterior"), HF_HOME=str(trained.folder / "reader"), **address)
    assert json.loads(there) == json.loads(trained.python(SCORE.format(place="posterior")))


def test_training_continues_on_a_second_corpus(user: Installed) -> None:
    """The first posterior is the prior of the second one."""
    first = SCRIPT
    for old, new in CHANGES.items():
        first = first.replace(old, new)
    second = first.replace("one.txt", "two.txt").replace('"scripted"', '"second"')
    second = second.replace("EnsembleConfig(num_chains=2),", "EnsembleConfig(num_chains=2), prior='scripted',")
    user.python(first + second)
    prior = json.loads((user.folder / "second" / "posterior_config.json").read_text())["prior"]
    assert "scripted" in json.dumps(prior)


def test_texts_are_learnt_one_after_another_by_a_command(user: Installed) -> None:
    texts = ["--model_name_or_path", "base", "--episodes", "one.txt", "two.txt", "--output_dir", "continual"]
    user.run("hf-bayes", "continual", *texts, *TRAINING, "--methods", "laplace_kronecker", "--save_strategy", "no")
    assert list((user.folder / "continual").rglob("manifest.json"))


def test_the_harness_evaluates_the_posterior(trained: Installed) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is no dependency: make test-doors")
    tasks = ["--tasks", "tiny_choice", "--include_path", write_tasks(trained.folder)]
    model = ["--model", "hf_bayes", "--model_args", "pretrained=posterior", "--device", "cpu"]
    printed = trained.run("python", "-m", "hf_bayes.cli.harness", *model, *tasks)
    assert "epistemic" in printed
    assert "ece" in printed
    point = "import importlib.metadata as m; print([p.value for p in m.entry_points(group='lm_eval.models')])"
    assert "hf_bayes.pipelines.lm_harness:BayesianHarnessLM" in trained.python(point)


def test_the_demo_shows_the_uncertainty_in_a_browser(trained: Installed) -> None:
    demo_page.require_browser()
    expected = [f"{epistemic:.3f}" for _, epistemic in json.loads(trained.python(GENERATE.format(prompt=PROMPT)))]
    command = trained.command("hf-bayes", "demo", "posterior")
    with (
        demo_page.serving(command, folder=trained.folder, environment=trained.variables) as address,
        demo_page.browser(1280, 1000) as page,
    ):
        demo_page.generate(page, address, PROMPT, length=5)
        demo_page.wait(lambda: demo_page.columns(page) == [expected])


def test_an_export_answers_without_the_package(trained: Installed, tmp_path_factory: pytest.TempPathFactory) -> None:
    trained.run("hf-bayes", "export", "posterior", "--custom_generate", "exported")
    expected = json.loads(trained.python(GENERATE.format(prompt=PROMPT)))
    reader = Installed(None, tmp_path_factory.mktemp("reader"))
    place, base = (str(trained.folder / name) for name in ("exported", "base"))
    found = json.loads(reader.python(WITHOUT.format(prompt=PROMPT, place=place, base=base)))
    assert [token for token, _ in found] == [token for token, _ in expected]
    # float32 of our own model: an epistemic uncertainty has an error of 1e-7 nats
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-6)
    assert max(value for _, value in expected) > 1e-5  # there is something to compare
