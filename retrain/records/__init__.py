"""Everything that a run leaves on disk, and its formats. All readers of runs use these modules, and
nothing here imports a trainer.

- `run_folder`: the places of a run's files, the marker that allows a deletion, and the process that
  writes
- `entries`, `evaluation`: the lines of metrics.jsonl, evaluation.jsonl and generations.jsonl, and
  figures from them
- `token_table`: tokens/step_N.safetensors
- `environment`, `summary`: environment.json and summary.json
- `untrained`: steps that trained nothing, and why
- `checkpoint`, `checkpoint_place`, `state`: checkpoints, their folder, and the state in them
- `sound`: whether the records of a run are whole, which every reader asks first
- `jsonl`, `disk`: how lines and whole files reach the disk, and the error of a disk that refuses
  them
- `redact`: masks for secrets in everything that retrain writes or prints
- `terminal`: safe text for a terminal, numbers in words, rows in tables
"""
