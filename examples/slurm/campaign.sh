#!/usr/bin/env bash
# Train a campaign on a Slurm cluster: a task of an array for each run, and a job that compares them at the end.
#
#     bash examples/slurm/campaign.sh my_campaign.toml logs/my_campaign --partition=gpu --gpus=1 --time=04:00:00
#
# Options after the folder go to sbatch. A task that is preempted with a grace time or meets its time limit saves a
# checkpoint and is queued again. The same command trains what is missing. Start it in retrain's environment, in a folder
# that all nodes see.
set -euo pipefail

if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
	(($# >= 2)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
	file=$1 folder=$2
	shift 2
	place=--log-dir
	[[ ! -f $folder/manifest.json ]] || place=--resume
	retrain "$file" "$place" "$folder" --campaign-launcher array
	runs=$(python -c 'import json, sys; print(len(json.load(sys.stdin)["runs"]))' <"$folder/manifest.json")
	job=$(sbatch --parsable --job-name=retrain --array="0-$((runs - 1))" --requeue --open-mode=append --signal=B:USR1@120 \
		--output="$folder/slurm-%a.log" "$@" "$0" "$file" "$folder")
	sbatch --job-name=compare --dependency="afterany:$job" --output="$folder/compare.log" <<-END
		#!/usr/bin/env bash
		retrain compare -- $(printf %q "$folder")
	END
	exit
fi

# Slurm sends TERM to a step that it preempts or cancels, and USR1 to this script two minutes before the time limit.
# A TERM to srun itself would kill the run before it saves. The last task's SLURM_JOB_ID is the whole array's.
task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
srun retrain "$1" --resume "$2" --campaign-launcher array &
child=$! code=0
trap 'scancel --signal=TERM "$task.0"' USR1
trap : TERM
# A signal ends a wait; the run saves meanwhile.
while kill -0 "$child" 2>/dev/null; do
	wait "$child" && code=0 || code=$?
done
# A run that a TERM stopped ends with 143. The job is then no longer running if a user canceled it or Slurm requeued it.
[[ $code != 143 || $(squeue --noheader --format=%T --jobs="$task") != RUNNING ]] || scontrol requeue "$task"
exit "$code"
