"""How arrays lie on a mesh."""
