"""SkyRL's engine with two corrections: one snapshot of its queue at each look, and as many rows in
every training program.

Run in SkyRL's environment: python tinker_engine.py FLAGS. What is corrected is in SkyRL 0.4.0, with
SQLite and JAX.

1. It asks its queue for forward-backward passes, and in a later query for optimizer steps. Of a
   pass and a step that arrive between the two it sees the step alone and takes it first, without
   its gradient. In one transaction both queries see the same queue.
2. The last micro-batch of a request has as many rows as are left, and JAX compiles a program for
   each number of them. It is filled up with rows that SkyRL's own padding for several devices uses;
   their loss is 0.
"""

from typing import Any

import skyrl.backends.jax as jax_backend
import skyrl.tinker.engine as engine

_pad = jax_backend.pad_to_fsdp


class Engine(engine.TinkerEngine):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        rows = config.backend_config.get("train_micro_batch_size", 0)
        if rows > 0:
            jax_backend.pad_to_fsdp = lambda array, devices: _pad(array, rows * devices)
        super().__init__(config)

    def find_batchable_model_passes(self, session: Any, request_type: Any) -> Any:
        """The first query of each look; the others are made in the same session."""
        connection = session.connection()
        if not connection.connection.dbapi_connection.in_transaction:
            connection.exec_driver_sql(
                "BEGIN"
            )  # of itself, sqlite3 begins a transaction at the first write
        return super().find_batchable_model_passes(session, request_type)


if __name__ == "__main__":
    engine.TinkerEngine = Engine
    engine.main()
