"""The mesh, and how arrays are sharded over it."""
