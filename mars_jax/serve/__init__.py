"""Text generation: requests, batches of them on the device, and their completions."""
