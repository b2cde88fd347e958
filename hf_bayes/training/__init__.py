"""``BayesianTrainer``: a transformers Trainer that ends in a posterior."""
