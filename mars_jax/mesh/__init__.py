"""Meshes of devices: roles of axes, shardings of rows, and several processes."""
