# Sourced by run.sh and tests/run.sh in the repository's root: makes .venv and installs what is missing into it.
# setup_environment [requirements files …]
setup_environment() {
    # An installed torch that satisfies requirements.txt is used as it is.
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv --system-site-packages .venv
    local file mark
    for file in "$@"; do
        mark=".venv/installed-$(sha256sum "$file" | cut -c1-16)"
        if [ ! -e "$mark" ]; then
            echo "installing $file"
            .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file"
            touch "$mark"
        fi
    done
    # One thread a process: the stages run side by side. Offline: nothing here needs a hub.
    export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
}
