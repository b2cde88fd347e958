"""What a posterior has to beat: the MAP, and an ensemble of MAPs."""
