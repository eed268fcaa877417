"""What a plan knows: the pods that were seen, what they said, and what the status remembers."""
