"""Fine-tune a causal language model into a posterior, step by step. ``hf-bayes train`` takes the same steps.

    accelerate launch scripts/run_clm.py --model_name_or_path gpt2 --dataset book.txt --output_dir posterior \
        --method sghmc --num_train_epochs 3
    python scripts/run_clm.py --model_name_or_path gpt2 --dataset book.txt --output_dir posterior --method auto
    python scripts/run_clm.py run.yaml
    python scripts/run_clm.py --config run.yaml --num_train_epochs 5

The functions of ``hf_bayes.cli`` are short; copy the lines that a script of your own does differently.
"""

from __future__ import annotations

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, MethodArguments, ModelArguments
from hf_bayes.cli.language_model import TrainingWindowArguments, language_model
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.scripts import begin, end_process_group, train_or_tune


def main() -> None:
    """Parse the arguments, load the data and the model, train, and save."""
    model_args, method_args, data_args, windows, args = parse_arguments(
        ModelArguments, MethodArguments, DataArguments, TrainingWindowArguments, BayesianTrainingArguments
    )
    method_args.config()  # a wrong method is refused before the model is loaded
    begin(args)  # the seed, and the level of the log
    # a model with LoRA, windows of tokens, a collator
    inputs = language_model(model_args, data_args, windows, args, subspace=method_args.subspace)
    train_or_tune(inputs, args, method_args)  # a BayesianTrainer: train, evaluate, save, push


if __name__ == "__main__":
    main()
    end_process_group()
