"""The executor, the places where it computes, and what it hands back."""
