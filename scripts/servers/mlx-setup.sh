#!/usr/bin/env bash
# Installs MLX-LM's server for the CPU into the virtual environment DIR: 350 MB, half a minute. Nothing happens where it is there already.
# Usage: mlx-setup.sh DIR
set -euo pipefail
dir=${1:?usage: mlx-setup.sh DIR}
version=0.32.2
[ "$(cat "$dir/.installed" 2>/dev/null)" = "mlx-lm $version" ] && exit 0
"${PYTHON:-python3}" -m venv --clear "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check "mlx-lm==$version" "mlx[cpu]==0.32.4"
echo "mlx-lm $version" > "$dir/.installed"
