#!/usr/bin/env bash
# Serves MODEL through the Tinker API on 127.0.0.1:PORT, with its database and checkpoints under WORK and compiled programs under DIR/jax.
# Fixed numbers of rows keep the programs that JAX compiles few: about one for each power of two of a length.
# Runs in the foreground until it is ended; GET /api/v1/healthz answers once it is ready. A client names MODEL as its base model, and any key.
# Usage: tinker-start.sh DIR MODEL PORT WORK [more flags of SkyRL]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(cd "${1:?usage: tinker-start.sh DIR MODEL PORT WORK}" && pwd) model=$(cd "${2:?}" && pwd) port=${3:?}
mkdir -p "${4:?}"
work=$(cd "$4" && pwd)
shift 4
# The server starts its engine through `uv run ... -m MODULE`; the folder on PATH holds a uv that runs the same Python instead.
export SKYRL_PYTHON="$dir/bin/python" PATH="$here/tinker-bin:$PATH"
export HF_HUB_OFFLINE=1 JAX_PLATFORMS=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$dir/jax}" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
cd "$work"
# The server reads its parent's command line and wants a "--" in it, hence the inner bash, which ends the server when it is ended.
exec bash -c 'trap '\''kill "$server" 2>/dev/null'\'' TERM INT; "$@" & server=$!; wait "$server"; wait "$server"' -- \
  "$SKYRL_PYTHON" "$here/tinker_sequence_ids.py" --base-model "$model" --backend jax \
  --backend-config '{"max_lora_adapters":32,"max_lora_rank":32,"sample_max_num_sequences":32,"train_micro_batch_size":4}' --checkpoints-base "$work/checkpoints" \
  --database-url "sqlite:///$work/tinker.db" --host 127.0.0.1 --port "$port" "$@"
