"""The distribute transpiler: one captured Program in, the programs of every replica out."""
