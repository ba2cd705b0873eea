"""The command line: recipes, trainer, launchers, verification and reports."""
