"""Text to text: requests, what they become on the device, and what they get."""
