"""What the scripts and the command line share: options, data sets and labels."""
