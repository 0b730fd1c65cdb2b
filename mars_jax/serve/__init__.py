"""Text generation: requests, their arrays on the device, and their completions."""
