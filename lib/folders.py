"""What a model folder brings from elsewhere: damaged files become one line, a chat template has a limit of time."""
import contextlib
import functools
import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time

from colbench.schema import record
from lib.runtime import InputError, one_line, read_json

TEMPLATE_S = 5.0                                # CPU seconds for PROBES; honest templates take milliseconds
TEMPLATE_BYTES = 2 ** 30                        # of memory for PROBES
TEMPLATE_CHARS = 2 ** 20                        # of a probe's prompt
RENDER_S = 30.0                                 # CPU seconds of this process for one prompt
PROBE_WAIT_S = 60                               # by the clock, in case that the fork hangs by itself
MAX_LAYERS = 10_000
ANY_OBJECT = record({})
SLOW, BIG, LONG = 3, 4, 5                       # exit statuses of a probe

TURNS = [{"role": ("user", "assistant")[i % 2], "content": "What is it?"} for i in range(21)]
PROBES = [TURNS[:1], [{"role": "system", "content": "Help."}, *TURNS[:1]], TURNS[:3],
          [{"role": "system", "content": "Help."}, *TURNS]]


@contextlib.contextmanager
def loading(name):
    """What a model's files make libraries raise becomes an InputError of one line that begins with the model's name."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:
        raise InputError(f"{name}: needs more packages ({one_line(error)}); those of models that see: pip install -r "
                         "scripts/frontend.txt") from None
    except BaseException as error:              # a panic of tokenizers, torch's CheckpointException: no Exceptions
        reason = f"{type(error).__name__}: {one_line(error)}"
        if os.path.isdir(name):
            raise InputError(f"{name}: cannot be loaded ({reason}); its files are damaged, or of no model that "
                             "transformers knows") from None
        raise InputError(f"{name}: no model of this name could be loaded ({reason}); download it first and name its "
                         "folder, or use smollm2") from None


def check_config(name, config):
    """InputError for a configuration (transformers) that would build layers for hours, take kernels, which are code,
    from a hub, or drop shares that are none."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers is not None and not (type(layers) is int and 0 < layers <= MAX_LAYERS):
        raise InputError(f"{name}: config.json: num_hidden_layers is {str(layers)[:40]}, not 1 to {MAX_LAYERS:,}")
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for kind in ("_attn_implementation", "_experts_implementation"):
            value = str(getattr(part, kind, None))
            if "/" in value:
                raise InputError(f"{name}: config.json: {kind[1:]} names code of a hub ({value[:80]}), which is not "
                                 "run; take it out")
        for key, value in vars(part).items() if part else ():
            if key.endswith("dropout") and not (value is None or type(value) in (int, float) and 0 <= value < 1):
                raise InputError(f"{name}: config.json: {key} is {str(value)[:40]}, not from 0 to less than 1")


def check_texts(name):
    """InputError for a folder whose notes have texts that cannot be written again: transformers would say so when a
    training is saved."""
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = pathlib.Path(name, file)
        try:
            json.dumps(read_json(path, ANY_OBJECT) if path.exists() else None, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InputError(f"{path}: has a text that is no UTF-8 (a lone surrogate)") from None


def check_weights(name):
    """InputError for a folder whose weights are pickled alone: to read them can run code."""
    folder = pathlib.Path(name)
    pickled = [path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}")]
    if pickled and not [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]:
        raise InputError(f"{name}: its weights are pickled ({sorted(pickled)[0]}), which could run code; save them as "
                         "safetensors (save_pretrained of a new transformers does)")


# ---------------------------------------------------------------------------------------------------------------------
# chat templates are programs that come with a folder; transformers' sandbox keeps them from files, not from the clock

def render_chat(tokenizer, chat, **options):
    """The text of a chat (messages) by the template of a tokenizer or processor. InputError that names its folder where
    the template fails or, in the main thread (others get no signals), takes more than RENDER_S."""
    if chat[0]["role"] == "system" and not takes_system(tokenizer):
        chat = with_system_in_request(chat)
    try:
        return apply_template(tokenizer, chat, **options)
    except Exception as error:                  # a template can raise anything
        folder = getattr(tokenizer, "tokenizer", tokenizer).name_or_path
        raise InputError(f"{folder}: its chat template fails ({type(error).__name__}: {one_line(error)})") from None


def apply_template(tokenizer, chat, **options):
    """render_chat with the template's own errors, and a TimeoutError of what takes too long."""
    limited = threading.current_thread() is threading.main_thread()
    try:
        if limited:
            before = signal.signal(signal.SIGPROF, stop_rendering)
            signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        return tokenizer.apply_chat_template(chat, tokenize=False, **options)
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


@functools.lru_cache
def takes_system(tokenizer):
    """Whether a template renders a chat with a system message, which Gemma 2's and Mistral's raise an error at. True of
    one that renders no chat at all, or takes too long, as well: this is for render_chat to say."""
    request = {"role": "user", "content": "?"}
    try:
        render_chat(tokenizer, [request])
        apply_template(tokenizer, [{"role": "system", "content": "?"}, request])
    except (InputError, TimeoutError):
        return True
    except Exception:                           # a template can raise anything
        return False
    return True


def with_system_in_request(chat):
    """A chat whose system message opens the first message of the user, as Gemma 3's template has it."""
    system, request, *rest = chat
    return [{**request, "content": f"{system['content']}\n\n{request['content']}"}, *rest]


def stop_rendering(*_):
    raise TimeoutError(f"more than {RENDER_S:g} CPU seconds for one prompt")


template_faults = {}                            # {template: its fault, or None}: each is tried once a process


def check_template(name, tokenizer):
    """InputError where the chat template of a tokenizer or processor does not render short chats within TEMPLATE_S and
    TEMPLATE_BYTES. What fails in another way is for render_chat to say, since not every chat is one of ours."""
    if not isinstance(tokenizer.chat_template, str | dict):         # {name: template}: "default" is taken
        kind = type(tokenizer.chat_template).__name__
        raise InputError(f"{name}: its chat template is a {kind}, not a text")
    template = str(tokenizer.chat_template)
    if template not in template_faults:
        template_faults[template] = probe_fault(tokenizer)
    if fault := template_faults[template]:
        raise InputError(f"{name}: its chat template {fault}; mend chat_template.jinja or tokenizer_config.json there")


def probe_fault(tokenizer):
    """What is wrong with a template, or None. It is tried in a fork with limits, since one long operation (9**9**9)
    cannot be interrupted in this process. A fork is there in milliseconds, with all imports, and works in any thread;
    it runs Python alone: no model, no device, no files."""
    if sys.platform != "linux":                 # a fork may be killed for what it holds; render_chat has its own limit
        return None
    pid = os.fork()
    if pid == 0:
        try:
            probe(tokenizer)
        finally:
            os._exit(0)
    status = wait_for(pid)
    return {SLOW: f"takes more than {TEMPLATE_S:g} CPU seconds for a short chat",
            BIG: f"takes more than {TEMPLATE_BYTES / 2 ** 30:g} GiB of memory for a short chat",
            LONG: f"makes more than {TEMPLATE_CHARS:,} characters of a short chat"}.get(status)


def wait_for(pid):
    """The exit status of a probe: one of SLOW, BIG, LONG, or another where nothing is wrong."""
    end_s = time.monotonic() + PROBE_WAIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(status)
            return SLOW if status == -signal.SIGPROF else BIG if status < 0 else status
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 0
        time.sleep(0.002)


def probe(tokenizer):
    """In the fork: render PROBES within the limits; exits with BIG or LONG, is killed by SIGPROF where it is slow."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)                   # kills, also in the middle of one operation
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for chat in PROBES:
        for cue in (False, True):
            try:
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=cue)
            except MemoryError:
                os._exit(BIG)
            except Exception:
                continue
            if len(text) > TEMPLATE_CHARS:
                os._exit(LONG)
