"""What is to happen: one policy a module, each a function of what was observed."""
