from __future__ import annotations

from hf_bayes.cli.continual_arguments import ContinualArguments, methods


def test_mean_field_may_have_a_first_prior_of_its_own() -> None:
    given = ContinualArguments(episodes=["one.txt"], mean_field_args='{"prior_std": 0.5}')
    assert {name: config.prior_std for name, config in methods(given).items() if config.prior_std != 0.1} == {
        "mean_field": 0.5
    }
