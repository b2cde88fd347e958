"""Text in, text with uncertainties out, by the pipeline, against ``model.generate`` of one member."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import hf_bayes
from benchmarks import bounds
from benchmarks.decode import NEW, PROMPT, bayesian
from benchmarks.harness import Line, Settings, compare, interleave, timed
from benchmarks.models import WHERE, tokens


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    plain = settings.subject.trainable(WHERE[0])
    prompt = tokens(plain, 1, PROMPT)
    tokenizer = one_word_a_token(plain.config.vocab_size)
    generate = hf_bayes.pipeline(
        "bayesian-text-generation",
        bayesian(settings, settings.num_members, WHERE[0]),
        tokenizer,
        device=settings.device,
    )
    text = tokenizer.decode(prompt[0])
    length = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}

    @torch.no_grad()
    def single() -> float:
        return timed(lambda: plain.generate(prompt, **length), settings.device)

    def ours() -> float:
        return timed(lambda: generate(text, **length), settings.device)

    assert len(generate(text, **length)[0]["tokens"]) == NEW
    seconds = interleave({"single": single, "ours": ours}, settings.rounds)
    work = f"generation with uncertainty through the pipeline, {NEW} new tokens, LoRA on all layers"
    bound = bounds.decode(settings.subject, WHERE[0], settings.num_members, PROMPT + NEW // 2)
    return [compare("generation", f"{work}, M={settings.num_members}", seconds, limit=2.1, bound=bound)]


def one_word_a_token(vocabulary: int) -> PreTrainedTokenizerFast:
    """Token i is the word "w<i>"."""
    words = {**{"<pad>": 0, "<s>": 1, "</s>": 2}, **{f"w{i}": i for i in range(3, vocabulary)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
