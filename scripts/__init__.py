"""Scripts that measure, draw, check and release. Run one as `python -m scripts.FOLDER.NAME`."""
