"""What the numbers of a run say about it: R-hat, effective sample size, temperatures, and a verdict in words."""
