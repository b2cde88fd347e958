"""The predictors of classifiers, regressions and language models, and distilled students."""
