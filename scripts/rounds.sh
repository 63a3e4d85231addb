#!/usr/bin/env bash
# Methods repeated with their own, better agent: bash scripts/rounds.sh [--domain sql] METHOD[,METHOD…] R [SEED …]
# (seed 0; results in out/rounds or out/sql/rounds; a second call resumes, or goes on to more rounds)
# METHOD is one of
#     rft, mtdpo        the baselines
#     sweet             SWEET with all turns, ranked with a reference that does not see c, as the published code does
#     printed           the same, ranked by eq. 3 as printed
#     blind             the same as sweet, its critic trained with such a reference, too
#     grpo, distill     examples/grpo.py and examples/distill.py
#     grpo-critic       grpo with the critic's advantages
# Each of R rounds plays four dialogues of the current agent on each of TRAIN_TASKS (80) new training tasks, the same
# tasks for every method, trains a critic from the current agent where the method has one, trains the next agent from
# the current one, and plays the test tasks. All methods share the dialogues of round 1. Two processes of one thread at a
# time.
# NAME (METHOD; letters, digits, ".", "-"; for one METHOD alone) names what differs from the plain method by
#     POLICY_FLAGS="--epochs 2"             more flags of 04, or of its forks examples/grpo.py and examples/distill.py
#     LATER_FLAGS="--lr 3e-5"               flags of it from the second round on, in place of METHOD_later below
#     CRITIC_FLAGS="--reference blind"      more flags of 03; with "--model models/tiny" it starts anew in each round
#     CRITIC_DATA=new                       the critic learns from the newest dialogues, not from those of all rounds
# BUDGETS="4 5 6" also plays dialogues of at most so many rounds with the last agent, as NAME-in-4 and so on.
# RATES="3e-5 1e-4" plays each learning rate of the policy in place of METHOD_settings, as NAME_RATE (with
# LATER_FLAGS= in every round).
# SPLIT=validation plays validation tasks (VALIDATION_TASKS, 300) instead of test tasks (TEST_TASKS, 300): for choosing.
# The tables are out/rounds/table.csv and out/rounds-validation/table.csv. Kept: docs/rounds_320.csv,
# docs/rounds_sql_320.csv, docs/grid_rounds_320.csv and docs/grid_rounds_sql_320.csv; of 748f4b3 (200 tasks, a tenth of
# the turns) docs/rounds.csv, docs/grid_rounds.csv, docs/rounds_sql.csv and docs/grid_rounds_sql.csv.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
shift $taken
known="rft|mtdpo|sweet|printed|blind|grpo|grpo-critic|distill" methods=${1:-} num_rounds=${2:-} split=${SPLIT:-test}
results=${OUT:-out}/rounds
[ $domain = backend ] || results=${OUT:-out}/$domain/rounds
[ $domain != frontend ] || { echo "error: --domain frontend: rounds are for backend and sql" >&2; exit 2; }
if [[ ! $methods =~ ^($known)(,($known))*$ || ! $num_rounds =~ ^[1-9][0-9]*$ ]]; then
    echo "error: bash scripts/rounds.sh METHOD[,METHOD…] ROUNDS [SEED …], before these perhaps --domain sql;" \
        "METHOD one of ${known//|/, }" >&2
    exit 2
fi
if [[ ! ${CRITIC_DATA:-all} =~ ^(new|all)$ || ! $split =~ ^(test|validation)$ ]]; then
    echo "error: CRITIC_DATA is new or all, SPLIT test or validation" >&2
    exit 2
fi
if [[ -n ${NAME:-} && ( $methods = *,* || ! $NAME =~ ^[[:alnum:].-]+$ ) ]]; then
    echo "error: NAME is for one METHOD alone, and has letters, digits, \".\" and \"-\"" >&2
    exit 2
fi
set_up_domain
[ $split = test ] || results=$results-$split
# The first round has the settings that scripts/efficiency.sh found for so many dialogues; with queries sweet also has
# --answers-by-outcome, without which its second round falls below its first. Later rounds of mtdpo and sweet have the
# best that was tried on validation tasks (docs/grid_rounds_320.csv, docs/grid_rounds_sql_320.csv). The other methods
# were searched with 200 tasks a round, 125 with queries (docs/grid_rounds.csv, docs/grid_rounds_sql.csv).
few_dialogues
rft_later="--lr 1e-3" mtdpo_later="--lr 1e-4" sweet_later="--lr 1e-5"
grpo_settings="--lr 3e-4 --epochs 2" grpo_later=
grpo_critic_settings="--lr 1e-3 --epochs 2" grpo_critic_later="--lr 3e-4"
distill_settings="--lr 1e-3 --epochs 2" distill_later="--lr 3e-4"
if [ $domain = sql ]; then
    rft_later="--lr 3e-4" mtdpo_later= sweet_settings+=" --answers-by-outcome"
    grpo_critic_settings="--lr 3e-4 --epochs 2" grpo_critic_later="--lr 1e-4"
    distill_settings="--lr 3e-4 --epochs 2" distill_later="--lr 1e-4"
fi
printed_later=$sweet_later blind_later=$sweet_later
seeds=${*:3}
seeds=${seeds:-0}
export TRAIN_TASKS=${TRAIN_TASKS:-$num_train} TEST_TASKS=${TEST_TASKS:-300} SAMPLES=1
export num_rounds results split py domain base rollout critic_settings \
    {rft,mtdpo,sweet,grpo,grpo_critic,distill}_settings \
    {rft,mtdpo,sweet,printed,blind,grpo,grpo_critic,distill}_later
export CRITIC_DATA=${CRITIC_DATA:-all} CRITIC_FLAGS=${CRITIC_FLAGS:-}

tasks_and_first_dialogues() {                                        # SEED: the dialogues of the base model
    seed=$1 out=$results/seed$1
    mkdir -p "$out"
    if [ $split = test ]; then tasks test "$TEST_TASKS" 1000; else tasks validation "${VALIDATION_TASKS:-300}" 0; fi
    for round in $(seq "$num_rounds"); do
        step "tasks-train-$round" $py 01_generate_tasks.py --domain $domain --split train \
            --num-tasks "$TRAIN_TASKS" --seed $((seed + 1000 * (round - 1))) \
            --out "$out/train-$round.jsonl"
    done
    step rollout-offline $py $rollout --tasks "$out/train-1.jsonl" --agent $base --samples 4 --seed "$seed" \
        --out "$out/offline.jsonl"
}
play_round() {                                                       # METHOD FOLDER FLAGS…: after `round` - 1 others
    local method=$1 folder=$2 top=$results/seed$seed later=${1//-/_}_later data record
    shift 2
    [ "$round" = 1 ] || { base=$folder/$((round - 1))/agent; set -- "$@" ${LATER_FLAGS-${!later}}; }
    out=$folder/$round seed=$((seed + 1000 * (round - 1)))           # 04 draws its dialogues and candidates by the seed
    mkdir -p "$out"
    cp "$top/$split.jsonl" "$out/test.jsonl"                         # where `evaluate` looks
    if [ "$round" = 1 ]; then
        for record in "" .args.json .costs.json; do ln -sf ../../offline.jsonl$record "$out/offline.jsonl$record"; done
    else
        step rollout-offline $py $rollout --tasks "$top/train-$round.jsonl" --agent "$base" --samples 4 \
            --seed "$seed" --out "$out/offline.jsonl"
    fi
    [ "$method" != blind ] || CRITIC_FLAGS+=" --reference blind"
    if [[ $method =~ ^(sweet|printed|blind|grpo-critic)$ ]]; then
        data=$out/offline.jsonl
        if [ "$CRITIC_DATA" = all ]; then
            data=$out/all.jsonl
            [ -e "$data" ] || { cat $(seq -f "$folder/%g/offline.jsonl" "$round") > "$data.new"; mv "$data.new" "$data"; }
        fi
        critic critic --trajectories "$data" $CRITIC_FLAGS
    fi
    case $method in
        sweet | blind) policy agent sweet --critic "$out/critic" "$@" ;;
        printed) policy agent sweet --critic "$out/critic" --reference informed "$@" ;;
        grpo-critic) grpo_settings=$grpo_critic_settings; policy agent grpo --critic "$out/critic" "$@" ;;
        *) policy agent "$method" "$@" ;;
    esac
}
play_rounds() {                                                      # METHOD NAME SEED FLAGS…
    seed=$3
    for round in $(seq "$num_rounds"); do (play_round "$1" "$results/seed$3/$2" "${@:4}"); done
    out=$results/seed$3/$2/$num_rounds
    for budget in ${BUDGETS:-}; do
        step "in-$budget" $py $rollout --max-rounds "$budget" --tasks "$out/test.jsonl" --agent "$out/agent" \
            --seed "$seed" --out "$out/in-$budget.jsonl"
    done
}
export -f step result_of tasks train critic evaluate train_policy policy tasks_and_first_dialogues play_round play_rounds

for seed in $seeds; do echo "tasks_and_first_dialogues $seed"; done | two_at_a_time
for seed in $seeds; do
    for method in ${methods//,/ }; do
        [ -n "${RATES:-}" ] || echo "play_rounds $method ${NAME:-$method} $seed ${POLICY_FLAGS:-}"
        for rate in ${RATES:-}; do
            echo "play_rounds $method ${NAME:-$method}_$rate $seed ${POLICY_FLAGS:-} --lr $rate"
        done
    done
done | two_at_a_time

# ---------------------------------------------------------------------------------------------------------------------
# all that has been played of these seeds, as points of curves

files=() baseline= first=method,round
for folder in "$results/seed${seeds%% *}"/*/; do
    other=$(basename "$folder")
    [[ $other != *_* ]] || first=method,lr,round                     # NAME_RATE
    for round in $(seq "$num_rounds"); do
        own=$(printf "$results/seed%s/$other/$round/agent.jsonl\n" $seeds)
        if ls $own > /dev/null 2>&1; then
            files+=("$other@$round=$(paste -sd, <<< "$own")")
            [ "$other@$round" != "mtdpo@$num_rounds" ] || baseline="--baseline mtdpo@$num_rounds"
        else
            echo "not in the table: round $round of $other, which not all of these seeds have played"
        fi
    done
    for budget in ${BUDGETS:-}; do
        own=$(printf "$results/seed%s/$other/$num_rounds/in-$budget.jsonl\n" $seeds)
        ! ls $own > /dev/null 2>&1 || files+=("$other-in-$budget@$num_rounds=$(paste -sd, <<< "$own")")
    done
done
$py 05_evaluate.py "${files[@]}" $baseline --costs --overwrite --out "$results/report-${seeds// /-}"
grid_table "$results/report-${seeds// /-}/metrics.json" $first > "$results/table.csv"
