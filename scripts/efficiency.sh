#!/usr/bin/env bash
# Success against the number of dialogues: bash scripts/efficiency.sh [--domain sql] [SEED …]
# (10 11 12 13 14; results in out/efficiency or out/sql/efficiency; a second call resumes)
# Each arm of ARMS is trained on the first 80, 160 … of a seed's offline dialogues (SIZES; whole tasks, nested subsets)
# and plays the test tasks (TEST_TASKS, 300, SAMPLES, 2, dialogues each):
#     rft, mtdpo       the baselines
#     tenth            SWEET as the paper has it: eq. 3 as printed, a tenth of the dialogues
#     printed          SWEET with all turns, eq. 3 as printed
#     released         SWEET with all turns, ranked with a reference that does not see c, as the published code does
#     blind            SWEET with all turns, its critic trained with such a reference, too
#     untrained        the base model with such a reference in place of a critic
#     answers          as released, and the likelihood of logged right answers as a further term (04 --answer-coef 1)
#     sweet            the best of these on validation tasks: released; with queries answers
#     NAME             a fork of 04 of yours, examples/NAME.py, with --method NAME_method (NAME) and the flags
#                      NAME_settings, where {critic} and {candidates} stand for the files of the arms with all turns:
#                      export METHODS="mine sweet mtdpo" mine_method=sweet
#                      export mine_settings="--critic {critic} --candidates {candidates} --data-frac 1 --lr 3e-5"
# METHODS is another name for ARMS.
# The arms with all turns choose from the same candidates, whose sampling 05 does not count as theirs (it says so); what
# it costs is in candidates@N/costs.json. Two processes of one thread at a time.
# The arms with all turns are played with at most MOST_ALL_TURNS dialogues (320): their cost grows with the turns.
# SEARCH=1 plays every rate of an arm (RATES, or three about what the arm's method is known to need; mtdpo: with each of
# EPOCHS, 2 4 8) on validation tasks (VALIDATION_TASKS, 300; one dialogue each) instead: seed 9 and size 320, unless
# named. Its table is out/efficiency-search/table.csv. Ours: docs/grid_efficiency.csv, docs/grid_efficiency_sql.csv.
# To play an arm again with other settings or other code: rm -r out/efficiency/seed*/NAME@*
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
shift $taken
[ $domain != frontend ] || { echo "error: --domain frontend: this script is for backend and sql" >&2; exit 2; }
set_up_domain
search=${SEARCH:-} results=${OUT:-out} all=$((4 * ${TRAIN_TASKS:-$num_train}))
[ $domain = backend ] || results=$results/$domain
results=$results/efficiency
arms=${METHODS:-${ARMS:-rft mtdpo tenth untrained printed released blind answers}}
most_all_turns=${MOST_ALL_TURNS:-320}
if [ "$search" ]; then
    results=$results-search sizes=${SIZES:-320} seeds=${*:-9} samples=1
else
    sizes=${SIZES:-80 160 320 800 $all} seeds=${*:-10 11 12 13 14} samples=${SAMPLES:-2}
fi
for name in $arms; do
    [[ $name =~ ^(rft|mtdpo|tenth|untrained|printed|released|blind|answers|sweet)$ || -e examples/$name.py ]] ||
        { echo "error: ARMS: no arm $name, and no examples/$name.py" >&2; exit 2; }
done
gain_settings=${gain_settings:-$sweet_settings --data-frac 1 --candidates {candidates\}}
signed_settings=${signed_settings:---critic {critic\} --lr 1e-3 --epochs 2}

# Flags of an arm for at most 800 dialogues, and for more: the best of the search with 320 (docs/grid_efficiency.csv,
# docs/grid_efficiency_sql.csv), whose rates are too large for 800 (docs/notebook.md). With queries rft, untrained, printed and blind were not searched.
arm_flags() {                                                        # ARM SIZE
    local few=
    [ "$2" -gt 800 ] || few=1
    case $domain-$1-$few in
        backend-mtdpo-*) echo ${few:+--lr 3e-4 --epochs 4} ;;
        backend-tenth-*) echo ${few:+--lr 3e-4} ;;
        sql-rft-*) echo ${few:+--lr 1e-3} ;;
        sql-mtdpo-*) echo ${few:+--epochs 4} ;;
        sql-tenth-*) echo ${few:+--lr 1e-4} ;;
        sql-untrained-* | sql-printed-* | sql-blind-*) echo --lr 1e-5 ;;
        *) ;;                                                        # 3e-5, as chain.sh has it; a fork's own settings
    esac
}
# Rates of the search: three about what the arm's method is known to need.
search_rates() {                                                     # ARM
    case $1 in
        rft) echo ${RATES:-3e-4 1e-3 3e-3} ;;
        signed) echo ${RATES:-3e-4 1e-3 3e-3} ;;
        mtdpo | tenth) echo ${RATES:-3e-5 1e-4 3e-4} ;;
        *) echo ${RATES:-1e-5 3e-5 1e-4} ;;
    esac
}
arms_of() {                                                          # SIZE: the arms that are played with so many
    local name
    for name in $arms; do
        [[ $name =~ ^(rft|mtdpo|tenth|signed)$ ]] || [ "$1" -le "$most_all_turns" ] || continue
        echo $name
    done
}
export SAMPLES=$samples
export py domain results base num_train num_test rollout critic_settings rft_settings mtdpo_settings sweet_settings search
export gain_settings signed_settings

offline() {                                                          # SEED
    seed=$1 out=$results/seed$1
    mkdir -p "$out"
    tasks train "${TRAIN_TASKS:-$num_train}" "$seed"
    if [ "$search" ]; then
        step tasks-validation $py 01_generate_tasks.py --domain $domain --split validation --seed 0 \
            --num-tasks "${VALIDATION_TASKS:-300}" --out "$out/test.jsonl"    # where `evaluate` looks
    else
        tasks test "${TEST_TASKS:-$num_test}" 1000
    fi
    step rollout-offline $py $rollout --tasks "$out/train.jsonl" --agent $base --samples 4 --seed "$seed" \
        --out "$out/offline.jsonl"
}
sweet_flags() {                                                      # ARM SIZE
    case $1-$domain in
        sweet-sql) sweet_flags answers "$2"; return ;;
        sweet-*) sweet_flags released "$2"; return ;;
    esac
    case $1 in
        tenth | printed) echo --critic "$out/critic@$2" ;;
        released) echo --critic "$out/critic@$2" --reference blind ;;
        answers) echo --critic "$out/critic@$2" --reference blind --answer-coef 1 ;;
        blind) echo --critic "$out/critic-blind@$2" ;;
        untrained) echo --critic untrained --reference blind ;;
    esac
    # All turns; the candidates are those of the first arm that needs them.
    [ "$1" = tenth ] || echo --data-frac 1 --candidates "$out/candidates@$2/candidates.jsonl"
}
prepare() {                                                          # SEED SIZE ARM…: critics and candidates
    seed=$1 out=$results/seed$1
    local size=$2 needed=" ${*:3} " name settings
    for name in "${@:3}"; do
        settings=${name}_settings
        [[ ! -e examples/$name.py || ! ${!settings:-} =~ \{critic\} ]] || needed+=" tenth "
        [[ ! -e examples/$name.py || ! ${!settings:-} =~ \{candidates\} ]] || needed+=" untrained "
    done
    [[ ! $needed =~ \ (tenth|printed|released|answers|sweet)\  ]] || critic "critic@$size" --num-trajectories "$size"
    [[ ! $needed =~ \ blind\  ]] || critic "critic-blind@$size" --num-trajectories "$size" --reference blind
    [[ ! $needed =~ \ (untrained|printed|released|blind|answers|sweet)\  ]] ||
        step "candidates@$size" train 04_train_policy.py --method sweet $sweet_settings --critic oracle \
            --data-frac 1 --num-trajectories "$size" --max-steps 1 --out "$out/candidates@$size"
}
arm() {                                                              # SEED SIZE ARM NAME more flags
    seed=$1 out=$results/seed$1
    local settings=${3}_settings flags
    case $3 in
        rft | mtdpo) policy "$4" "$3" --num-trajectories "$2" "${@:5}" ;;
        tenth | untrained | printed | released | blind | answers | sweet)
            policy "$4" sweet --num-trajectories "$2" $(sweet_flags "$3" "$2") "${@:5}" ;;
        *)                                                           # a fork
            flags=${!settings:-}
            flags=${flags//"{critic}"/$out/critic@$2}
            declare "$settings=${flags//"{candidates}"/$out/candidates@$2/candidates.jsonl}"
            policy "$4" "$3" --num-trajectories "$2" "${@:5}" ;;
    esac
}
export -f step result_of tasks train critic evaluate train_policy policy offline sweet_flags prepare arm

for seed in $seeds; do echo "offline $seed"; done | two_at_a_time
for seed in $seeds; do
    for size in $sizes; do echo "prepare $seed $size" $(arms_of $size); done
done | two_at_a_time
names() {                                                            # SIZE ARM: NAME FLAGS… of each run of an arm
    local rate passes
    if [ ! "$search" ]; then
        echo "$2@$1 $(arm_flags "$2" "$1")"
        return
    fi
    for rate in $(search_rates "$2"); do
        if [ "$2" = mtdpo ]; then
            for passes in ${EPOCHS:-2 4 8}; do echo "$2_${rate}_${passes}@$1 --lr $rate --epochs $passes"; done
        else
            echo "$2_${rate}_-@$1 --lr $rate"
        fi
    done
}
for seed in $seeds; do
    for size in $sizes; do
        for name in $(arms_of $size); do
            names "$size" "$name" | while read -r run; do echo "arm $seed $size $name $run"; done
        done
    done
done | two_at_a_time

# ---------------------------------------------------------------------------------------------------------------------
# the table; the baseline is multi-turn DPO with all dialogues, or with the most that were played

files=() largest=$(printf '%s\n' $sizes | sort -n | tail -n 1) baseline=
for size in $sizes; do
    for name in $(arms_of $size); do
        while read -r run _; do
            files+=("$run=$(printf "$results/seed%s/$run.jsonl\n" $seeds | paste -sd,)")
        done < <(names "$size" "$name")
    done
done
[[ "$search" || ! " $arms " =~ " mtdpo " ]] || baseline="--baseline mtdpo@$largest"
$py 05_evaluate.py "${files[@]}" $baseline --costs --overwrite --out "$results/report-${seeds// /-}"
first=method,dialogues
[ -z "$search" ] || first=method,lr,epochs,dialogues
grid_table "$results/report-${seeds// /-}/metrics.json" $first | tee "$results/table.csv"
