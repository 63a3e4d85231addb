#!/usr/bin/env bash
# A COMMAND for scripts/record.sh, which sets SEED, TRAIN, BASE and OUT: bash scripts/entry.sh [--domain sql] METHOD TASKS
# METHOD is mtdpo, sweet (all turns, ranked as the published code does) or printed (all turns, eq. 3 as printed), with
# the settings of few_dialogues in scripts/chain.sh; four dialogues on each of the first TASKS training tasks.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
shift $taken
set_up_domain
few_dialogues
base=$BASE out=$OUT seed=$SEED method=$1 num_tasks=$2
head -n "$num_tasks" "$TRAIN" > "$out/tasks.jsonl"
ranks=$torchrun
step rollout-offline $ranks $rollout --tasks "$out/tasks.jsonl" --agent "$base" --samples 4 --seed "$seed" \
    --out "$out/offline.jsonl"
case $method in
    mtdpo) ranks= ; train_policy agent mtdpo ;;
    sweet | printed)
        critic critic
        ranks=
        reference=
        [ "$method" = sweet ] || reference="--reference informed"
        train_policy agent sweet --critic "$out/critic" $reference ;;
    *) echo "error: $method: METHOD is mtdpo, sweet or printed" >&2; exit 2 ;;
esac
