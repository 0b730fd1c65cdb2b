"""Scripts for measurements, plots, checks and releases. Run one as `python -m scripts.FOLDER.NAME`."""
