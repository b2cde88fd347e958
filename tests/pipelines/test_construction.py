from __future__ import annotations

from typing import Any

import pytest

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
    with pytest.raises(ValueError, match=r"takes no predict here: .*Did you mean prediction= of hf_bayes.pipeline"):
        classify(models.TEXTS[0], predict="single_pass")


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
