"""The reports of a run: its monitor, its trace, the lines that it prints, and the settings that it chose."""
