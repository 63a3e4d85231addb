"""Writes a base model's card, README.md in its folder, from what was measured. scripts/model_card.sh starts this.

Reads   metrics.json (05) of the base model on test tasks; gates.json (scripts/critics.py --gates).
Writes  README.md of the model's folder, in the format of the Hugging Face hub.

    python scripts/model_card.py models/tiny --metrics out/card/backend/report/metrics.json \\
        --gates out/card/backend/gates/gates.json
"""
import hashlib
import pathlib
import sys
from typing import NamedTuple

from huggingface_hub import EvalResult, ModelCardData
from safetensors import safe_open

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from lib import VERSION  # noqa: E402  the repository's modules, wherever this is started
from lib.flags import argument_parser, text_flag  # noqa: E402
from lib.runtime import parse_json, read_text, run_stage, say  # noqa: E402
from lib.tables import interval  # noqa: E402


class Domain(NamedTuple):
    """What the card says of a base model beside what was measured."""

    flag: str                       # --domain of the scripts
    purpose: str                    # what the model does in a dialogue
    num_tasks: int                  # of training, in scripts/make_tiny.sh
    request: str                    # the first message of the example
    page: str                       # where the domain is described
    limits: tuple                   # further lines of the section


DOMAINS = {
    "tiny": Domain(
        flag="backend",
        purpose="asks a person about a small Python function, and writes it",
        num_tasks=4000,
        request="Can you write a function that works out the result of a player in our game?\\n"
                "def player_score(points, lives):",
        page="docs/results.md",
        limits=("It knows the functions of 14 task families, and no others.",)),
    "tiny_pages": Domain(
        flag="frontend",
        purpose="sends web pages to a person, who says what is wrong with them",
        num_tasks=1000,
        request="A website for an old bakery in our town.",
        page="docs/pages.md",
        limits=("It writes pages of this project's templates, and no others.",)),
    "tiny_sql": Domain(
        flag="sql",
        purpose="asks a person about an ambiguous question, looks into a database, and writes an SQL query",
        num_tasks=1500,
        request="Which are our best cities this year?\\ntravelers(id, name, status, city_id), "
                "tickets(id, traveler_id, price, tax, sold, flown), cities(id, name)",
        page="docs/sql.md",
        limits=("On the schemas that its training tasks leave out it solves hardly anything.",)),
}

# keys of metrics.json (05) that the card shows, with their names
MEASURES = {
    "success_rate": "success",
    "tests_passed": "hidden tests passed",
    "databases_agree": "hidden databases that agree",
    "success_seen": "success, seen schemas",
    "success_unseen": "success, unseen schemas",
    "all_known": "all known",
    "success_when_known": "success when known",
    "pixel_similarity": "pixel similarity",
    "mean_rounds": "rounds",
}

TEXT = """
# {name}: a base model of SWEET-RL, minimal

A Llama of {num_parameters:,} parameters with a word-level tokenizer.
In a dialogue it {purpose}.
`bash run.sh{domain_flag}` starts from it: it trains critics and policies by SWEET-RL (arXiv 2503.15478).
It makes a method that is meant for models of 8B parameters run on a laptop, and is of no other use.

## Training

`bash scripts/make_tiny.sh{domain_flag}` makes it from nothing.
It imitates {num_dialogues:,} scripted dialogues by maximum likelihood.
They are of {num_tasks:,} training tasks (`01_generate_tasks.py --domain {flag} --split train --seed 100`),
two dialogues of each of three kinds:

- clear requests that are answered at once;
- vague requests with a noisy scripted agent, which makes mistakes on purpose;
- vague requests with an agent that knows the reference solution, which stands in front of these dialogues.

The last kind teaches it to condition on a stated reference, as a pretrained model does. No data of others was used.

## Measured

`bash scripts/model_card.sh{domain_flag}`: {num_rows} dialogues on the test tasks of `run.sh`,
the human by rules, temperature 1, seed 0.
One run: the interval leaves other seeds out. {page} says what the measures mean.

{measures}
{gates}
## Limits

{limits}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("models/{name}")
tokenizer = AutoTokenizer.from_pretrained("models/{name}")
request = "{request}"
messages = [{{"role": "user", "content": request}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=220, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

Measured with version {version}. SHA-256 of `model.safetensors`: {digest}
"""

COMMON_LIMITS = (
    "Words of its training tasks are tokens of their own. Other words it reads letter by letter, and does not know.",
    "Its chat template leaves system messages out.",
    "It reads up to 2,048 tokens.",
    "Its training and test tasks share their templates. Only facts and wording differ.",
)


def shown_measures(metrics):
    """{key: (name, value)} of MEASURES that metrics.json has for the model."""
    return {key: (name, metrics[key]) for key, name in MEASURES.items() if key in metrics}


def metadata(name, metrics, num_tasks):
    """The front matter of the card."""
    results = []
    for key, (title, value) in shown_measures(metrics).items():
        results.append(EvalResult(
            task_type="text-generation",
            dataset_type=f"colbench-{DOMAINS[name].flag}-templates",
            dataset_name=f"ColBench's template tasks, {num_tasks} test tasks of run.sh",
            metric_type=key,
            metric_name=title,
            metric_value=round(value, 3)))
    return ModelCardData(
        language="en",
        license="mit",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sweet-rl", "colbench", "multi-turn", "base-model-of-a-benchmark"],
        model_name=name,
        eval_results=results)


def measures_table(metrics):
    """The measured values, with the interval of the first."""
    lines = ["| measure | value |", "| --- | --- |"]
    for place, (title, value) in enumerate(shown_measures(metrics).values()):
        text = f"{value:.3f}"
        if place == 0:
            text += f" {interval(metrics['ci95'])}"
        lines.append(f"| {title} | {text} |")
    return "\n".join(lines)


def gates_table(gates):
    """Does the model read the reference?"""
    lines = [
        "\nMean log-probability of a turn, without and with the reference solution `c` in front of the dialogue:\n",
        "| turn | n | without `c` | with `c` |",
        "| --- | --- | --- | --- |"]
    for kind, gate in gates.items():
        lines.append(f"| {kind} | {gate['n']} | {gate['without_c']:.2f} | {gate['with_c']:.2f} |")
    return "\n".join(lines) + "\n"


def count_parameters(weights):
    with safe_open(weights, "np") as file:
        return sum(file.get_tensor(name).size for name in file.keys())


def card(folder, metrics, gates):
    """The text of README.md for a model folder, from its metrics.json and gates.json (None: it has no gates)."""
    domain = DOMAINS[folder.name]
    weights = folder / "model.safetensors"
    domain_flag = ""
    if domain.flag != "backend":
        domain_flag = f" --domain {domain.flag}"
    gate_text = ""
    if gates:
        gate_text = gates_table(gates)
    front = metadata(folder.name, metrics, metrics["n"] // 2)
    body = TEXT.format(
        name=folder.name,
        num_parameters=count_parameters(weights),
        purpose=domain.purpose,
        domain_flag=domain_flag,
        flag=domain.flag,
        num_tasks=domain.num_tasks,
        num_dialogues=domain.num_tasks * 6,
        num_rows=metrics["n"],
        page=domain.page,
        measures=measures_table(metrics),
        gates=gate_text,
        limits="\n".join(f"- {limit}" for limit in (*domain.limits, *COMMON_LIMITS)),
        request=domain.request,
        version=VERSION,
        digest=hashlib.sha256(weights.read_bytes()).hexdigest())
    return f"---\n{front.to_yaml()}\n---\n{body}"


def parse_args(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=text_flag, choices=[f"models/{name}" for name in DOMAINS], help="of the model")
    parser.add_argument("--metrics", type=text_flag, required=True, help="metrics.json of 05, with the name base")
    parser.add_argument("--gates", type=text_flag, help="gates.json of scripts/critics.py")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    metrics = parse_json(read_text(args.metrics), args.metrics)
    gates = None
    if args.gates:
        gates = parse_json(read_text(args.gates), args.gates)
    path = pathlib.Path(args.folder, "README.md")
    path.write_text(card(path.parent, metrics["base"], gates))
    say(f"writes {path}")


if __name__ == "__main__":
    run_stage(main)
