# Sourced by run.sh and by the other scripts, in the repository's root: the settings of the domains, and the steps
# of the chain (tasks, dialogues, critic, policies) as functions. The settings are those that scripts/tune.sh found best
# on validation tasks, of eight for each method (three with pages and queries). A domain of your own: one file in
# colbench/, a line in DOMAINS there, a case in take_domain and one in set_up_domain here.
. scripts/setup.sh
py=.venv/bin/python
# The shipped models are too small to gain by a GPU, and the figures of the docs are a CPU's. Where
# CUDA_VISIBLE_DEVICES names GPUs, they are used: a rank on each of the first two.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}
num_ranks=2
[[ -z $CUDA_VISIBLE_DEVICES || $CUDA_VISIBLE_DEVICES = *,* ]] || num_ranks=1
torchrun=".venv/bin/torchrun --standalone --nproc-per-node $num_ranks"

# take_domain "$@": sets `domain`, and `taken`, how many arguments at the front said so (--domain NAME).
take_domain() {
    domain=backend taken=0
    if [ "${1:-}" = --domain ]; then
        domain=${2:-} taken=2
    fi
    if [[ ! $domain =~ ^(backend|frontend|sql)$ ]]; then
        echo "error: --domain '$domain': must be backend, frontend or sql" >&2
        exit 2
    fi
}

# set_up_domain: installs what `domain` needs, and sets its settings.
# `sampling`: flags of SWEET's candidates; `sweet_batches`: of its training, not searched; `similarity`: how pages are
# compared; `rollout`: how dialogues are played.
set_up_domain() {
    case $domain in
        backend)
            setup_environment requirements.txt
            base=models/tiny num_train=800 num_test=300 similarity=
            sampling="--max-new-tokens 160" sweet_batches="--max-tokens 4096 --pairs-together"
            rollout="02_rollout.py --simulator rules --max-rounds ${ROUNDS:-8} --max-new-tokens 160"
            critic_settings="--beta 1 --lr 3e-4 --epochs 2"
            rft_settings="--lr 1e-3 --epochs 4"
            mtdpo_settings="--lr 1e-4 --nll-coef 0.3 --epochs 2"
            sweet_settings="--lr 3e-5 --nll-coef 0.3 $sampling $sweet_batches" ;;
        frontend)
            setup_environment requirements.txt scripts/frontend.txt
            setup_browser
            base=models/tiny_pages num_train=120 num_test=50 similarity="--similarity pixels"
            sampling="--data-frac 0.06 --max-new-tokens 220" sweet_batches=--pairs-together
            rollout="02_rollout.py --simulator rules $similarity --max-rounds ${ROUNDS:-4} --max-new-tokens 220"
            critic_settings="--beta 1 --lr 3e-4 --epochs 1"
            rft_settings="--lr 1e-3 --epochs 4"
            mtdpo_settings="--lr 1e-4 --nll-coef 0.3 --epochs 1"
            sweet_settings="--lr 1e-4 --nll-coef 0.3 $sampling $sweet_batches" ;;
        sql)
            setup_environment requirements.txt
            base=models/tiny_sql num_train=500 num_test=300 similarity=
            sampling="--max-new-tokens 100" sweet_batches="--max-tokens 4096 --pairs-together"
            rollout="02_rollout.py --simulator rules --max-rounds ${ROUNDS:-8} --max-new-tokens 100"
            critic_settings="--beta 1 --lr 3e-4 --epochs 2"
            rft_settings="--lr 3e-3 --epochs 4"
            mtdpo_settings="--lr 1e-4 --nll-coef 0.3 --epochs 2"
            sweet_settings="--lr 3e-5 --nll-coef 0.3 $sampling $sweet_batches" ;;
    esac
}

# few_dialogues: 320 dialogues in place of all that set_up_domain plays, the turns of all of them, and the settings that
# scripts/efficiency.sh found best for so many on validation tasks (docs/grid_efficiency.csv, docs/grid_efficiency_sql.csv).
# SWEET ranks with a reference that does not see c, as the published code does.
few_dialogues() {
    local ranked="--data-frac 1 --reference blind"
    case $domain in
        backend)
            num_train=80
            mtdpo_settings="--lr 3e-4 --nll-coef 0.3 --epochs 4"
            sweet_settings="--lr 3e-5 --nll-coef 0.3 $ranked $sampling $sweet_batches" ;;
        sql)
            num_train=80
            rft_settings="--lr 1e-3 --epochs 4"
            mtdpo_settings="--lr 1e-4 --nll-coef 0.3 --epochs 4"
            sweet_settings="--lr 3e-5 --nll-coef 0.3 --answer-coef 1 $ranked $sampling $sweet_batches" ;;
        frontend) ;;                                                 # not searched: all of its dialogues
    esac
}

# Runs a command, its output in a log; shows where it failed, how long it took, and what an earlier run had otherwise.
step() {                                                             # NAME COMMAND…
    local name=$1 begin=$SECONDS size
    shift
    size=$(stat -c %s "$out/$name.log" 2> /dev/null || echo 0)
    if ! "$@" >> "$out/$name.log" 2>&1; then
        tail -n 20 "$out/$name.log" >&2
        echo "failed: $name (whole log: $out/$name.log)" >&2
        return 1
    fi
    printf '%-36s %4d s  %s\n' "$out/$name" $((SECONDS - begin)) "$(result_of "$out/$name.log")"
    tail -c +$((size + 1)) "$out/$name.log" | grep ': begun with ' || true
}
two_at_a_time() { xargs -P 2 -d '\n' -I{} bash -euo pipefail -c '{}'; }                       # lines of commands
result_of() { grep -E '^(success|[a-z]+ similarity|held-out|writes) ' "$1" | tail -n 1; }    # the last result in a log

# ---------------------------------------------------------------------------------------------------------------------
# the steps; they read `out`, `seed`, and `ranks` (torchrun, or empty for one process)

tasks() {                                                            # SPLIT NUMBER SEED
    step "tasks-$1" $py 01_generate_tasks.py --domain $domain --split "$1" --num-tasks "$2" --seed "$3" \
        --out "$out/$1.jsonl"
}
data() {
    mkdir -p "$out"
    tasks train "${TRAIN_TASKS:-$num_train}" "$seed"
    tasks test "${TEST_TASKS:-$num_test}" 1000
    step rollout-offline ${ranks:-$py} $rollout --tasks "$out/train.jsonl" --agent $base --samples 4 --seed "$seed" \
        --out "$out/offline.jsonl"
}
train() { ${ranks:-$py} $1 --trajectories "$out/offline.jsonl" --model $base --seed "$seed" "${@:2}"; }
critic() { step "$1" train 03_train_critic.py $critic_settings --out "$out/$1" "${@:2}"; }
evaluate() {                                                         # NAME MODEL
    step "rollout-$1" ${ranks:-$py} $rollout --tasks "$out/test.jsonl" --agent "$2" --samples "${SAMPLES:-2}" \
        --seed "$seed" --out "$out/$1.jsonl"
}
train_policy() {                                                     # NAME METHOD more flags
    local settings=${2}_settings program=04_train_policy.py called=${2}_method
    [ ! -e "examples/$2.py" ] || program="-m examples.$2"            # a fork of 04
    step "$1" train "$program" --method "${!called:-$2}" ${!settings:-} --out "$out/$1" "${@:3}"
}
policy() {                                                           # NAME METHOD more flags
    train_policy "$@"
    evaluate "$1" "$out/$1"
}
baselines() {
    evaluate base $base
    policy rft rft
    policy mtdpo mtdpo
}

# ---------------------------------------------------------------------------------------------------------------------
# what scripts measure: critics on a part of the test tasks, in $out/few, and the table of a search

best_of() {                                                          # NAME CRITIC N more flags
    step "best-$1@$3" $py $rollout --tasks "$out/few/test.jsonl" --agent $base --seed "$seed" --best-of "$3" \
        --critic "$2" --out "$out/few/$1@$3.jsonl" "${@:4}"
}
branches() {                                                         # STATES SAMPLES: Monte-Carlo returns of turns
    step rollout-few $py $rollout --tasks "$out/few/test.jsonl" --agent $base --samples 4 --seed "$seed" \
        --out "$out/few/base.jsonl"                                  # pairs need several dialogues of a task
    step rollout-branches $py $rollout --tasks "$out/few/base.jsonl" --branch "$1" --branch-candidates 8 \
        --samples "$2" --agent $base --seed "$seed" --out "$out/few/branches.jsonl"
}
grid_table() {                                                       # METRICS FIRST-COLUMNS, from names such as A_B_C@D
    $py - "$1" "${2:-method,lr,beta,nll_coef,epochs}" <<'PYTHON'
import json, sys
metrics, first = json.load(open(sys.argv[1])), sys.argv[2]
keys = ("success_rate", "tests_passed", "mean_rounds", "all_known", "success_when_known", "pixel_similarity")
keys = [key for key in keys if all(key in m for m in metrics.values())]
print(first, *(key.removesuffix("_rate").removeprefix("mean_") for key in keys), "low,high",
      "trained_tokens,generated_tokens,minutes", sep=",")
for name, m in metrics.items():
    numbers = [f"{number:.3f}" for number in [*(m[key] for key in keys), *m["ci95"]]]
    costs = m["costs"]
    name, _, last = name.partition("@")
    cells = name.replace("_-", "_").split("_")
    if last:
        cells += [""] * (first.count(",") - len(cells)) + [last]     # a name that lacks settings of others
    print(*cells, *numbers, costs["trained_tokens"], costs["generated_tokens"], f"{costs['wall_s'] / 60:.1f}", sep=",")
PYTHON
}
