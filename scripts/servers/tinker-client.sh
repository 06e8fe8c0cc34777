#!/usr/bin/env bash
# Installs retrain without torch (retrain-core), with the Tinker SDK, into the virtual environment DIR. The dependencies are kept, retrain
# itself is installed anew each time. Usage: tinker-client.sh DIR
set -euo pipefail
dir=${1:?usage: tinker-client.sh DIR}
root=$(cd "$(dirname "$0")/../.." && pwd)
sdk=0.38.0
install() { "${PYTHON:-python3}" "$root/scripts/install.py" "$dir" "$@"; }
wanted="$sdk $(cat "$root/pyproject.toml" "$root/core/pyproject.toml" "$root/core/metadata.py" | cksum)"
if [ "$(cat "$dir/.installed" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$dir"
  install "tinker==$sdk" "$root/core[tinker]"
  echo "$wanted" > "$dir/.installed"
fi
install --no-deps --anew "$root/core" # uv keeps what it built before
