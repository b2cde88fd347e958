# %% [markdown]
# # From a fine-tuning script to uncertainty on your own text
#
# This tutorial begins with an ordinary fine-tuning script for `transformers`. It changes five
# lines, and ends with the uncertainty of every token of a text that you write yourself. It takes
# ten minutes to read, and about a minute to run on two CPU cores.
#
# To run it, install hf_bayes (`pip install .` in a checkout). Then run the notebook of this page,
# or `python docs/tutorials/first_posterior.py`. Both write their files to the current folder.
#
# ## A base model
#
# With access to the Hub you would take a base model from there, and skip this section:
#
# ```text
# base = "Qwen/Qwen2.5-0.5B"
# ```
#
# So that everything here runs anywhere, we make a tiny Llama. Its weights are random at first, and
# it learns a little English from the documentation that comes with Python. It will never write
# well, but it shows everything that a large model shows.

# %%
from pydoc_data.topics import topics

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, LlamaConfig,
    LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed,
)

set_seed(0)
# the chapters of Python's language reference
texts = [" ".join(text.split()) for text in topics.values()]

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = (
    pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(),
)
special = ["<|endoftext|>", "<|pad|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe.train_from_iterator(texts, trainers.BpeTrainer(
    vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False,
))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bpe, eos_token=special[0], pad_token=special[1],
)


def rows_of(texts, length=64):
    """Return rows of ``length`` tokens."""
    ids = [
        token for text in texts for token in tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    ]
    return Dataset.from_list(
        [{"input_ids": ids[i : i + length]} for i in range(0, len(ids) - length, length)]
    )


model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=256, initializer_range=0.08,
    bos_token_id=None, eos_token_id=0, pad_token_id=1,
))
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
about_classes = [text for text in texts if "class" in text[:400]]
elsewhere = [text for text in texts if text not in about_classes]
args = TrainingArguments(
    "base", max_steps=250, learning_rate=5e-3, per_device_train_batch_size=8,
    report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True,
)
Trainer(model, args, train_dataset=rows_of(elsewhere), data_collator=collate).train()
model.save_pretrained("base")
tokenizer.save_pretrained("base")
print(
    f"{model.num_parameters():,} parameters, {len(about_classes)} chapters for fine-tuning"
)
base = "base"

# %% [markdown]
# ## The ordinary script
#
# This is a script as you may have it: LoRA on the base model, trained with transformers' `Trainer`.
# We fine-tune on the chapters about classes.

# %%
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

set_seed(0)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
tokenizer = AutoTokenizer.from_pretrained(base)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
args = TrainingArguments(
    output_dir="fine-tuned",
    learning_rate=1e-2,
    max_steps=100,
    per_device_train_batch_size=8,
    report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows_of(about_classes),
    data_collator=collate,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()

# %% [markdown]
# It ends in one adapter. The adapter gives a probability for each next token, and no sign of how
# well the data determine this probability.
#
# ## Five lines later
#
# Here is the same script again. The five lines with a number are changed, and the others are as
# before. The adapter's weights now get a *posterior*: a distribution over all the weights that fit
# the data. Here it consists of four fine-tuned adapters, the members of a deep ensemble. Each starts
# at a random place of its own; `init_jitter` says how far apart the starts are.
#
# `method=SGHMCConfig()` would draw samples of the Bayes posterior instead. [Which
# method?](../choose.md) says when to use which method.

# %%
from peft import LoraConfig, get_peft_model
from hf_bayes import BayesianTrainer, BayesianTrainingArguments, EnsembleConfig  # 1

set_seed(0)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
tokenizer = AutoTokenizer.from_pretrained(base)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
args = BayesianTrainingArguments(  # 2
    output_dir="posterior",  # 3
    learning_rate=1e-2,
    max_steps=100,
    per_device_train_batch_size=8,
    report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=True,
)
trainer = BayesianTrainer(  # 4
    method=EnsembleConfig(num_chains=4, init_jitter=0.05),  # 5
    model=model,
    args=args,
    train_dataset=rows_of(about_classes),
    data_collator=collate,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()

# %% [markdown]
# The folder `posterior` holds all members, the tokenizer, a model card, and a record of how it was
# made. `trainer.push_to_hub()` would publish exactly this folder. Each member is also a plain
# adapter that peft loads without hf_bayes.
#
# ## Your own text
#
# Load the posterior as a pipeline, and score a text. Replace it by your own.

# %%
from hf_bayes import pipeline

generate = pipeline(model="posterior")
record = generate.score("A class definition may contain several methods.")
for token in record["tokens"][:6]:
    print(f"{token['token']!r:12} logprob {token['logprob']:6.2f}   TU {token['total']:.2f}   "
          f"AU {token['aleatoric']:.2f}   EU {token['epistemic']:.3f}")

# %% [markdown]
# Every token has three uncertainties in nats:
#
# - **TU**, total: how unsure the prediction at this place is;
# - **AU**, aleatoric: how unsure each member is by itself. Many words fit here, and more data will
#   not change that;
# - **EU**, epistemic: how far the members disagree. More data would settle it.
#
# The members agree more where the training text has shown them what to expect. Compare the mean EU
# of a text of the same kind with the mean EU of texts of another kind. (One text of each kind proves
# nothing. [Evaluate a posterior](../evaluate.md) shows how to compare many texts.)

# %%
mine = {
    "like the training text": "The class statement creates a new class object with the given name.",
    "everyday English": "My grandmother baked an apple cake on Sunday and we ate it all.",
    "no language": "zqx vrrt 8#k qqj wpl ~~ bnm xxv",
}
for kind, text in mine.items():
    print(f"{kind:24} mean EU {generate.score(text)['uncertainty']['epistemic']:.3f} nats")

# %% [markdown]
# The next cell draws the text with one colour for each token:

# %%
from pathlib import Path

from hf_bayes import to_html

Path("heat-map.html").write_text(to_html(generate.score(mine["everyday English"])), "utf-8")
print("open heat-map.html in a browser")

# %% [markdown]
# ## Where to go next
#
# - [Classify, and abstain](abstain.md): what to do with an uncertainty.
# - [Generate text with token uncertainty](generate.md): the same posterior, writing.
# - [Which method?](../choose.md) and [training without settings](../automatic.md): better
#   posteriors than this small ensemble.
# - [What the numbers mean](../uncertainty.md#when-epistemic-uncertainty-is-meaningless), and when
#   they mean nothing.
