"""Bayesian versions of transformers models.

``attach`` gives a live model a member axis; ``from_pretrained`` loads a posterior on its base model. There is one file
for each kind of model, and a predictor decides how the model predicts: by members, linearised, or in closed form.
"""
