"""A new model card for a posterior directory, with the results of an evaluation and a heat map."""

from __future__ import annotations

import io
import json
from pathlib import Path

from matplotlib.figure import Figure

from hf_bayes.cli.output_file import write_file
from hf_bayes.cli.posterior_arguments import PosteriorArguments
from hf_bayes.pipelines.picture import to_picture
from hf_bayes.posteriors.benchmark_results import Benchmark, benchmark_result
from hf_bayes.posteriors.card_results import EVALUATION, PICTURE, read_evaluation, stamp
from hf_bayes.posteriors.model_card import known_fields, write_card
from hf_bayes.posteriors.posterior import Posterior


def rewrite_card(
    directory: str,
    *,
    results: str | None = None,
    benchmark: str | None = None,
    text: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
) -> None:
    """Write ``README.md`` of a posterior directory anew. License, language, data sets and tags of the old card stay.

    Args:
        results: results.json of ``hf-bayes evaluate``; a copy stands beside the card as ``evaluation.json``.
        benchmark: "dataset:task:metric", the Hub's benchmark that the results are about; its file of evaluation results
            stands in ``.eval_results``.
        text: a text that the posterior scores for the heat map ``heat_map.png``.
        repo_id: the repository in the examples.
        base_model: another path or name of the base model, for the heat map.
    Raises:
        ValueError: for a posterior that is not a directory here, a file of other results or of another posterior's, or
            a text for a posterior that is not a language model's.
        OSError: if there is no posterior.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ValueError(f"--card writes into a posterior directory, got {directory!r:.200}: give a directory")
    posterior = Posterior.from_pretrained(root)  # a damaged posterior gets no new card
    ranked = None if benchmark is None else Benchmark.parse(benchmark)
    if ranked is not None and results is None:
        raise ValueError("--benchmark names the benchmark of --results: give results.json of hf-bayes evaluate, too")
    if results is None and (root / EVALUATION).exists():
        read_evaluation(root / EVALUATION, posterior.fingerprint)  # an earlier export's: it has its table in the card
    fields, files = known_fields(root), dict[str, bytes]()
    if results is not None:
        found = read_evaluation(Path(results), posterior.fingerprint)
        files[EVALUATION] = f"{json.dumps(found, indent=2)}\n".encode()
        if ranked is not None:
            files[ranked.file] = benchmark_result(ranked, found).encode()
    if text is not None:
        score = PosteriorArguments(posterior=directory, base_model=base_model).text_pipeline("export --text").score
        files[PICTURE] = _png(to_picture(score(text)), stamp(posterior.fingerprint))
    for name, data in files.items():  # after everything that can refuse: a refused export changes no file
        (root / name).parent.mkdir(exist_ok=True)
        write_file(root / name, data)
    write_card(root, repo_id=repo_id, **fields)


def _png(figure: Figure, comment: str) -> bytes:
    """Return the PNG file of a figure, with a comment in its metadata."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Comment": comment})
    return file.getvalue()
