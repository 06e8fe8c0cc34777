"""Everything that a run leaves on disk, and its formats. All readers of runs use these modules, and
nothing here imports a trainer.

- `run_folder`: the places of a run's files, and the marker without which nothing is deleted,
and which process is writing
- `entries`, `evaluation`: the lines of metrics.jsonl, evaluation.jsonl and generations.jsonl, and
what is computed from them
- `token_table`: tokens/step_N.safetensors
- `environment`: environment.json
- `checkpoint`: checkpoints and the state in them
- `jsonl`, `disk`: how lines and whole files reach the disk, and what a disk that refuses them says
- `redact`: secrets masked before anything is written or printed
- `terminal`: text made harmless for a terminal, numbers in words, rows in tables
"""
