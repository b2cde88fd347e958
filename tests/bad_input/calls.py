"""Wrong calls of ``hf-bayes``, and the files that they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaForCausalLM

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.test_unreadable_posteriors import flip
from tests.tiny_models import TEXTS, tiny_bert, tiny_llama, tiny_tokenizer, with_lora


class Call(NamedTuple):
    """A wrong call: the words after ``hf-bayes``, and words that say what, got, expected or what to do."""

    line: str
    words: tuple[str, ...]


def write_files() -> None:
    """Write models, posteriors, adapters and data, right and wrong ones, to the current folder."""
    base = tiny_llama()
    for name, model in {"llama": base, "other": tiny_llama(seed=1), "bert": tiny_bert(num_labels=2)}.items():
        model.save_pretrained(name)
        tiny_tokenizer().save_pretrained(name)
    adapted = with_lora(LlamaForCausalLM.from_pretrained("llama"))
    adapted.save_pretrained("adapter")
    trainer = runs.trainer(
        "lm", SGHMCConfig(num_chains=2), model=adapted, processing_class=tiny_tokenizer(), max_steps=1
    )
    trainer.train()
    trainer.save_model()
    for name in ("no_manifest", "flipped"):
        shutil.copytree("lm", name)
    Path("no_manifest/manifest.json").unlink()
    flip(next(Path("flipped/members").rglob("*.safetensors")))
    for name in ("cut", "no_weights", "bad_config"):
        shutil.copytree("llama", name)
    Path("cut/model.safetensors").write_bytes(Path("llama/model.safetensors").read_bytes()[:100])
    Path("no_weights/model.safetensors").unlink()
    Path("bad_config/config.json").write_text("{")
    rows = [{"text": f"{TEXTS[i % 4]} {i}", "label": ("even", "odd")[i % 2]} for i in range(12)]
    tables = {
        "rows": rows,
        "third": [*rows[:2], {"text": "a b c", "label": "third"}],
        "null": [*rows[:2], {"text": None, "label": "odd"}],
        "one_class": [{**row, "label": "odd"} for row in rows],
        "numbers": [{"text": row["text"], "label": i / 10} for i, row in enumerate(rows)],
        "whole_numbers": [{"text": row["text"], "label": float(i)} for i, row in enumerate(rows)],
        "mappings": [{"text": row["text"], "label": {"a": 1}} for row in rows],
        "not_finite": [{"text": row["text"], "label": float("inf") if i else 0.5} for i, row in enumerate(rows)],
    }
    for name, table in tables.items():
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, table)))
    texts = {
        "book.txt": "\n".join(TEXTS * 20),
        "empty.txt": "",
        "short.txt": "a b",
        "data.xyz": "a",
        "a_file": "a",
        "broken.jsonl": '{"text"',
        "header.csv": "text,label\n",
        "ragged.csv": 'text,label\n"a",b\n"c",d,e\n',
        "broken.yaml": "a: [1\n",
        "broken.json": "{a: 1}",
        "list.yaml": "- a\n",
        "empty.yaml": "",
        "number.yaml": "1: 2\n",
        "unknown.yaml": "learning_rat: 1\n",
        "null.yaml": "model_name_or_path: null\n",
        "type.yaml": "learning_rate: fast\n",
        "several.yaml": "output_dir: [a, b]\n",
        "twice.yaml": "seed: 1\nseed: 2\n",
        "date.yaml": "config_overrides: {a: !!timestamp 2020-01-01}\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    for name in ("latin.txt", "latin.yaml"):
        Path(name).write_bytes(b"caf\xe9 " * 50)
    for name in ("a_folder", "full"):
        Path(name).mkdir()
    Path("full/file").touch()


TRAIN = "train --model_name_or_path llama --dataset book.txt --output_dir out --use_cpu true"
SGHMC = f"{TRAIN} --method sghmc --method_args"
CLASSIFY = "classify --model_name_or_path bert --dataset rows.jsonl --output_dir out --use_cpu true"
CONTINUAL = "continual --model_name_or_path llama --episodes book.txt --output_dir out --use_cpu true"
TUNE = "tune --task classify --model_name_or_path bert --dataset rows.jsonl --output_dir out --use_cpu true"
BAYESIANISE = "bayesianise adapter --heldout book.txt --length 16 --output_dir out"
EVALUATE = "evaluate lm --test book.txt --length 16 --output_dir out"
EXPORT = "export lm"

CALLS = [
    # arguments and their file
    Call("train missing.yaml", ("missing.yaml: no such file",)),
    Call("train broken.yaml", ("broken.yaml cannot be read", "expected ',' or ']'")),
    Call("train broken.json", ("broken.json cannot be read",)),
    Call("train latin.yaml", ("latin.yaml is no text in UTF-8", "save it")),
    Call("train list.yaml", ("list.yaml must hold a mapping", "got list")),
    Call("train empty.yaml", ("empty.yaml must hold a mapping", "got nothing")),
    Call("train number.yaml", ("number.yaml has fields that this command does not have: 1",)),
    Call("train unknown.yaml", ("unknown.yaml has fields", "learning_rat", "did you mean learning_rate?")),
    Call("train null.yaml", ("model_name_or_path cannot be null",)),
    Call("train type.yaml", ("--learning_rate", "invalid float value: 'fast'")),
    Call("train several.yaml", ("output_dir takes one value, got the list ['a', 'b']",)),
    Call("train twice.yaml", ("twice.yaml cannot be read: 'seed' is there twice", "leave one out")),
    Call(f"{TRAIN} --config=date.yaml", ("date.yaml: config_overrides has a value", "write a text or a number")),
    Call(f"{TRAIN} --learning_rat 1", ("'--learning_rat' is no argument", "did you mean --learning_rate?")),
    Call(f"{TRAIN} --learning_rate", ("--learning_rate", "expected one argument")),
    Call(f"{TRAIN} --bf16 maybe", ("--bf16", "got maybe")),
    # methods and training
    Call(f"{TRAIN} --method zebra", ("unknown method 'zebra'", "the methods are agps")),
    Call(f"{SGHMC} {{a", ("fields must be JSON", "got '{a'")),
    Call(f"{SGHMC} '{{\"zebra\": 1}}'", ("sghmc has no field 'zebra'", "its fields are")),
    Call(f"{SGHMC} '{{\"num_chains\": -2}}'", ("num_chains must be an integer >= 1", "-2")),
    Call(f"{SGHMC} '{{\"prior_std\": NaN}}'", ("prior_std must be a finite number", "nan")),
    Call(f"{SGHMC} '{{\"name\": \"map\"}}'", ("'map'", "'sghmc'", "leave one out")),
    Call(f"{TRAIN} --method_args '{{\"num_chains\": 2}}'", ("name it with --method",)),
    Call(f"{TRAIN} --method sghmc --budget 5", ("--budget=5 is for --method auto", "leave it out")),
    Call(f"{TRAIN} --method auto --budget -5", ("--budget must be at least 1, got -5",)),
    Call(f"{TRAIN} --learning_rate nan", ("learning_rate must be a finite number > 0, got nan",)),
    Call(f"{TRAIN} --per_device_train_batch_size 0", ("per_device_train_batch_size must be at least 1, got 0",)),
    Call(f"{TRAIN} --num_train_epochs nan", ("num_train_epochs must be a finite number",)),
    Call(f"{TRAIN} --lr_scheduler_kwargs {{a", ("a mapping in JSON", "got '{a'")),
    Call(f"{SGHMC} '{{\"num_chains\": 1000000000}}'", ("1,000,000,000 chains", "free on the cpu", "reduce num_chains")),
    Call(f"{TRAIN} --logging_steps -1", ("logging_steps must be a number > 0, got -1", "logging_strategy='no'")),
    Call(f"{TRAIN} --save_steps 0", ("save_steps must be a number > 0, got 0", "save_strategy='no'")),
    Call(f"{TRAIN} --eval_strategy steps --eval_steps -3", ("eval_steps must be a number > 0, got -3",)),
    Call(f"{TRAIN} --warmup_steps 5", ("warmup_steps=5 would be ignored", "Set 'constant_with_warmup' or 'linear'")),
    Call(f"{TRAIN} --max_steps -7", ("max_steps must be a number of updates, or -1", "got -7")),
    Call(f"{TRAIN} --dataloader_num_workers -1", ("dataloader_num_workers must be >= 0, got -1",)),
    Call(f"{TRAIN} --lr_scheduler_type zebra", ("zebra is not a valid SchedulerType", "'linear'")),
    Call(f"{TRAIN} --deepspeed zebra.json", ("deepspeed='zebra.json'", "not supported: leave it out")),
    Call(f"{TRAIN} --lr_scheduler_kwargs '[1]'", ("lr_scheduler_kwargs must be a mapping", "got '[1]'")),
    # models
    Call(TRAIN.replace("llama", "nowhere"), ("tokenizer of 'nowhere', which is no folder here", "name of a model")),
    Call(TRAIN.replace("llama", "cut"), ("the model of 'cut' cannot be loaded", "header")),
    Call(TRAIN.replace("llama", "no_weights"), ("the model of 'no_weights' cannot be loaded",)),
    Call(TRAIN.replace("llama", "bad_config"), ("'bad_config' cannot be loaded", "not a valid JSON")),
    Call(TRAIN.replace("llama", "lm"), ("lm is a folder with an adapter or a posterior", "merge the adapter")),
    Call(f"{TRAIN} --dtype float7", ("dtype must be auto, float32", "got 'float7'")),
    Call(f"{TRAIN} --config_overrides '{{\"num_layers\": 1}}'", ("LlamaConfig has no field 'num_layers'",)),
    Call(f"{TRAIN} --config_overrides '{{\"hidden_size\": \"x\"}}'", ("'hidden_size'", "expected int, got str")),
    Call(f"{TRAIN} --lora_rank -1", ("lora_rank must be at least 0", "got -1")),
    Call(f"{TRAIN} --lora_targets zebra", ("{'zebra'} not found",)),
    Call(f"{TRAIN} --lora_rank 99999", ("lora_rank must be at most 16, the width of this model", "got 99999")),
    Call(f"{TRAIN} --lora_alpha 0", ("lora_alpha must be at least 1, got 0",)),
    Call(f"{TRAIN} --lora_layers 7", ("Target modules", "layers_to_transform': [7]")),
    Call(f"{TRAIN} --model_revision zebra", ("'zebra' is for a model of the Hub", "llama is a folder here")),
    Call(TRAIN.replace("llama", "a_folder"), ("a_folder holds no config.json",)),
    Call(TRAIN.replace("llama", "bert"), ("bert has no weights for cls.predictions",)),
    Call(f"{CLASSIFY} --config_overrides '{{\"num_labels\": 5}}'", ("the labels of the data set num_labels, got 5",)),
    # data
    Call(TRAIN.replace("book.txt", "missing.txt"), ("no file matches 'missing.txt'",)),
    Call(TRAIN.replace("book.txt", "empty.txt"), ("empty.txt is empty",)),
    Call(TRAIN.replace("book.txt", "data.xyz"), ("data.xyz is a file of another format, expected one of .txt",)),
    Call(TRAIN.replace("book.txt", "latin.txt"), ("latin.txt cannot be read as text", "UTF-8")),
    Call(TRAIN.replace("book.txt", "broken.jsonl"), ("broken.jsonl cannot be read as json",)),
    Call(TRAIN.replace("book.txt", "header.csv"), ("header.csv: a file has 0 rows",)),
    Call(TRAIN.replace("book.txt", "ragged.csv"), ("ragged.csv cannot be read as csv", "Expected 2 fields")),
    Call(f"{TRAIN} --window 999", ("--window=999 is longer than", "128 tokens")),
    Call(CLASSIFY.replace("rows", "null"), ("line 3 of null.jsonl: 'text' holds nothing",)),
    Call(CLASSIFY.replace("rows", "one_class"), ("needs two classes or more", "['odd']")),
    Call(CLASSIFY.replace("rows", "whole_numbers"), ("holds numbers with a decimal point", "set regression")),
    Call(CLASSIFY.replace("rows", "numbers"), ("learnt from 50 held-out rows", "--validation_fraction")),
    Call(CLASSIFY.replace("rows", "mappings"), ("the column 'label' holds mappings",)),
    Call(f"{CLASSIFY.replace('rows', 'not_finite')} --noise_std 1", ("has the label", "expected a finite number")),
    Call(f"{CLASSIFY} --label_column zebra", ("no column 'zebra', only text, label",)),
    Call(f"{TRAIN} --dataset ''", ("got an empty name: name one",)),
    Call(f"{TRAIN} --dataset_config zebra", ("dataset_config='zebra' is for a data set of the Hub", "leave it out")),
    Call(f"{TRAIN} --validation_file rows.jsonl", ("files must all be of one format", "got .jsonl, .txt")),
    Call(f"{CLASSIFY} --pair_column label", ("must differ, got text, label, label",)),
    Call(f"{CLASSIFY} --text_column label", ("must differ, got label, label",)),
    Call(f"{CLASSIFY} --validation_file third.jsonl", ("line 3 of third.jsonl has the label 'third'", "even, odd")),
    Call(f"{CLASSIFY} --label_column text --text_column label", ("no row can be held out", "name another column")),
    Call(f"{CLASSIFY} --max_length -1", ("--max_length must be at least 1, got -1",)),
    Call(f"{CONTINUAL} --methods zebra", ("methods ['zebra'] are unknown: choose of single",)),
    Call(f"{CONTINUAL} --held_out nan", ("held_out must lie strictly between 0 and 1",)),
    Call(f"{CONTINUAL} --strength -1", ("strength must be a finite number > 0",)),
    Call(f"{CONTINUAL} --stride 0", ("--stride must be 1 to the window of 128 tokens, got 0",)),
    Call(f"{CONTINUAL} --stride 999", ("--stride must be 1 to the window of 128 tokens, got 999",)),
    Call(f"{CONTINUAL} --methods single single", ("has a name twice",)),
    Call(f"{CONTINUAL} --push_to_hub true", ("push_to_hub is refused", "afterwards")),
    Call(f"{CONTINUAL} --mean_field_args '{{\"zebra\": 1}}'", ("mean_field has no field 'zebra'",)),
    Call(f"{TUNE} --method sghmc", ("'--method' is no argument of this command",)),
    Call(f"{TUNE} --validation_fraction 0", ("compared on held-out rows", "--validation_file")),
    Call(f"{TUNE} --window 9", ("--window: not for --task classify, leave it out",)),
    Call(f"{TUNE} --eval_strategy epoch", ("eval_strategy=epoch would be ignored", "Leave it out")),
    Call(f"{TUNE} --resume_from_checkpoint nowhere", ("resume_from_checkpoint=nowhere would be", "Leave it out")),
    Call(f"{TUNE} --push_to_hub true --hub_model_id 'a b'", ("upload to 'a b'", "set hub_model_id")),
    Call(f"{TUNE} --budget 0", ("--budget must be at least 1, got 0",)),
    # adapters and posteriors
    Call(BAYESIANISE.replace("adapter", "a_folder"), ("a_folder holds no adapter_config.json",)),
    Call(BAYESIANISE.replace("book.txt", "latin.txt"), ("latin.txt is no text in UTF-8",)),
    Call(f"{BAYESIANISE} --base_model nowhere", ("'nowhere' is no folder here",)),
    Call(BAYESIANISE.replace("dir out", "dir a_file"), ("a_file is a file, expected a directory",)),
    Call(f"{BAYESIANISE} --tolerance -1", ("tolerance must be a finite number >= 0, got -1",)),
    Call(f"{BAYESIANISE} --max_windows 1", ("heldout needs at least 8 rows, got 1",)),
    Call(f"{BAYESIANISE} --labels a b", ("--labels: not for a language model",)),
    Call(BAYESIANISE.replace("book.txt", "null.jsonl"), ("line 3 of null.jsonl: 'text' holds nothing",)),
    Call(EVALUATE.replace("book.txt", "rows.jsonl") + " --text_column zebra", ("no column 'zebra', only text, label",)),
    Call(EVALUATE.replace("book.txt", "data.xyz"), ("data.xyz is a file of another format, expected one of .txt",)),
    Call(f"{EVALUATE} --test ''", ("got an empty name: name one",)),
    Call(EVALUATE.replace("lm", "adapter"), ("adapter holds a plain adapter, expected a posterior", "bayesianise")),
    Call(f"{EVALUATE} --ood test=book.txt", ("choose another name",)),
    Call(EVALUATE.replace("lm", "nowhere"), ("nowhere is not a directory here",)),
    Call(EVALUATE.replace("lm", "no_manifest"), ("no_manifest holds no manifest.json",)),
    Call(EVALUATE.replace("lm", "flipped"), ("sha256 mismatch",)),
    Call(f"{EVALUATE} --base_model other", ("belongs to another base model", "--base_model", "--check_base false")),
    Call(f"{EVALUATE} --base_model nowhere", ("'nowhere' is no folder here",)),
    Call(f"{EVALUATE} --members 99", ("asked for 99 members, 2 are stored",)),
    Call(f"{EVALUATE} --predict zebra", ("prediction must be one of members", "'zebra'")),
    Call(f"{EVALUATE} --label_column x", ("--label_column: not for the task",)),
    Call(EVALUATE.replace("book.txt", "short.txt"), ("short.txt is shorter than one window",)),
    Call(EVALUATE.replace("dir out", "dir a_file"), ("a_file is a file, expected a directory",)),
    Call("score lm", ("give the text by --text or by --file, got neither",)),
    Call("score lm --text a --file book.txt", ("got both",)),
    Call("score lm --text a", ("needs two tokens or more", "got 1")),
    Call("score lm --file broken.jsonl", ("broken.jsonl cannot be read as json",)),
    Call("score lm --text 'a b c' --html missing/x.html", ("there is no folder missing",)),
    Call("score lm --file null.jsonl", ("line 3 of null.jsonl: 'text' holds nothing",)),
    Call("score lm --text 'a b c' --batch_size 0", ("batch_size is how many texts", "got 0")),
    Call("generate lm --prompt a ''", ("prompt 2 of 2 is ''", "has no token")),
    Call("generate lm --prompt a --temperature 0.5", ("add --do_sample",)),
    Call("generate lm --prompt a --do_sample true --top_p 2", ("--top_p must be above 0 and at most 1, got 2.0",)),
    Call("generate lm --prompt a --max_new_tokens 0", ("--max_new_tokens must be at least 1, got 0",)),
    Call("generate lm --prompt a --seed -1", ("seed must be an integer", "got -1")),
    Call("diagnose a_folder", ("a_folder holds no manifest.json",)),
    Call("diagnose lm --output a_folder", ("--output must be a file, got the folder a_folder",)),
    Call("diagnose lm --output x.doc", ("--output must end in .png", "got x.doc")),
    Call("demo lm --port 99999", ("--port must be 1 to 65535, got 99999",)),
    Call("demo lm --compare nowhere", ("nowhere is not a directory here",)),
    Call("demo lm --host 999.1.1.1", ("--host must be an address of this computer, got '999.1.1.1'",)),
    Call(f"{EXPORT} --adapter '' --member 0", ("--adapter must be a folder, got an empty name",)),
    Call(f"{EXPORT} --adapter new --mean true", ("lm holds draws", "--member")),
    Call(f"{EXPORT} --space new", ("a Space loads posteriors from the Hub, got 'lm'",)),
    Call(EXPORT, ("give one of --custom_generate", "got none")),
    Call(f"{EXPORT} --adapter new --member 9", ("has no member 9, expected 0 to 1",)),
    Call(f"{EXPORT} --adapter full --member 0", ("full is not empty",)),
    Call(f"{EXPORT} --model a_file --member 0", ("a_file",)),
    Call(f"{EXPORT} --custom_generate new --repo_id 'a b'", ("--repo_id must be a repository", "got 'a b'")),
    Call(f"{EXPORT} --card true --results missing.json", ("missing.json: no such file",)),
]  # fmt: skip
