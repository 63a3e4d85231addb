#!/usr/bin/env bash
# A method repeated with its own, better agent: bash scripts/rounds.sh METHOD R [SEED …]   (seed 0; results in
# out/rounds; a second call resumes, or goes on to more rounds)
# METHOD is rft, mtdpo, sweet, grpo, grpo-critic (grpo with the critic's advantages) or distill. Each of R rounds plays
# four dialogues of the current agent on each of TRAIN_TASKS (200) new training tasks, the same tasks for every method,
# trains a critic from the current agent where the method has one, trains the next agent from the current one, and plays
# the test tasks. Four rounds so take as many dialogues as run.sh. All methods share the dialogues of round 1. Two seeds
# at a time, one thread each.
# NAME (METHOD) names what differs from the plain method by
#     CRITIC_DATA=all        the critic learns from the dialogues of all rounds so far, not from the newest alone
#     CRITIC_MODEL=base      the critic starts from the shipped base model, not from the current agent
#     TURN_COST=0.02         in place of 0 (03 and 04 --turn-cost)
#     MIN_MARGIN=0.05        in place of 0 (04 --min-margin)
#     LEARNING_RATE=1e-4     of the policy, in place of the setting of scripts/chain.sh
# SPLIT=validation plays validation tasks instead of test tasks: for choosing among these.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
method=${1:-} num_rounds=${2:-} name=${NAME:-${1:-}} results=${OUT:-out}/rounds split=${SPLIT:-test}
if [[ ! $method =~ ^(rft|mtdpo|sweet|grpo|grpo-critic|distill)$ || ! $num_rounds =~ ^[1-9][0-9]*$ ]]; then
    echo "error: bash scripts/rounds.sh METHOD ROUNDS [SEED …], METHOD rft, mtdpo, sweet, grpo, grpo-critic or distill" >&2
    exit 2
fi
if [[ ! ${CRITIC_DATA:-new} =~ ^(new|all)$ || ! ${CRITIC_MODEL:-agent} =~ ^(agent|base)$ ]]; then
    echo "error: CRITIC_DATA is new or all, CRITIC_MODEL agent or base" >&2
    exit 2
fi
if [[ -n ${TURN_COST:-} && $method = distill ]]; then
    echo "error: TURN_COST: distill orders nothing" >&2
    exit 2
fi
domain=backend
set_up_domain
[ $split = test ] || results=$results-$split
seeds=${*:3}
seeds=${seeds:-0}
critic_flags= policy_flags=
[ -z "${TURN_COST:-}" ] || critic_flags="--turn-cost $TURN_COST"
if [[ -n ${TURN_COST:-} && $method =~ ^(rft|mtdpo|grpo)$ ]]; then policy_flags="--turn-cost $TURN_COST"; fi
[ -z "${MIN_MARGIN:-}" ] || policy_flags+=" --min-margin $MIN_MARGIN"
[ -z "${LEARNING_RATE:-}" ] || policy_flags+=" --lr $LEARNING_RATE"
export TEST_TASKS=${TEST_TASKS:-500} SAMPLES=1 method name num_rounds results split critic_flags policy_flags
export py domain base rollout critic_settings rft_settings mtdpo_settings sweet_settings grpo_settings \
    grpo_critic_settings distill_settings

tasks_and_first_dialogues() {                                        # SEED: the dialogues of the base model
    seed=$1 out=$results/seed$1
    mkdir -p "$out"
    if [ $split = test ]; then tasks test "$TEST_TASKS" 1000; else tasks validation "${VALIDATION_TASKS:-300}" 0; fi
    for round in $(seq "$num_rounds"); do
        step "tasks-train-$round" $py 01_generate_tasks.py --split train --num-tasks "${TRAIN_TASKS:-200}" \
            --seed $((seed + 1000 * (round - 1))) --out "$out/train-$round.jsonl"
    done
    step rollout-offline $py $rollout --tasks "$out/train-1.jsonl" --agent $base --samples 4 --seed "$seed" \
        --out "$out/offline.jsonl"
}
play_round() {                                                       # of `seed`, after `round` - 1 others
    local top=$results/seed$seed first=$base data record
    local folder=$top/$name
    [ "$round" = 1 ] || base=$folder/$((round - 1))/agent
    out=$folder/$round seed=$((seed + 1000 * (round - 1)))           # 04 draws its dialogues and candidates by the seed
    mkdir -p "$out"
    cp "$top/$split.jsonl" "$out/test.jsonl"                         # where `evaluate` looks
    if [ "$round" = 1 ]; then
        for record in "" .args.json .costs.json; do ln -sf ../../offline.jsonl$record "$out/offline.jsonl$record"; done
    else
        step rollout-offline $py $rollout --tasks "$top/train-$round.jsonl" --agent "$base" --samples 4 \
            --seed "$seed" --out "$out/offline.jsonl"
    fi
    if [[ $method =~ ^(sweet|grpo-critic)$ ]]; then
        data=$out/offline.jsonl
        if [ "${CRITIC_DATA:-new}" = all ]; then
            data=$out/all.jsonl
            [ -e "$data" ] || { cat $(seq -f "$folder/%g/offline.jsonl" "$round") > "$data.new"; mv "$data.new" "$data"; }
        fi
        [ "${CRITIC_MODEL:-agent}" = agent ] || critic_flags+=" --model $first"
        critic critic --trajectories "$data" $critic_flags
    fi
    case $method in
        sweet) policy agent sweet --critic "$out/critic" $policy_flags ;;
        grpo-critic) grpo_settings=$grpo_critic_settings; policy agent grpo --critic "$out/critic" $policy_flags ;;
        *) policy agent "$method" $policy_flags ;;
    esac
}
one_seed() {
    seed=$1
    [[ -e $results/seed$seed/offline.jsonl && -e $results/seed$seed/train-$num_rounds.jsonl ]] ||
        tasks_and_first_dialogues "$seed"
    for round in $(seq "$num_rounds"); do (play_round); done
}
export -f step result_of tasks train critic evaluate policy tasks_and_first_dialogues play_round one_seed
printf '%s\n' $seeds | xargs -P 2 -I{} bash -euo pipefail -c 'one_seed {}'

# ---------------------------------------------------------------------------------------------------------------------
# all that has been played of these seeds, as points of curves

files=()
for folder in "$results/seed${seeds%% *}"/*/; do
    other=$(basename "$folder")
    for round in $(seq "$num_rounds"); do
        own=$(printf "$results/seed%s/$other/$round/agent.jsonl\n" $seeds)
        if ls $own > /dev/null 2>&1; then
            files+=("$other@$round=$(paste -sd, <<< "$own")")
        else
            echo "not in the table: round $round of $other, which not all of these seeds have played"
        fi
    done
done
$py 05_evaluate.py "${files[@]}" --costs --overwrite --out "$results/report-${seeds// /-}"
