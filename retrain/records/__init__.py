"""Everything that a run leaves on disk, and its formats: folders, rows, checkpoints, token files, and what is masked in them."""
