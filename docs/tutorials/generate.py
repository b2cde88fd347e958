# %% [markdown]
# # Generate text with token uncertainty
#
# A posterior of a language model generates like any other model of transformers, and gives the
# uncertainty of each token while it writes. This tutorial continues
# [the first one](first_posterior.md), which saved the folder `posterior`.
#
# ## Generate
#
# `pipeline` takes what transformers' own pipeline takes: one prompt or many, chats, sampling or
# beams. A record has three more keys: `tokens`, `uncertainty` and `num_members`.

# %%
from transformers import set_seed

from hf_bayes import pipeline

set_seed(0)
generate = pipeline(model="posterior")
(record,) = generate("A class", max_new_tokens=12, do_sample=True, top_k=20)
print(repr(record["generated_text"]))
for token in record["tokens"][:5]:
    print(f"{token['token']!r:12} TU {token['total']:.2f}   EU {token['epistemic']:.3f}")

# %% [markdown]
# The tokens are drawn from the average of the members' probabilities. `top_k` changes which token
# is drawn. The uncertainties are always those of the average itself, before `generate` applies
# `top_k` or its `temperature`.
#
# ## While it writes
#
# `stream` yields each token's record as soon as the token is drawn. A program can stop where the
# members begin to disagree:

# %%
written = []
for token in generate.stream("The", max_new_tokens=20, do_sample=True, top_k=20):
    written.append(token["token"])
    if token["epistemic"] > 0.06:
        print("stopped: the members disagree about what comes here")
        break
print(repr("".join(written)))

# %% [markdown]
# The right limit depends on the model and the text.
# [Decisions](../decide.md#answer-or-abstain) shows how to fit one to answers of which you know the
# errors.
#
# ## Whole answers
#
# With several members, a text has two log-probabilities. `sequence_logprob` averages the
# probabilities of the whole text over the members; use it to compare answers.
# `sequence_logprob_tokenwise` adds up the tokens' log-probabilities; use it for perplexity.

# %%
answers = [" creates a new class object.", " eats an apple pie."]
for record in generate.score(answers, prompt="A class definition"):
    whole = record["uncertainty"]
    print(f"{record['text']!r:32} whole {whole['sequence_logprob']:7.2f}   tokens "
          f"{whole['sequence_logprob_tokenwise']:7.2f}   mean EU {whole['epistemic']:.3f}")

# %% [markdown]
# ## In your own code
#
# Without a pipeline, the model is one ordinary causal language model. Its logits are the logarithm
# of the average of its members' probabilities:

# %%
from transformers import AutoTokenizer

from hf_bayes import BayesianModelForCausalLM

model = BayesianModelForCausalLM.from_pretrained("posterior")
inputs = AutoTokenizer.from_pretrained("posterior")("A class", return_tensors="pt")
inputs.pop("token_type_ids", None)
out = model(**inputs)
print(tuple(out.logits.shape), [round(value, 3) for value in out.epistemic[0].tolist()])
out = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
print(tuple(out.epistemic.shape))

# %% [markdown]
# ## A picture
#
# `to_html` colours the tokens, and `print_record` does the same in a terminal. On the command line,
# two commands lead to the picture:
#
# ```text
# hf-bayes generate posterior --prompt "A class" --html heat-map.html
# hf-bayes score posterior --text "My own text." --html heat-map.html
# ```

# %%
from pathlib import Path

from hf_bayes import to_html

Path("heat-map.html").write_text(to_html(generate.score("A class may inherit from another class.")), "utf-8")
print("open heat-map.html in a browser")

# %% [markdown]
# ## Where to go next
#
# - [Uncertainty](../uncertainty.md): what the numbers mean, and when they mean nothing.
# - [Evaluation harnesses](../harnesses.md): lm-evaluation-harness, LM-Polygraph and UQLM.
# - [Supervised fine-tuning with TRL](../trl.md): chats, completions and packing.
