#!/usr/bin/env bash
# Over seeds: bash scripts/study.sh [--domain sql] [SEED …]   (0 1 2 3 4; results in out/study or out/sql/study; a second
# call resumes)
# The chain of run.sh for every seed on 500 test tasks, about 15 minutes of one core a seed; then SWEET with other
# critics and with oracles, multi-turn DPO with as many trained tokens as SWEET, and both methods on less data, an
# estimated 30 minutes of one core a seed; at last the first seed's critics compared. ROWS names the rows, as in row()
# (empty: the chain alone); FEW_TASKS (200) is the number of test tasks on which critics are compared.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
shift $taken
[ $domain != frontend ] || { echo "error: --domain frontend: the study is for backend and sql" >&2; exit 2; }
set_up_domain
seeds=${*:-0 1 2 3 4} rows=${ROWS-oracle oracle-patient tokens no-c no-norm regression value n200 n800}
results=${OUT:-out}/study
[ $domain = backend ] || results=${OUT:-out}/$domain/study
export TEST_TASKS=${TEST_TASKS:-500} SAMPLES=1
export py domain seed out results base num_train num_test rollout critic_settings rft_settings mtdpo_settings \
    sweet_settings

# ---------------------------------------------------------------------------------------------------------------------
# a process of one thread plays a seed's chain, or its other rows, from beginning to end; two at a time

candidates() { echo --candidates "$out/sweet/candidates.jsonl"; }    # all choose from those of the seed's SWEET
other() {                                                            # SWEET with a critic of another kind
    critic "critic-$1" "${@:2}"
    policy "sweet-$1" sweet --critic "$out/critic-$1" $(candidates)
}
one_seed() {
    seed=$1 out=$results/seed$1
    trap 'touch "$out/chain-failed"' EXIT
    data
    baselines
    critic critic
    policy sweet sweet --critic "$out/critic"
    touch "$out/chain-done"
    trap - EXIT
}
row() {                                                              # SEED NAME
    seed=$1 out=$results/seed$1
    local n=${2#n}
    until [ -e "$out/chain-done" ]; do
        [ ! -e "$out/chain-failed" ] || { echo "not played: $2 of seed $1, whose chain failed" >&2; return 1; }
        sleep 1
    done
    case $2 in
        oracle | oracle-patient) policy "sweet-$2" sweet --critic "$2" $(candidates) ;;
        tokens) policy mtdpo-tokens mtdpo --epochs 4 ;;              # about as many as SWEET, its critic included
        no-c) other no-c --no-privileged ;;
        no-norm) other no-norm --normalize none ;;
        regression) other regression --head regression --beta 0.1 ;; # of two, see docs/grid_critics.csv
        value) other value --head value ;;
        *)
            policy "mtdpo-n$n" mtdpo --num-trajectories "$n"
            critic "critic-n$n" --num-trajectories "$n"
            policy "sweet-n$n" sweet --num-trajectories "$n" --critic "$out/critic-n$n"
            ;;
    esac
}
export -f step result_of tasks data train critic evaluate train_policy policy baselines candidates other \
    one_seed row best_of

for seed in $seeds; do rm -f "$results/seed$seed/chain-failed"; done
{
    printf 'one_seed %s\n' $seeds
    for seed in $seeds; do
        for name in $rows; do echo "row $seed $name"; done
    done
} | two_at_a_time

# ---------------------------------------------------------------------------------------------------------------------
# the tables, each row beside what it is compared with

report() {                                                           # FOLDER BASELINE NAME…
    local files=() name
    for name in "${@:3}"; do files+=("$name=$(printf "$results/seed%s/$name.jsonl\n" $seeds | paste -sd,)"); done
    $py 05_evaluate.py "${files[@]}" --baseline "$2" --costs --overwrite --out "$results/$1-${seeds// /-}"
}
report chain mtdpo base rft mtdpo sweet
[ "$rows" ] || exit 0
rankings=
for name in $rows; do
    case $name in
        tokens) report tokens mtdpo mtdpo mtdpo-tokens sweet ;;
        n[0-9]*) report "$name" "mtdpo-$name" "mtdpo-$name" "sweet-$name" ;;
        *) rankings+=" sweet-$name" ;;
    esac
done
[ -z "$rankings" ] || report rankings sweet sweet $rankings

# ---------------------------------------------------------------------------------------------------------------------
# the critics of the first seed: best-of-N on a part of the test tasks, pair accuracy, correlation with returns

seed=${seeds%% *}
out=$results/seed$seed
critics=critic
for name in no-c no-norm regression; do                              # those among the rows
    case " $rows " in *" $name "*) critics+=" critic-$name" ;; esac
done
critics+=" critic-value"
case " $rows " in *" value "*) ;; *) critic critic-value --head value ;; esac
mkdir -p "$out/few"
head -n "${FEW_TASKS:-200}" "$out/test.jsonl" > "$out/few/test.jsonl"
for n in 1 4 16; do
    for name in $critics; do echo "best_of $name $out/$name $n"; done
    echo "best_of oracle oracle $n"
    [ "$n" = 16 ] || echo "best_of judge judge:$base $n"             # it compares one by one: slow
done | two_at_a_time
$py 05_evaluate.py $(cd "$out/few" && ls *@*.jsonl | sed "s|\(.*\)\.jsonl|\1=$out/few/&|") --overwrite \
    --out "$out/curves"
branches 100 8
$py scripts/critics.py --trajectories "$out/few/base.jsonl" \
    --critics $(for name in $critics; do echo "$name=$out/$name"; done) --returns "$out/few/branches.jsonl" \
    --overwrite --out "$out/critics"
