"""The decoding step and its state, loops and interfaces: the part of the library that users embed in their programs."""
