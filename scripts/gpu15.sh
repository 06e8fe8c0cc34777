#!/usr/bin/env bash
# Measure retrain on one GPU in one command of nine minutes that needs no network.
#
#   scripts/gpu15.sh --download FOLDER            with a network: fetch the wheels that a bare machine with torch lacks
#   scripts/gpu15.sh --wheels FOLDER              on the GPU's machine; results go to $OUT, or to gpu15-out
#   scripts/gpu15.sh --device cpu --shapes tiny   the same code in small, without a GPU
#   scripts/gpu15.sh --only 1,4 --seconds 120     some parts, in less time
#
# Each part is a process with a time limit. It writes every result at once, and its failure stops no other part. The
# last lines are a table of what was measured. The exit code is 1 if a measurement is missing.
set -uo pipefail

# What retrain needs beside torch, transformers and peft; for Linux and Python 3.12.
packages=(
    pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0
    tomlkit==0.15.2 python-dotenv==1.2.4 rich==15.0.0 typer==0.29.2 stamina==26.1.0 tenacity==9.2.1
    datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
    math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2
)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-gpu15-out}
device=cuda:0 shapes=qwen3-4b only=1,2,3,4,5 seconds=540 wheels='' child=''

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

while (($#)); do
    (($# > 1)) || usage
    case $1 in
        --download)
            exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
                --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
                --platform manylinux2014_x86_64 --dest "$2" "${packages[@]}"
            ;;
        --wheels) wheels=$2 ;;
        --device) device=$2 ;;
        --shapes) shapes=$2 ;;
        --only) only=$2 ;;
        --seconds) seconds=$2 ;;
        *) usage ;;
    esac
    shift 2
done
[[ $seconds =~ ^[1-9][0-9]*$ && $only =~ ^[0-5](,[0-5])*$ ]] || usage

begin() {
    mkdir -p "$1" && rm -f "$1"/{machine,runs,tests,log}.txt "$1"/{decode,learn,step}.jsonl && : >"$1/table.tsv"
}
if ! begin "$out" 2>/dev/null; then
    wanted=$out out=$(mktemp -d)
    echo "$wanted cannot be written; the results are in $out." >&2
    begin "$out" || exit 1
fi
out=$(cd "$out" && pwd)
work=$(mktemp -d) || exit 1

finish() {
    rm -rf "$work"
    printf '\n%-5s%-44s %-76s %s\n' part what figure state
    while IFS=$'\t' read -r number what figure state; do
        printf '%-5s%-44s %-76s %s\n' "$number" "$what" "$figure" "$state"
    done <"$out/table.tsv"
    echo "$SECONDS s in all; the files are in $out"
    ! grep -qE $'\t(failed|timed out|not begun)[^\t]*$' "$out/table.tsv"
    exit
}
row() { printf '%s\t%s\t-\t%s\n' "$@" >>"$out/table.tsv"; }

trap '[[ -z $child ]] || kill "$child"; wait 2>/dev/null; row - "this command" "failed: stopped by a signal"; finish' INT TERM

# part NUMBER SECONDS NAME: run a part in its share of the time, and in what the parts before it left of theirs. A part
# writes its own rows of the table; this adds one if the part did not end by itself.
allowed=0
part() {
    local number=$1 name=$3 limit began=$SECONDS code
    [[ $number == 0 || ,$only, == *,$number,* ]] || return 0
    allowed=$((allowed + $2))
    limit=$((allowed * seconds / 540 - SECONDS))
    if ((limit < 1)); then
        row "$number" "$name" "not begun: no time was left"
        return
    fi
    echo "== part $number, $name, at most $limit s" | tee -a "$out/log.txt"
    timeout -k 5 "$limit" "$python" "$root/benchmarks/gpu15.py" "$name" --part "$number" --seconds "$limit" --device "$device" \
        --shapes "$shapes" --wheels "$wheels" --out "$out" --work "$work" 2>>"$out/log.txt" &
    child=$!
    wait "$child" 2>/dev/null  # bash would report a kill
    code=$? child=''
    if ((code != 0 && SECONDS - began >= limit)); then
        row "$number" "$name" "timed out after $limit s"
    elif ((code != 0)); then
        row "$number" "$name" "failed with $code: $(tail -n 1 "$out/log.txt" | tr '\t' ' ' | cut -c1-200)"
    fi
}

export PYTHONPATH="$work/site:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
[[ $device == cpu ]] && export CUDA_VISIBLE_DEVICES=''

part 0 30 machine
part 1 100 runs
part 2 80 decode
part 2 38 continuous
part 2 32 generate
part 3 100 learn
part 4 100 tests
part 5 40 run
part 5 10 trl
finish
