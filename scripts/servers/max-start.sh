#!/usr/bin/env bash
# Serves MODEL on 127.0.0.1:PORT with Modular's MAX on the CPU: the base model only, since MAX applies adapters on a GPU alone.
# Runs in the foreground; GET /health answers 200 once it is ready. Usage: max-start.sh DIR MODEL PORT [more flags of max serve]
set -euo pipefail
dir=${1:?usage: max-start.sh DIR MODEL PORT} model=${2:?} port=${3:?}
shift 3
export HF_HUB_OFFLINE=1 MAX_SERVE_DISABLE_TELEMETRY=1
exec "$dir/bin/max" serve --model "$model" --host 127.0.0.1 --port "$port" --no-enable-echo --devices cpu \
  --quantization-encoding float32 --max-length 512 --max-batch-size 128 --enable-prefix-caching "$@"
