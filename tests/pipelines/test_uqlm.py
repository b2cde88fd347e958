from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from hf_bayes.pipelines.text_generation import BayesianTextGenerationPipeline
from hf_bayes.pipelines.uqlm import logprobs_results, member_logprobs_results

PROMPTS = ["A chain that has not", "Langevin"]
ANSWERS = [" moved has not sampled anything.", " dynamics samples"]
SCORE = """
import asyncio, json, sys
from uqlm import WhiteBoxUQ
scorer = WhiteBoxUQ(scorers=["min_probability", "sequence_probability"], length_normalize=False)
found = asyncio.run(scorer.score(logprobs_results=json.load(sys.stdin), show_progress_bars=False))
print(json.dumps({name: found.data[name] for name in ("min_probability", "sequence_probability")}))
"""


def test_results_are_those_of_score_and_plain_json(generate: BayesianTextGenerationPipeline) -> None:
    found = json.loads(json.dumps(logprobs_results(generate, PROMPTS, ANSWERS)))
    for row, prompt, answer in zip(found, PROMPTS, ANSWERS, strict=True):
        tokens = generate.score(answer, prompt=prompt)["tokens"]
        # rows that are padded in a batch round otherwise in float32
        assert [each["logprob"] for each in row] == pytest.approx([each["logprob"] for each in tokens], abs=1e-5)
        assert [each["token"] for each in row] == generate.tokenizer.convert_ids_to_tokens([t["id"] for t in tokens])


def test_members_average_to_the_results(generate: BayesianTextGenerationPipeline) -> None:
    members = member_logprobs_results(generate, PROMPTS, ANSWERS)
    for row, of_members in zip(logprobs_results(generate, PROMPTS, ANSWERS), members, strict=True):
        for place, token in enumerate(row):
            mean = sum(math.exp(member[place]["logprob"]) for member in of_members) / len(of_members)
            assert token["logprob"] == pytest.approx(math.log(mean), abs=1e-5)


@pytest.mark.slow
def test_scorers_of_uqlm_read_the_results(generate: BayesianTextGenerationPipeline, tmp_path: Path) -> None:
    python = os.environ.get("UQLM_PYTHON")
    if python is None:
        pytest.skip("UQLM excludes transformers 5: UQLM_PYTHON names the python of an environment of its own with uqlm")
    results = json.dumps(logprobs_results(generate, PROMPTS, ANSWERS))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", SCORE], input=results, env=clean, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    records = [generate.score(answer, prompt=prompt) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    tokenwise = [record["uncertainty"]["sequence_logprob_tokenwise"] for record in records]
    assert found["sequence_probability"] == pytest.approx([math.exp(each) for each in tokenwise], rel=1e-4)
    least = [min(math.exp(token["logprob"]) for token in record["tokens"]) for record in records]
    assert found["min_probability"] == pytest.approx(least, rel=1e-4)
