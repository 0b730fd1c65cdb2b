"""Bridges to other libraries, each thin and over the library alone."""
