#!/usr/bin/env bash
# The chain with a pretrained model: bash scripts/real.sh [SEED …]   (0; results in out/real; a second call resumes)
# SmolLM2-135M-Instruct learns the protocol from scripted dialogues that succeeded. Then, for every seed: 320 offline
# dialogues, a critic, four policies, their test dialogues. The policies are rejection fine-tuning, multi-turn DPO,
# SWEET as released (its reference ranks without c) and SWEET with the base itself as its critic. Both have the
# likelihood of right answers as a further term (--answer-coef 1), and use the turns of DATA_FRAC (0.2) of the
# dialogues: about as many as an hour on two cores allows; on a GPU take all (1).
# Seed 0 has SWEET with the oracle as critic, too. It tries three learning rates for each policy on validation tasks:
# out/real/grid.csv. One rate of each is tried in a round, the best of docs/grid_real.csv first, and after each round the
# best so far play the test tasks, so that an interrupted run has whole tables (NUM_RATES=1 tries the first alone). The
# critics are measured after the first round. Other seeds take the rates that seed 0 found.
# Two processes of one thread, at most 8 GB each. DTYPE is bfloat16, or float32 for a processor without its instructions
# (a third of the time there). BASE_TASKS, TRAIN_TASKS, VALIDATION_TASKS, TEST_TASKS and FEW_TASKS (for the critics) set
# the sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
domain=backend
set_up_domain
seeds=${*:-0} results=${OUT:-out}/real start=${START:-smollm2} base=${OUT:-out}/real/base/model
num_train=${TRAIN_TASKS:-80} num_test=${TEST_TASKS:-200} num_base=${BASE_TASKS:-1000} few=${FEW_TASKS:-40}
num_validation=${VALIDATION_TASKS:-40}
rollout+=" --dtype ${DTYPE:-bfloat16}"
short="--dtype ${DTYPE:-bfloat16} --max-tokens 4096 --save-every 20 --log-every 5"
# A setting is METHOD_RATE_BETA_NLL_EPOCHS, as in docs/grid.csv; of SWEET the beta is its critic's.
pairs="$short --micro-batch-size 2 --batch-size 4"
critic_settings="$pairs --beta 1 --lr 1e-5 --epochs 1 --held-out-frac 0.15"
rft_rest=-_-_2 rft_rates="1e-4 3e-4 1e-3" rft_settings="$short --micro-batch-size 4 --batch-size 8 --epochs 2"
mtdpo_rest=0.1_0.3_1 mtdpo_rates="3e-5 1e-4 1e-5" mtdpo_settings="$pairs --nll-coef 0.3 --epochs 1"
sweet_rest=1_0.3_1 sweet_rates="3e-5 1e-4 1e-5"
sweet_settings="$short --batch-size 8 --nll-coef 0.3 --answer-coef 1 $sampling --concurrency 64 --pairs-together"
sweet_settings+=" --data-frac ${DATA_FRAC:-0.2}"
policies="rft mtdpo sweet sweet-untrained"
export py domain seed out results drawn_by base num_train num_test rollout critic_settings SAMPLES=1 few \
    rft_rest rft_rates rft_settings mtdpo_rest mtdpo_rates mtdpo_settings sweet_rest sweet_rates sweet_settings
once() { [ -e "$1" ] || "${@:2}"; }                                  # OUTPUT COMMAND…: a stage starts in seconds

# ---------------------------------------------------------------------------------------------------------------------
# the base model learns the protocol from clear requests that are answered at once, and from dialogues about vague ones:
# of a noisy agent, as far as they succeed (half of them end with an answer that is too early), and of an agent that
# knows the reference, which is put in front of these, so that the critic starts from a model that reads it

make_base() {
    local out=$results/base kind told number agent
    mkdir -p "$out"
    for kind in clear script script-informed; do
        told= number=$((num_base / 2)) agent=$kind
        case $kind in
            clear) told="--told all" agent=script ;;
            script) number=$num_base ;;
            script-informed) number=$((2 * num_base)) ;;
        esac
        once "$out/$kind-tasks.jsonl" step tasks-$kind $py 01_generate_tasks.py --split train --seed 100 $told \
            --num-tasks $number --out "$out/$kind-tasks.jsonl"
        once "$out/$kind.jsonl" step rollout-$kind $py $rollout --agent $agent --tasks "$out/$kind-tasks.jsonl" \
            --out "$out/$kind.jsonl"
    done
    cat "$out"/{clear,script,script-informed}.jsonl > "$out/demonstrations.jsonl"
    OMP_NUM_THREADS=2 step model $py 04_train_policy.py --method rft --model $start $short --lr 5e-4 --epochs 1 \
        --micro-batch-size 4 --batch-size 8 --trajectories "$out/demonstrations.jsonl" --out "$base"
}

# ---------------------------------------------------------------------------------------------------------------------
# one seed: jobs of one thread, each with the functions of scripts/chain.sh

flags_of() {                                                         # SETTING: flags of 04
    local critic=$out/critic reference="--reference blind" drawn=
    case $1 in
        rft_* | mtdpo_*) echo --method "${1%%_*}"; return ;;
        sweet-untrained_*) critic=untrained ;;
        sweet-oracle_*) critic=oracle reference= ;;
    esac
    [ "$1" = "$drawn_by" ] || drawn="--candidates $out/$drawn_by/candidates.jsonl"         # one draw for all of SWEET
    echo --method sweet --critic "$critic" $reference $drawn
}
settings_of() {                                                      # METHOD: its settings, in the order of rounds
    local rate rates=${1%%-*}_rates rest=${1%%-*}_rest
    for rate in ${!rates}; do echo "$1_${rate}_${!rest}"; done
}
try() {                                                              # SETTING: train it, play the validation tasks
    local method=${1%%_*} rate=${1#*_}
    local settings=${method%%-*}_settings
    once "$out/$1/COMPLETED" step "$1" train 04_train_policy.py $(flags_of "$1") ${!settings} --lr ${rate%%_*} \
        --out "$out/$1"
    [ "$seed" != 0 ] || validate "$1" "$out/$1"
}
validate() {                                                         # NAME MODEL
    once "$out/validation/$1.jsonl" step "validation-$1" $py $rollout --tasks "$results/validation.jsonl" \
        --agent "$2" --samples 2 --seed 5 --out "$out/validation/$1.jsonl"
}
best() {                                                             # METHOD: seed 0's best setting so far
    local name
    for name in $(settings_of $1); do
        [ ! -e "$results/seed0/validation/$name.jsonl" ] ||
            echo "$(result_of "$results/seed0/validation-$name.log" | grep -oE '[0-9.]+' | head -n 1) $name"
    done | sort -s -k 1,1nr | head -n 1 | cut -d ' ' -f 2
}
play() { once "$out/test-$1.jsonl" evaluate "test-$1" "$2"; }        # NAME MODEL: the test tasks
play_best() {                                                        # METHOD…
    local method
    for method in "$@"; do play "$(best $method)" "$out/$(best $method)"; done
}
export -f step result_of train critic evaluate once flags_of settings_of try validate best play play_best best_of

# ---------------------------------------------------------------------------------------------------------------------

report() {                                                           # FOLDER SEED…: a table of their test tasks
    local method files=()
    tests() { printf "$results/seed%s/test-$1.jsonl\n" "${@:2}" | paste -sd,; }
    for method in $methods; do files+=("$method=$(tests "$(best $method)" "${@:2}")"); done
    $py 05_evaluate.py base="$(tests base "${@:2}")" "${files[@]}" --baseline mtdpo --costs --overwrite --out "$1"
}
report_search() {                                                    # the table of seed 0's validation tasks
    local name tried=()
    for name in $(for method in $methods; do settings_of $method; done); do
        [ ! -e "$out/validation/$name.jsonl" ] || tried+=("$name=$out/validation/$name.jsonl")
    done
    step report-grid $py 05_evaluate.py "${tried[@]}" --costs --overwrite --out "$out/report-grid"
    grid_table "$out/report-grid/metrics.json" > "$results/grid.csv"
}
one_round() {                                                        # a setting for each of `methods`
    printf '%s\n' "once $out/critic/COMPLETED critic critic; try $3" "try $2; try $1" | two_at_a_time
    printf '%s\n' "try $4; play_best sweet-untrained" \
        "${5:+try $5;} play base $base; play_best ${methods/ sweet-untrained/}" | two_at_a_time
    report "$out/report" $seed
}
measure() {                                                          # the base, and the critics as scripts/study.sh
    local n name tried
    local -x rollout="$rollout --max-tokens 4096"                    # two processes with three models each
    head -n $few "$out/validation/base.jsonl" > "$results/gates.jsonl"
    once "$results/gates/COMPLETED" step gates $py 05_evaluate.py base="$results/gates.jsonl" --out "$results/gates"
    once "$results/reads-c/COMPLETED" step reads-c $py scripts/critics.py --trajectories "$results/gates.jsonl" \
        --gates "$base" --out "$results/reads-c"
    mkdir -p "$out/few"
    head -n "$few" "$out/test.jsonl" > "$out/few/test.jsonl"
    once "$out/few/branches.jsonl" branches 44 4
    once "$out/critics/COMPLETED" step critics $py scripts/critics.py --trajectories "$out/few/base.jsonl" --critics \
        c="$out/critic" --returns "$out/few/branches.jsonl" --out "$out/critics"
    for n in 4 16; do
        echo "once $out/few/critic@$n.jsonl best_of critic $out/critic $n --reference blind"
        echo "once $out/few/untrained@$n.jsonl best_of untrained untrained $n"
        echo "once $out/few/oracle@$n.jsonl best_of oracle oracle $n"
    done | two_at_a_time
    tried=$(cd "$out/few" && ls *@*.jsonl | sed "s|\(.*\)\.jsonl|\1=$out/few/&|")
    $py 05_evaluate.py base="$out/few/base.jsonl" $tried --overwrite --out "$out/curves"
}

if [[ ${seeds%% *} != 0 && -z $(best mtdpo) ]]; then
    echo "error: other seeds take the rates that seed 0 found: bash scripts/real.sh 0 first" >&2
    exit 2
fi
[ -e "$base/COMPLETED" ] || make_base
for seed in $seeds; do
    out=$results/seed$seed
    mkdir -p "$out/validation"
    once "$out/offline.jsonl" eval "ranks='$torchrun' data"
    if [ "$seed" = 0 ]; then
        methods="$policies sweet-oracle"
        once "$results/validation.jsonl" step tasks-validation $py 01_generate_tasks.py --split validation --seed 0 \
            --num-tasks $num_validation --out "$results/validation.jsonl"
        validate base "$base"
        for round in $(seq "${NUM_RATES:-3}"); do
            settings=$(for method in $methods; do settings_of $method | sed -n ${round}p; done)
            [ $round != 1 ] || drawn_by=$(sed -n 3p <<< "$settings")
            one_round $settings
            report_search
            [ $round != 1 ] || measure
        done
    else
        methods=$policies
        settings=$(for method in $methods; do best $method; done)
        drawn_by=$(sed -n 3p <<< "$settings")
        one_round $settings
    fi
done
methods=$policies
[ "$(wc -w <<< "$seeds")" = 1 ] || report "$results/report" $seeds
