"""Scripts for measurements, plots, checks and releases. Run a script as `python -m scripts.FOLDER.NAME`."""
