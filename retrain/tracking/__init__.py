"""What a run tells the outside: one event, many sinks.

`record` holds the shapes of the files, `run_folder` their places, `tracker` the events; each other module is one sink or one
thing that every sink needs (`jsonl`, `redact`). Optional sinks are imported only by the run that asks for them.
"""
