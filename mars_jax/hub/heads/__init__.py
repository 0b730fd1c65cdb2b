"""EAGLE and Medusa heads <-> (config, params)."""
