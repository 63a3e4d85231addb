#!/usr/bin/env bash
# An attempt at a record of docs/records.md: bash scripts/record.sh [--domain sql] NAME COMMAND…
# COMMAND makes an agent. It is run in the repository's root, once for each of the seeds 20 to 24 (SEEDS), with
#     SEED    the number
#     TRAIN   a file of training tasks of this seed, of which it takes as many as it wants
#     BASE    the base model
#     OUT     an empty folder, where the agent must stand in the end, as OUT/agent. All dialogues that COMMAND plays with
#             the human (02_rollout.py --simulator rules) stay there, because they are counted there
# Then each agent plays the test tasks twice, with 02 as it is here, and the entry is printed: dialogues and minutes a
# seed, success, and the chance that it is no better than the mark. Before that it is checked that what is fixed is as
# it was: test tasks, base model, human, rounds. Results in out/record/DOMAIN/NAME. A second call resumes; the minutes
# of its calls are summed.
# TEST_TASKS (300) and NUM_TRAIN (800; queries: 500) make it smaller; the entry then says that it does not count.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
shift $taken
[ $domain != frontend ] || { echo "error: --domain frontend: records are for backend and sql" >&2; exit 2; }
if [ $# -lt 2 ] || [[ ! $1 =~ ^[[:alnum:]_.-]+$ ]]; then
    echo "error: bash scripts/record.sh [--domain sql] NAME COMMAND…; see docs/records.md" >&2
    exit 2
fi
set_up_domain
name=$1 seeds=${SEEDS:-20 21 22 23 24} results=${OUT:-out}/record/$domain/$1
shift
mkdir -p "$results"
command=$(printf '%q ' "$@")
if [ -e "$results/command" ] && [ "$(< "$results/command")" != "$command" ]; then
    echo "error: $results: made by $(< "$results/command"); choose another NAME" >&2
    exit 2
fi
echo "$command" > "$results/command"
out=$results seed=0
tasks test $num_test 1000
head -n 40 "$results/test.jsonl" > "$results/first.jsonl"
step rollout-script $py $rollout --tasks "$results/first.jsonl" --agent script --seed 0 --out "$results/script.jsonl"
$py scripts/record.py check --domain $domain --tasks "$results/test.jsonl" --dialogues "$results/script.jsonl" --base $base
head -n "${TEST_TASKS:-$num_test}" "$results/test.jsonl" > "$results/tasks.jsonl"

for seed in $seeds; do
    out=$results/seed$seed
    mkdir -p "$out/agent-of"
    tasks train "${NUM_TRAIN:-$num_train}" "$seed"
    if [ ! -e "$out/seconds" ]; then
        begin=$SECONDS
        trap 'echo $((SECONDS - begin)) >> "$out/seconds.calls"' EXIT                   # a call that fails counts, too
        SEED=$seed TRAIN=$out/train.jsonl BASE=$base OUT=$out/agent-of step "command" "$@"
        trap - EXIT
        echo $((SECONDS - begin)) >> "$out/seconds.calls"
        echo $(($(paste -sd + "$out/seconds.calls"))) > "$out/seconds"
    fi
    [ -e "$out/agent-of/agent" ] || { echo "error: $out/agent-of/agent: COMMAND left no agent there" >&2; exit 2; }
    step rollout-test $py $rollout --tasks "$results/tasks.jsonl" --agent "$out/agent-of/agent" --samples 2 \
        --seed "$seed" --out "$out/test.jsonl"
done
files=$(printf "$results/seed%s/test.jsonl\n" $seeds | paste -sd,)
$py 05_evaluate.py "$name=$files" --overwrite --out "$results/report" > "$results/report.log"
$py scripts/record.py entry --domain $domain --name "$name" --folder "$results" --seeds $seeds
