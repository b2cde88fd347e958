from __future__ import annotations

import json

import pytest

from hf_bayes.cli.commands.generate import refuse_empty
from tests.cli.commands.running import run
from tests.tiny_models import BOS

PROMPTS = ("The mito", "Langevin")


def generated(posterior: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    run("generate", posterior, "--prompt", *PROMPTS, "--max_new_tokens", "3", "--json", *arguments)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(len(record["tokens"]) <= 3 for record in records)
    return [record["generated_text"] for record in records]


def test_every_prompt_is_continued(posterior: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = generated(posterior, capsys)
    assert first.startswith(PROMPTS[0])
    assert second.startswith(PROMPTS[1])
    assert generated(posterior, capsys) == [first, second]


def test_draws_follow_the_seed(posterior: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, again, other = (generated(posterior, capsys, "--do_sample", "--seed", seed) for seed in "112")
    assert one == again != other


def test_a_temperature_without_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="--top_p is for draws: add --do_sample, or leave it out"):
        run("generate", "out", "--prompt", "The", "--top_p", "0.5")


@pytest.mark.parametrize(("prompts", "place"), [(("",), "1 of 1"), (("The mito", ""), "2 of 2")])
def test_a_prompt_without_tokens_is_refused(posterior: str, prompts: tuple[str, ...], place: str) -> None:
    with pytest.raises(ValueError, match=f"prompt {place} is '', which has no token, and this tokenizer adds none"):
        run("generate", posterior, "--prompt", *prompts)


def test_a_prompt_that_the_tokenizer_begins_is_allowed() -> None:
    refuse_empty([""], lambda text: {"input_ids": [BOS]})
