"""Learn one text after another, each posterior the prior of the next. ``hf-bayes continual`` does the same.

    python scripts/run_continual.py --model_name_or_path gpt2 --episodes one.txt "more/*.txt" \
        --output_dir continual --num_train_epochs 3
"""

from __future__ import annotations

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.commands.continual import continual
from hf_bayes.cli.continual_arguments import ContinualArguments, LoraArguments
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.scripts import end_process_group


def main() -> None:
    """Parse the arguments, run, and show the results."""
    continual(*parse_arguments(LoraArguments, ContinualArguments, BayesianTrainingArguments))


if __name__ == "__main__":
    main()
    end_process_group()
