"""What a run observes and prints: the monitor, the trace, its lines, and the settings that it chose."""
