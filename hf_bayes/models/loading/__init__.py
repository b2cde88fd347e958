"""Load a posterior: find and check its base model, build its adapter, and name what does not fit."""
