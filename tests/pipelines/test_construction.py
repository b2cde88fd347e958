from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
    XLNetLMHeadModel,
)

from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.factory import BayesianTextGenerationPipeline
from tests import tiny_models as models


@pytest.mark.parametrize("inputs", [[], None, 5, ["a text", 5], [None], b"bytes"], ids=repr)
def test_what_is_no_text_is_refused_in_words(
    generate: BayesianTextGenerationPipeline, classify: Any, inputs: Any
) -> None:
    for call in (generate, classify, generate.score):
        with pytest.raises(ValueError, match=r"takes a (text|string)|got an empty list"):
            call(inputs)


def test_a_keyword_for_loading_is_named(classify: Any) -> None:
    with pytest.raises(ValueError, match=r"takes no predict.*Did you mean prediction= of hf_bayes.pipeline"):
        classify(models.TEXTS[0], predict="single_pass")


@pytest.mark.parametrize("keyword", ["members", "num_members", "predict", "revison"])
@pytest.mark.parametrize("kind", ["generate", "classify"])
def test_settings_for_loading_are_refused_by_every_pipeline(
    request: pytest.FixtureRequest, kind: str, keyword: str
) -> None:
    found = request.getfixturevalue(kind)
    words = rf"takes no {keyword}.* Did you mean (members|prediction|revision)= of hf_bayes.pipeline"
    with pytest.raises(ValueError, match=words):
        found(models.TEXTS[0], **{keyword: 2})
    with pytest.raises(ValueError, match=words):
        type(found)(model=found.model, tokenizer=found.tokenizer, **{keyword: 2})


def test_no_setting_of_transformers_reads_as_one_for_loading() -> None:
    """Settings of ``generate``, of its configuration and of tokenizers are never taken for a misspelt ``members``."""
    of = (GenerationMixin.generate, PreTrainedTokenizerFast.__call__, TextGenerationPipeline._sanitize_parameters,
          LlamaForCausalLM.forward, XLNetLMHeadModel.forward)  # fmt: skip
    names = {name for each in of for name in inspect.signature(each).parameters}
    names |= set(vars(GenerationConfig()))
    assert {"mems", "truncation"} <= names  # the nearest ones
    BayesianPipeline.check_loading_arguments(names)


@pytest.mark.parametrize("keyword", ["prompts", "max_new_tokens", "text_pair", "trunctation"])
def test_keywords_that_nothing_reads_are_refused(
    generate: BayesianTextGenerationPipeline, classify: Any, keyword: str
) -> None:
    with pytest.raises(ValueError, match=f"takes no {keyword}"):
        generate.score(models.TEXTS[0], **{keyword: "x"})
    with pytest.raises(ValueError, match=f"takes no {keyword}"):
        classify(models.TEXTS[0], **{keyword: "x"})
    assert generate.score(models.TEXTS[0], truncation=True, max_length=4)
    assert classify(models.TEXTS[0], truncation=True, max_length=4)
