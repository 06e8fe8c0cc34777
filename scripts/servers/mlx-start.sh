#!/usr/bin/env bash
# Serves MODEL on 127.0.0.1:PORT with MLX-LM; adapters come with the requests.
# Runs in the foreground; GET /health answers 200 once it is ready. Usage: mlx-start.sh DIR MODEL PORT [more flags of mlx_lm.server]
set -euo pipefail
dir=${1:?usage: mlx-start.sh DIR MODEL PORT} model=${2:?} port=${3:?}
shift 3
export HF_HUB_OFFLINE=1
exec "$dir/bin/python" -m mlx_lm server --model "$model" --host 127.0.0.1 --port "$port" --decode-concurrency 128 "$@"
