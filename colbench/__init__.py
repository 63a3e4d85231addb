"""ColBench: tasks that an agent can only solve together with a user. This folder imports nothing else from the
repository, so it can be copied on its own; only pages need further packages.

In ten lines: a task, a question to the rule-based user simulator, and two answers scored by the confined scorer:

    import asyncio, random
    from colbench import backend as domain
    rng = random.Random(0)
    task = domain.make_task(rng, "grade", "none", lambda task_id: None)     # a str: the draw was rejected
    history = [{"role": "user", "content": task["problem_description"]}]
    with domain.Environment() as environment:
        history.append({"role": "assistant", "content": "What should the pass mark be?"})
        print(asyncio.run(environment.rule_reply(task, history, rng)))
        for code in (task["ground_truth"], "def grade(score): return 'good'"):
            print(asyncio.run(environment.score([(task, code)]))[0]["reward"])

domain.py defines domains. To add one, write a module with a subclass of Domain, import it here, and add an object of it
to DOMAINS.
"""
import random

from colbench.backend import Backend
from colbench.domain import check_domain, Domain, Environment, task_id, task_kind
from colbench.frontend import Frontend
from colbench.own import Own
from colbench.schema import check_keys, check_kind, InputError
from colbench.sql import Sql

__all__ = ["backend", "check_keys", "InputError", "Domain", "domain_of", "DOMAINS", "Environment", "frontend",
           "in_split", "make_tasks", "own", "SPLITS", "sql", "task_id"]

# `from colbench import backend` imports this object; `from colbench.backend import …` imports other names of its module
backend, frontend, own, sql = Backend(), Frontend(), Own(), Sql()
DOMAINS = {"backend": backend, "frontend": frontend, "sql": sql}

SPLITS = {"train": range(0, 80), "validation": range(80, 90), "test": range(90, 100)}


def in_split(task_id, split):
    """True if a task is in a split, by its id (a hash of its content); "all" contains every task."""
    try:
        number = int(task_id, 16)
    except (TypeError, ValueError):
        raise InputError(f'"task_id" {task_id!r} is not hexadecimal; colbench.task_id makes one') from None
    return split == "all" or number % 100 in SPLITS[split]


ANY_TASK = task_kind({}, {"test_cases": dict, "databases": list, "facts": list, "slots": list})


def domain_of(task, where="task"):
    """The domain of a task. Raises InputError unless exactly one domain owns it."""
    check_kind(task, ANY_TASK, where)
    if own.owns(task):
        return own
    for domain in DOMAINS.values():
        check_domain(domain)
    owners = [name for name, domain in DOMAINS.items() if domain.owns(task)]
    if not owners:
        names = ", ".join(DOMAINS)
        raise InputError(f'{where}: missing "test_cases", or the fields of another domain ({names})')
    if len(owners) > 1:
        raise InputError(f"{where}: has the fields of several domains ({', '.join(owners)})")
    return DOMAINS[owners[0]]


MOST_DRAWS_IN_VAIN = 300            # consecutive rejected draws after which a family counts as exhausted


def make_tasks(domain, num_tasks, seed, split, told):
    """num_tasks template tasks without repeats. The families take turns; an exhausted one is dropped."""
    check_domain(domain)
    rng, tasks = random.Random(seed), {}

    def accept(name):
        if not in_split(name, split):
            return "of another split"
        return "repeated" if name in tasks else None

    families = sorted(domain.FAMILIES)
    misses = dict.fromkeys(families, 0)
    while len(tasks) < num_tasks:
        if not families:
            raise InputError(f"--num-tasks {num_tasks}: there are only {len(tasks)} different tasks "
                                f"(--split {split})")
        family = families[len(tasks) % len(families)]
        task = domain.make_task(rng, family, told, accept)
        if isinstance(task, dict):
            tasks[task["task_id"]] = task
            misses[family] = 0
            continue
        misses[family] += 1
        if misses[family] == MOST_DRAWS_IN_VAIN:
            families.remove(family)
    return list(tasks.values())
