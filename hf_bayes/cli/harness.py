"""The command of lm-evaluation-harness with the model "hf_bayes" and its metrics.

    python -m hf_bayes.cli.harness --model hf_bayes --model_args pretrained=DIR --tasks TASKS

The arguments are those of ``lm_eval``. It is needed as long as a release of lm_eval finds no models of other packages
(up to 0.4.13), and for the metrics ``epistemic`` and ``ece``.
"""

from __future__ import annotations


def main() -> None:
    """Run the command ``lm_eval`` with the arguments of ``sys.argv``.

    Raises:
        SystemExit: without lm_eval, with a sentence that says what to install.
    """
    try:
        import lm_eval
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit(f"this command needs lm-evaluation-harness: pip install lm_eval ({error})") from error
    from hf_bayes.pipelines.lm_harness import evaluate

    lm_eval.simple_evaluate = evaluate  # the command looks for it there
    cli_evaluate()


if __name__ == "__main__":
    main()
