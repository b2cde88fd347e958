from __future__ import annotations

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from hf_bayes.posteriors.benchmark_results import Benchmark, benchmark_result

EVALUATION = {
    "posterior": "abc",
    "task": "text-classification",
    "members": 4,
    "accuracy": 0.75,
    "nll": 0.5,
    "ece": 0.021234,
}


def test_the_hub_reads_the_result_that_is_written() -> None:
    benchmark = Benchmark.parse("user/set:default:accuracy")
    assert benchmark.file == ".eval_results/user-set-default.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(benchmark_result(benchmark, EVALUATION)))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("user/set", "default", 0.75)
    assert entry.notes == "accuracy of hf_bayes, mixture of 4 members, nll 0.5, ece 0.02123"


def test_tasks_of_one_benchmark_have_files_of_their_own() -> None:
    easy, hard = (Benchmark.parse(f"user/set:{task}:accuracy") for task in ("easy", "hard"))
    assert easy.file != hard.file


def test_a_metric_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no figure 'f1' for user/set: use one of nll, accuracy, ece"):
        benchmark_result(Benchmark.parse("user/set:default:f1"), EVALUATION)


@pytest.mark.parametrize("text", ["user/set", "set:task:accuracy", "a/b:../c:accuracy", "a/b:c:d:e", "a/b::accuracy"])
def test_a_benchmark_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="dataset:task:metric, such as user/set:default:accuracy"):
        Benchmark.parse(text)
