"""Device meshes: roles of mesh axes, shardings of rows, and decoding with several processes."""
