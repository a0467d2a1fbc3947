"""Views of a run: table, plots and machine-readable formats. They compute nothing that rules judge."""
