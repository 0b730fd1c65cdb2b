"""Device meshes: axis roles, row shardings, and runs with several processes."""
