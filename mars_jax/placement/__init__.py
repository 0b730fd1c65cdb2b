"""Where weights and state lie on a mesh, and several processes that decode as one."""
