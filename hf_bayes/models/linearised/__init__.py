"""Models that are linearised in their random parameters: means and covariances of their outputs."""
