#!/usr/bin/env bash
# Serves MODEL as "base" on 127.0.0.1:PORT with what retrain needs: log-probs of the sampled distribution, adapters at run time, token ids.
# Runs in the foreground; GET /health answers 200 once it is ready. Usage: vllm-start.sh DIR MODEL PORT [more flags of vLLM]
set -euo pipefail
dir=${1:?usage: vllm-start.sh DIR MODEL PORT} model=${2:?} port=${3:?}
shift 3
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
# Else the first request for log-probs compiles a function, and kills the engine on a machine without a C++ compiler.
export TORCHDYNAMO_DISABLE=1
# `python -m`: the vllm command of this build looks for a package of another name.
exec "$dir/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name base --host 127.0.0.1 --port "$port" \
  --dtype float32 --max-num-seqs 64 --enforce-eager --enable-lora --max-lora-rank 32 --max-loras 2 --max-cpu-loras 4 \
  --enable-prefix-caching --logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out "$@"
