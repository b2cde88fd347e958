"""Evaluate the uncertainty of a posterior, as ``hf-bayes evaluate``.

    python scripts/evaluate_uncertainty.py --posterior out --test test.txt --ood code=code.txt rot13=rot13.txt
    python scripts/evaluate_uncertainty.py --posterior out --test test.csv --label_column intent \
        --ood out_of_scope=other.csv
    python scripts/evaluate_uncertainty.py --posterior tagger --test test.jsonl --text_column tokens \
        --label_column tags --ood tweets=tweets.jsonl
"""

from __future__ import annotations

from hf_bayes.cli.commands.evaluate import COMMAND, evaluate
from hf_bayes.cli.parsing import parse_arguments


def main() -> None:
    """Load the posterior, score the sets, and write the tables and the figure."""
    evaluate(*parse_arguments(*COMMAND.arguments))


if __name__ == "__main__":
    main()
