"""The placement of weights and state on a mesh, and several processes that decode as one."""
