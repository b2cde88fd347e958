"""Bayesian versions of transformers models.

``attach`` gives a live model a member axis; ``from_pretrained`` loads a posterior on its base model. There is one file
for each kind of model. A predictor decides how the model predicts: by members, linearised, in closed form, by a single
pass, or by a distilled student.
"""
