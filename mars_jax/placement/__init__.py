"""The placement of weights and state on a mesh, and decoding with several processes."""
